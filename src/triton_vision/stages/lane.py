"""Threads beside the stage's own, for requests that take long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from triton_vision.run import Debt
from triton_vision.stages.errors import Overloaded

Job = Callable[[bool], object]
# What is expected to take at most so many seconds is short.
SHORT_S = 2.0
# Kinds of jobs: none waits for one of another kind.
SHORT, GUESSED, LONG = range(3)


def kind_of(seconds: float, *, sure: bool) -> int:
    """The kind of a job that is expected to take so many seconds."""
    return LONG if seconds > SHORT_S else SHORT if sure else GUESSED


class Lane:
    """Does jobs of each kind one after the other, and those of different kinds beside each other.

    A job is called with whether it is too late for it: then it is to say so to whoever waits for its answer.

    Args:
        name: of the threads.
        patience: seconds of work that may wait, of each kind; beyond that a new job is turned away.
        debt: tells the server's keeper that answers are owed, and whether the keeper wants this process to end.
    """

    def __init__(self, name: str, patience: float, debt: Debt) -> None:
        self._patience = patience
        self._debt = debt
        # Seconds and job, of each kind; the first is at work.
        self._jobs: tuple[deque[tuple[float, Job]], ...] = (deque(), deque(), deque())
        self._changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._name = name
        self._opened = self._closing = False

    def open(self) -> bool:
        """Whether jobs are taken now; ``settle`` must follow when they have been put."""
        with self._changed:
            # Set until ``settle``: the last job may end before the next is put, and must not end the debt with it.
            self._opened = self._debt.begin()
            return self._opened

    def settle(self) -> None:
        """All jobs have been put that ``open`` was called for, if it was."""
        if not self._opened:
            return
        with self._changed:
            self._opened = False
            if not any(self._jobs):
                self._debt.end()

    def put(self, seconds: float, job: Job, *, sure: bool = True) -> None:
        """Takes a job that is expected to need so many seconds; a job may put itself again.

        Raises:
            Overloaded: more is waiting than there is patience for.
        """
        kind = kind_of(seconds, sure=sure)
        jobs = self._jobs[kind]
        with self._changed:
            waiting = sum(needed for needed, _ in jobs)
            if waiting > self._patience:
                raise Overloaded(waiting + seconds)
            jobs.append((seconds, job))
            self._changed.notify_all()
            if kind not in self._threads:
                self._threads[kind] = threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True)
                self._threads[kind].start()

    def close(self, seconds: float) -> None:
        """Forgets what is waiting, and waits so long for what is being done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(seconds)

    def _work(self, jobs: deque[tuple[float, Job]]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: jobs or self._closing)
                if self._closing:
                    return
                _, job = jobs[0]
            job(self._debt.is_called_in())
            with self._changed:
                jobs.popleft()
                if not (any(self._jobs) or self._opened):
                    self._debt.end()
