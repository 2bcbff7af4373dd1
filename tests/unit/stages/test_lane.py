"""The threads beside the stage's own: what is short passes what is long, and what is owed is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from triton_vision.run import Debt
from triton_vision.stages import Overloaded
from triton_vision.stages.lane import SHORT_S, Job, Lane


class Book:
    """A Debt that notes what it is told."""

    def __init__(self) -> None:
        self.owed = self.called_in = False
        self.paid = threading.Event()

    def begin(self) -> bool:
        self.owed = True
        self.paid.clear()
        return True

    def is_called_in(self) -> bool:
        return self.called_in

    def end(self) -> None:
        self.owed = False
        self.paid.set()


def wait_for(event: threading.Event, begun: threading.Event | None = None) -> Job:
    """A job that lasts until then."""

    def job(late: bool) -> None:  # noqa: ARG001 - a job's signature
        if begun is not None:
            begun.set()
        event.wait()

    return job


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
    lane.put(10.0, wait_for(go))
    lane.put(SHORT_S, wait_for(go), sure=False)
    lane.put(SHORT_S, lambda _: done.set())
    lane.settle()
    assert done.wait(10)
    with pytest.raises(Overloaded, match=r"about 15\.0 s"):
        lane.put(5.0, wait_for(go))
    assert book.owed
    go.set()
    assert book.paid.wait(10)


def test_a_job_that_takes_longer_than_expected_goes_among_the_long_ones(lane: Lane, book: Book) -> None:
    go, begun, done = threading.Event(), threading.Event(), threading.Event()

    assert lane.open()
    lane.put(1.0, lambda _: lane.put(10.0, wait_for(go, begun)))
    lane.put(1.0, lambda _: done.set())
    lane.settle()
    assert done.wait(10)
    assert begun.wait(10)
    assert book.owed
    go.set()
    assert book.paid.wait(10)


def test_what_is_put_while_the_last_job_ends_is_owed(lane: Lane, book: Book) -> None:
    go, first, second = threading.Event(), threading.Event(), threading.Event()
    assert lane.open()
    lane.put(1.0, lambda _: first.set())
    # The first may end now; it must not end the debt of the second, which is put before ``settle``.
    assert first.wait(10)
    lane.put(5.0, wait_for(go, second))
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


def test_it_is_too_late_for_what_waits_when_the_process_is_to_be_replaced(lane: Lane, book: Book) -> None:
    go, begun = threading.Event(), threading.Event()
    told: list[bool] = []
    assert lane.open()
    lane.put(1.0, wait_for(go, begun))
    lane.put(1.0, told.append)
    lane.settle()
    assert begun.wait(10)
    book.called_in = True
    go.set()
    assert book.paid.wait(10)
    assert told == [True]


def test_closing_forgets_what_waits(book: Book) -> None:
    lane = Lane("jobs", patience=4.0, debt=cast(Debt, book))
    go, begun, second = threading.Event(), threading.Event(), threading.Event()
    lane.put(1.0, wait_for(go, begun))
    lane.put(1.0, lambda _: second.set())
    assert begun.wait(10)
    closer = threading.Thread(target=lane.close, args=(10.0,))
    closer.start()
    while not lane._closing:
        pass
    go.set()
    closer.join()
    assert not second.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "jobs"]
