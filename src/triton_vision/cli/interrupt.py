"""Ctrl-C, SIGTERM and SIGHUP: acted on where the command waits and nowhere else, so that no row is half written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


# After so long, what was raised where it cannot be passed on is raised again.
AGAIN_S = 0.01


class Stopped(BaseException):
    """A signal has come. No Exception: nothing on the way may take it for a failure of its own.

    Attributes:
        word: what has happened.
        code: the exit code that says so, 128 and the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.word = WORDS[signal.Signals(number)]
        self.code = 128 + number


class Interrupts:
    """Takes the signals while it is entered; a second one ends the process at once."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._waiting = False
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        for number in WORDS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._come)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._leave)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._note_lost
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = self._hook
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what may take long and can be left at any point: raises Stopped there, or before it."""
        self._waiting = True
        try:
            if self._number is not None:
                raise Stopped(self._number)
            yield
        finally:
            self._waiting = False

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._number = number
        self._leave(number, frame)

    def _leave(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a signal handler
        if self._waiting and self._number is not None:
            self._waiting = False
            raise Stopped(self._number)

    def _note_lost(self, unraisable: sys.UnraisableHookArgs) -> None:
        """A signal that comes while Python clears something away (``__del__``) cannot end the wait from there."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook(unraisable)
            return
        self._waiting = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
