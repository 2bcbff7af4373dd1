"""Two sides answering at once, each at its own pace, followed image by image."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from triton_vision.accuracy.compare import Answer

# Seconds after which the progress is shown even if nothing has come.
TICK_S = 0.2


def follow(
    sides: dict[str, Iterable[Answer]], total: int, tick: Callable[[dict[str, int]], None]
) -> Iterator[tuple[Answer, ...]]:
    """All sides' answers to image 0, then to image 1, and so on.

    A side that is ahead does not wait; its answers (half a kilobyte each) do.

    Args:
        sides: name -> its answers in the order of the images, ``total`` of them; read in a thread for each.
        tick: called with how many answers each side has given.

    Raises:
        Exception: whatever a side raises. The other sides' threads end when their sources do.
    """
    arrived: queue.SimpleQueue[tuple[str, Answer | Exception]] = queue.SimpleQueue()

    def read(name: str, answers: Iterable[Answer]) -> None:
        try:
            count = 0
            for answer in answers:
                arrived.put((name, answer))
                count += 1
            if count < total:
                raise EOFError(f"the {name} has answered {count} of {total} images")
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            arrived.put((name, error))

    for name, answers in sides.items():
        threading.Thread(target=read, args=(name, answers), daemon=True).start()
    counts = dict.fromkeys(sides, 0)
    waiting: dict[str, deque[Answer]] = {name: deque() for name in sides}
    given = 0
    while given < total:
        try:
            name, answer = arrived.get(timeout=TICK_S)
        except queue.Empty:
            tick(counts)
            continue
        if isinstance(answer, Exception):
            raise answer
        counts[name] += 1
        waiting[name].append(answer)
        tick(counts)
        if all(waiting.values()):
            yield tuple(pile.popleft() for pile in waiting.values())
            given += 1
