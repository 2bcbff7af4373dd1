"""How far ``classify`` is: a live line on a terminal; and, in words, how far it came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from triton_vision.terminal import StatusLine, gauge, printable, short_rate, short_time

BAR = 20
REDRAW_S = 0.2
# The rate is that of the last so many redraws: 10 s.
RECENT = 50


class Count:
    """How many images there are in all, counted on the side while the first are on their way.

    Args:
        items: finds them once more; None where that is impossible, as in a pipe.
    """

    def __init__(self, items: Callable[[], Iterator[object]] | None) -> None:
        self._items = items
        self._thread: threading.Thread | None = None
        self._stop = False
        self.total: int | None = None

    def start(self) -> None:
        """Begins to count, if that has not been done."""
        if self._items is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._items,), name="count", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> int | None:
        """The total, if it can be known within so many seconds."""
        self.start()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.total

    def stop(self) -> None:
        """Ends the counting."""
        self._stop = True

    def _run(self, items: Callable[[], Iterator[object]]) -> None:
        total = 0
        try:
            for _ in items():
                total += 1
                if self._stop:
                    return
        except Exception:  # noqa: BLE001 - whoever reads the items for their own sake meets it, too
            return
        self.total = total


class Progress:
    """Counts the images, and shows the count where the stream is a terminal.

    Attributes:
        done: images that have been answered, ``refused`` among them.
        last: the name of the last one.
    """

    def __init__(self, stream: TextIO | None, count: Count, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = StatusLine(stream)
        self._count, self._clock = count, clock
        self._began = clock()
        self._recent: deque[tuple[float, int]] = deque([(self._began, 0)], maxlen=RECENT)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = ""
        self.done = self.refused = 0
        self.last = ""

    def __enter__(self) -> Progress:
        if self._line.possible:
            self._count.start()
            self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._line.clear()

    def add(self, name: str, refused: bool) -> None:
        """Counts an image whose rows have been written."""
        self.last = name
        self.refused += refused
        self.done += 1

    def above(self, write: Callable[[], None]) -> None:
        """Writes to the line's own terminal: makes room, and draws the line again below."""
        if not self._line.possible:
            write()
            return
        with self._lock:
            self._line.clear()
            write()
            if self._shown:
                self._line.draw(self._shown)

    def text(self) -> str:
        """The line: a bar and the time left where the total is known, the rate of the last 10 s, what was refused."""
        now, done, total = self._clock(), self.done, self._count.total
        then, before = self._recent[0]
        self._recent.append((now, done))
        rate = (done - before) / max(1e-6, now - then)
        parts = [f"{short_rate(rate)}/s", f"{self.refused} refused"]
        if total is None or total < done:
            head = f"{done} images"
            parts.append(short_time(now - self._began))
        else:
            head = f"{gauge(done, total, BAR)} {done} of {total}"
            if rate > 0:
                parts.append(f"{short_time((total - done) / rate)} left")
        return f"  {head}, {', '.join(parts)}"

    def summary(self) -> str | None:
        """What to say at the end: all in all, if the line has been shown."""
        if not self._shown:
            return None
        took = max(1e-6, self._clock() - self._began)
        return f"{self.done} images in {short_time(took)}, {short_rate(self.done / took)}/s, {self.refused} refused"

    def how_far(self, total: int | None, at_least: int) -> str:
        """How many images are done, of how many, and which was the last.

        Args:
            total: how many there are; None if that is not known.
            at_least: how many are known of.
        """
        of = f"of {total}" if total is not None else f"of at least {at_least}"
        last = f", the last one {printable(self.last)}" if self.done else ""
        return f"{self.done} {of} images done{last}"

    def _redraw(self) -> None:
        while not self._end.wait(REDRAW_S):
            with self._lock:
                self._shown = self.text()
                self._line.draw(self._shown)
