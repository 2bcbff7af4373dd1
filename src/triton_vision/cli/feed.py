"""Hands images to the client as they are found, and asks again where the server was too busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from triton_vision.cli.find import Found

if TYPE_CHECKING:
    from triton_vision_client import ImageClient, Result

# The client fills requests and keeps several under way. Where the list comes slowly, what is there goes out after
# this many seconds.
LINGER_S = 0.3
# Pauses before images that the server had no room for are sent again.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0


class Feed:
    """The images of one run.

    Args:
        items: the images; None where there is nothing new yet.
        on_given: called with each image that is handed to the client.

    Attributes:
        given: how many images have been handed to the client.
        ended: whether there are no more.
        failure: what made the items end early, if anything did.
    """

    def __init__(self, items: Iterator[Found | None], on_given: Callable[[Found], None]) -> None:
        self._items, self._on_given = items, on_given
        self._under_way: deque[Found] = deque()
        self._moved = time.monotonic()
        self.given = 0
        self.ended = False
        self.failure: Exception | None = None

    def results(self, client: ImageClient, top_k: int | None, patience: float) -> Generator[Result, None, None]:
        """The answers, in order.

        Args:
            patience: seconds for which a server may be too busy to take anything.

        Raises:
            VisionClientError: a request failed as a whole.
            ListError, OSError: the items ended early; what was under way has been yielded.
        """
        from triton_vision_client import ServerOverloadedError

        pause = FIRST_PAUSE_S
        while self._under_way or not self.ended:
            try:
                for result in client.classify_many(self._burst(), top_k=top_k):
                    self._under_way.popleft()
                    self._moved = time.monotonic()
                    pause = FIRST_PAUSE_S
                    yield result
            except ServerOverloadedError:
                if time.monotonic() + pause > self._moved + patience:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        if self.failure is not None:
            raise self.failure

    def _burst(self) -> Iterator[Found]:
        """Images for one call of classify_many; ends where they come so slowly that those under way come first."""
        yield from list(self._under_way)
        while not self.ended:
            try:
                item = next(self._items)
            except StopIteration:
                self.ended = True
            # Whatever it is, the answers to what was found before come first.
            except Exception as error:  # noqa: BLE001
                self.ended, self.failure = True, error
            else:
                if item is not None:
                    if not self._under_way:
                        self._moved = time.monotonic()
                    self._under_way.append(item)
                    self.given += 1
                    self._on_given(item)
                    yield item
                elif self._under_way and time.monotonic() > self._moved + LINGER_S:
                    return
