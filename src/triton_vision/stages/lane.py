"""One thread beside the stage's own, for requests that take long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from triton_vision.run import Debt
from triton_vision.stages.errors import Overloaded


class Lane:
    """Does one job after the other.

    Args:
        name: of the thread.
        patience: seconds of work that may wait; beyond that a new job is turned away.
        debt: tells the server's keeper that answers are owed.
    """

    def __init__(self, name: str, patience: float, debt: Debt) -> None:
        self._patience = patience
        self._debt = debt
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._name = name
        self._seconds = 0.0
        self._opened = self._closing = False

    def open(self) -> bool:
        """Whether jobs are taken now; ``settle`` must follow when they have been put."""
        with self._changed:
            # Set until ``settle``: the last job may end before the next is put, and must not end the debt with it.
            self._opened = bool(self._jobs) or self._debt.begin()
            return self._opened

    def settle(self) -> None:
        """All jobs have been put that ``open`` was called for, if it was."""
        if not self._opened:
            return
        with self._changed:
            self._opened = False
            if not self._jobs:
                self._debt.end()

    def put(self, seconds: float, job: Callable[[], None]) -> None:
        """Takes a job that is expected to need so many seconds.

        Raises:
            Overloaded: more is waiting than there is patience for.
        """
        with self._changed:
            if self._jobs and self._seconds > self._patience:
                raise Overloaded(self._seconds + seconds)
            self._jobs.append((seconds, job))
            self._seconds += seconds
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self, seconds: float) -> None:
        """Forgets what is waiting, and waits so long for what is being done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if self._closing:
                    return
                seconds, job = self._jobs[0]
            job()
            with self._changed:
                self._jobs.popleft()
                self._seconds -= seconds
                if not (self._jobs or self._opened):
                    self._debt.end()
