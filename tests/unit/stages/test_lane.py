"""The threads beside the stage's own: what is short passes what is long, and what is owed is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from triton_vision.run import Debt
from triton_vision.stages import Overloaded
from triton_vision.stages.lane import SHORT_S, Lane


class Book:
    """A Debt that notes what it is told."""

    def __init__(self) -> None:
        self.owed = False
        self.paid = threading.Event()

    def begin(self) -> bool:
        self.owed = True
        self.paid.clear()
        return True

    def end(self) -> None:
        self.owed = False
        self.paid.set()


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def lane(book: Book) -> Iterator[Lane]:
    made = Lane("jobs", patience=4.0, debt=cast(Debt, book))
    yield made
    made.close(10.0)


def test_short_jobs_pass_long_ones(lane: Lane, book: Book) -> None:
    go, done = threading.Event(), threading.Event()
    assert lane.open()
    lane.put(10.0, go.wait)
    lane.put(SHORT_S, done.set)
    lane.settle()
    assert done.wait(10)
    with pytest.raises(Overloaded, match=r"about 15\.0 s"):
        lane.put(5.0, go.wait)
    assert book.owed
    go.set()
    assert book.paid.wait(10)


def test_a_job_that_takes_longer_than_expected_goes_among_the_long_ones(lane: Lane, book: Book) -> None:
    go, begun, done = threading.Event(), threading.Event(), threading.Event()

    def longer() -> None:
        begun.set()
        go.wait()

    assert lane.open()
    lane.put(1.0, lambda: lane.put(10.0, longer))
    lane.put(1.0, done.set)
    lane.settle()
    assert done.wait(10)
    assert begun.wait(10)
    assert book.owed
    go.set()
    assert book.paid.wait(10)


def test_what_is_put_while_the_last_job_ends_is_owed(lane: Lane, book: Book) -> None:
    go, first, second = threading.Event(), threading.Event(), threading.Event()
    assert lane.open()
    lane.put(1.0, first.set)
    # The first may end now; it must not end the debt of the second, which is put before ``settle``.
    assert first.wait(10)
    lane.put(5.0, lambda: second.set() or go.wait())  # type: ignore[func-returns-value]
    assert second.wait(10)
    assert book.owed
    lane.settle()
    assert book.owed
    go.set()
    assert book.paid.wait(10)
    # Nothing was put: nothing is owed after all.
    assert lane.open()
    assert book.owed
    lane.settle()
    assert not book.owed


def test_closing_forgets_what_waits(book: Book) -> None:
    lane = Lane("jobs", patience=4.0, debt=cast(Debt, book))
    go, begun, second = threading.Event(), threading.Event(), threading.Event()
    lane.put(1.0, lambda: begun.set() or go.wait())  # type: ignore[func-returns-value]
    lane.put(1.0, second.set)
    assert begun.wait(10)
    closer = threading.Thread(target=lane.close, args=(10.0,))
    closer.start()
    while not lane._closing:
        pass
    go.set()
    closer.join()
    assert not second.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "jobs"]
