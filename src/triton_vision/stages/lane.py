"""Threads beside the stage's own, for requests that take long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from triton_vision.run import Debt
from triton_vision.stages.errors import Overloaded

# What is expected to take at most so many seconds never waits for what takes more.
SHORT_S = 2.0


class Lane:
    """Does short jobs one after the other, and long ones, too, beside them.

    Args:
        name: of the threads.
        patience: seconds of work that may wait, of either kind; beyond that a new job is turned away.
        debt: tells the server's keeper that answers are owed.
    """

    def __init__(self, name: str, patience: float, debt: Debt) -> None:
        self._patience = patience
        self._debt = debt
        # Seconds and job, the short ones and the long ones; the first of each is at work.
        self._jobs: tuple[deque[tuple[float, Callable[[], object]]], ...] = (deque(), deque())
        self._changed = threading.Condition()
        self._threads: dict[bool, threading.Thread] = {}
        self._name = name
        self._opened = self._closing = False

    def open(self) -> bool:
        """Whether jobs are taken now; ``settle`` must follow when they have been put."""
        with self._changed:
            # Set until ``settle``: the last job may end before the next is put, and must not end the debt with it.
            self._opened = any(self._jobs) or self._debt.begin()
            return self._opened

    def settle(self) -> None:
        """All jobs have been put that ``open`` was called for, if it was."""
        if not self._opened:
            return
        with self._changed:
            self._opened = False
            if not any(self._jobs):
                self._debt.end()

    def put(self, seconds: float, job: Callable[[], object]) -> None:
        """Takes a job that is expected to need so many seconds; a job may put itself again.

        Raises:
            Overloaded: more is waiting than there is patience for.
        """
        long = seconds > SHORT_S
        jobs = self._jobs[long]
        with self._changed:
            waiting = sum(needed for needed, _ in jobs)
            if waiting > self._patience:
                raise Overloaded(waiting + seconds)
            jobs.append((seconds, job))
            self._changed.notify_all()
            if long not in self._threads:
                self._threads[long] = threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True)
                self._threads[long].start()

    def close(self, seconds: float) -> None:
        """Forgets what is waiting, and waits so long for what is being done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(seconds)

    def _work(self, jobs: deque[tuple[float, Callable[[], object]]]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: jobs or self._closing)
                if self._closing:
                    return
                _, job = jobs[0]
            job()
            with self._changed:
                jobs.popleft()
                if not (any(self._jobs) or self._opened):
                    self._debt.end()
