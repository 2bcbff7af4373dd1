"""Handing images to the client: a server that is too busy, a source that fails or is slow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from triton_vision_client import Result, ServerOverloadedError

from triton_vision.cli import feed as feed_module
from triton_vision.cli.feed import Feed
from triton_vision.cli.lists import ListError


class Client:
    """Answers like classify_many, some images at a time; too busy for as many calls as it is told to be."""

    def __init__(self, busy: int = 0, after: int = 0) -> None:
        self.busy, self.after = busy, after
        self.calls: list[list[Any]] = []

    def classify_many(self, images: Iterable[Any], *, top_k: int | None) -> Iterator[Result]:
        assert top_k == 3
        call: list[Any] = []
        self.calls.append(call)
        waiting: list[Any] = []
        for image in images:
            call.append(image)
            waiting.append(image)
            if len(waiting) == 4:
                yield from self._answer(waiting)
        yield from self._answer(waiting)

    def _answer(self, waiting: list[Any]) -> Iterator[Result]:
        while waiting:
            if self.busy and self.after == 0:
                self.busy -= 1
                raise ServerOverloadedError("its queue is full")
            self.after = max(0, self.after - 1)
            yield Result(waiting.pop(0))


def results(feed: Feed, client: Client, patience: float = 5.0) -> Iterator[Any]:
    return (result.source for result in feed.results(client, 3, patience))  # type: ignore[arg-type]


NAMES = [f"{number}.jpg" for number in range(10)]


def test_what_a_busy_server_did_not_take_is_sent_again_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FIRST_PAUSE_S", 0.001)
    given: list[Any] = []
    feed = Feed(iter(NAMES), given.append)
    client = Client(busy=2, after=6)
    assert list(results(feed, client)) == NAMES
    assert given == NAMES
    assert [call[0] for call in client.calls] == ["0.jpg", "6.jpg", "6.jpg"]
    assert feed.given == 10


def test_a_server_that_stays_busy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "FIRST_PAUSE_S", 0.001)
    feed = Feed(iter(NAMES), lambda _: None)
    with pytest.raises(ServerOverloadedError):
        list(results(feed, Client(busy=1_000_000), patience=0.1))


def test_a_source_that_fails_does_so_after_its_answers() -> None:
    def source() -> Iterator[str]:
        yield from NAMES
        raise ListError("this is not a list")

    feed = Feed(source(), lambda _: None)
    answers = results(feed, Client())
    assert [next(answers) for _ in NAMES] == NAMES
    with pytest.raises(ListError):
        next(answers)


def test_a_slow_source_does_not_keep_answers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LINGER_S", 0.05)

    def source() -> Iterator[str | None]:
        yield "a.jpg"
        began = time.monotonic()
        while not seen:
            assert time.monotonic() < began + 10
            yield None
        yield "b.jpg"

    seen: list[Any] = []
    for name in results(Feed(source(), lambda _: None), Client()):
        seen.append(name)  # noqa: PERF402 - the source looks at it
    assert seen == ["a.jpg", "b.jpg"]
