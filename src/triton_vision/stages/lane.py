"""One thread beside the stage's own, for requests that take long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from triton_vision.stages.errors import Overloaded


class Lane:
    """Does one job after the other.

    Args:
        name: of the thread.
        patience: seconds of work that may wait; beyond that a new job is turned away.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._patience = patience
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._name = name
        self._seconds = 0.0
        self.closing = False

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
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Lets every job that is left see that it ends (``closing``), and waits for them."""
        with self._changed:
            self.closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self.closing)
                if not self._jobs:
                    return
                seconds, job = self._jobs[0]
            job()
            with self._changed:
                self._jobs.popleft()
                self._seconds -= seconds
