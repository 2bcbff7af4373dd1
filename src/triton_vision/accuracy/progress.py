"""How far the sides are: a bar on a terminal, a line every few seconds elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from triton_vision.terminal import StatusLine, gauge, short_rate

# Short enough for a line of 80 characters with 50,000 images.
BAR = 8


class Progress:
    """Shows each side's count and rate, and what is known of their accuracy so far.

    Args:
        total: how many images there are.
        stream: where to; stderr by default.
    """

    TERMINAL_S, ELSEWHERE_S = 0.2, 5.0

    def __init__(self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._stream = stream or sys.stderr
        self._line = StatusLine(self._stream)
        self._began = self._shown = clock()
        self._ended: dict[str, float] = {}

    def __call__(self, counts: dict[str, int], accuracy: str) -> None:
        """Shows the counts, if the last ones have stood for long enough."""
        now = self._clock()
        for side, count in counts.items():
            if count == self._total:
                self._ended.setdefault(side, now)
        if now - self._shown < (self.TERMINAL_S if self._line.possible else self.ELSEWHERE_S):
            return
        self._shown = now
        sides = ", ".join(f"{side} {count} {short_rate(self.rate(side, count))}/s" for side, count in counts.items())
        text = f"{sides} of {self._total}" + (f"; {accuracy}" if accuracy else "")
        if self._line.possible:
            self._line.draw(f"  {gauge(min(counts.values()), self._total, BAR)} {text}")
        else:
            print(f"  {text}", file=self._stream, flush=True)

    def rate(self, side: str, count: int) -> float:
        """A side's images a second, until now or until it had them all."""
        return count / max(1e-6, self._ended.get(side, self._clock()) - self._began)

    def end(self) -> None:
        """Clears the bar."""
        self._line.clear()
