"""Reading tritonserver's output: what passes through, and what the end of it says."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import IO

LEVELS = ("error", "warning", "info", "verbose")
# Triton's lines begin with a level letter, the date and the time: "E1130 04:53:53.785825 2854 file.cc:241] …".
LINE = re.compile(r'^([EWIV])\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(.*?)"?$')
STAMP = re.compile(r"^([EWIV])\d{4} [\d:.]+ \d+ ")
# Said on every machine without a GPU, of every TorchScript, or at every end, and nothing to act on.
NOISE = (
    "CudaDriverHelper has not been initialized",
    "CUDA driver version is insufficient for CUDA runtime version",
    "no pinned memory pool, falling back to non-pinned system memory",
    "Failed to initialize NVML",
    "': not supported for pytorch backend",  # to complete a configuration
    "Signal (15) received.",
)
# What goes wrong while models are loaded: Triton says it up to six times; ``serve`` once, by name and reason.
LOADING = re.compile(
    r"""\] "?(?:ERROR: Failed to create instance: |failed to load '|Internal: failed to load all models|"""
    r"""Invalid argument: ensemble '[^']*' depends on )"""
)
TAKEN_PORT = re.compile(r"failed to start \w+ service: .* already in use")
# Of an entry that comes again and again, a trace included, so many pass within so many seconds.
REPEATS, WINDOW_S = 5, 60.0
# How many different entries are remembered.
ENTRIES = 64


def log_flags(level: str) -> list[str]:
    """tritonserver's options for one of LEVELS."""
    rank = LEVELS.index(level)
    return [
        "--log-error=true",
        f"--log-warning={str(rank >= 1).lower()}",
        f"--log-info={str(rank >= 2).lower()}",
        f"--log-verbose={int(rank >= 3)}",
    ]


class Throttle:
    """Holds back what a log says over and over.

    An entry is a line with Triton's time stamp and what follows it without one, such as a stack trace. Its first
    line decides for all of it, so two failures at one place that differ further down count as the same.

    Args:
        clock: tells the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._passes = True

    def take(self, line: str) -> list[str]:
        """The lines to pass on now that this one has come: none, itself, or first how many were held back."""
        stamp = STAMP.match(line)
        if stamp is None:
            return [line] if self._passes else []
        key = f"{stamp[1]} {line[stamp.end() :]}"
        now = self._clock()
        began, count = self._seen.pop(key, (now, 0))
        told = []
        if now - began >= WINDOW_S:
            if count > REPEATS:
                told.append(
                    f"warning: {count - REPEATS} more like the next entry were left out in {now - began:.0f} s\n"
                )
            began, count = now, 0
        self._seen[key] = (began, count + 1)
        while len(self._seen) > ENTRIES:
            self._seen.popitem(last=False)
        self._passes = count < REPEATS
        return [*told, line] if self._passes else told


class LogReader:
    """Passes a server's output on line by line, and keeps its last lines.

    Args:
        pipe: the server's stdout and stderr in one, text mode.
        put: takes each line to pass on, with its end; it must not block, or Triton will. None keeps them only.
    """

    def __init__(self, pipe: IO[str], put: Callable[[str], None] | None = None) -> None:
        self._pipe = pipe
        self._put = put
        self._last: deque[str] = deque(maxlen=400)
        self._thread = threading.Thread(target=self._read, name="triton-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        throttle = Throttle()
        for line in self._pipe:
            if any(noise in line for noise in NOISE):
                continue
            self._last.append(line.rstrip("\n"))
            if self._put is not None:
                for passed in throttle.take(line):
                    self._put(passed)

    def join(self, timeout: float) -> None:
        """Waits until the server's output has ended, at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._last)

    def error_about(self, name: str) -> str:
        """The last error that speaks of a model by its name, without time and place; empty if there is none."""
        errors = (match[2] for line in reversed(self.lines()) if (match := LINE.match(line)) and match[1] == "E")
        return next((error for error in errors if re.search(rf"\b{re.escape(name)}\b", error)), "")

    def taken_port(self) -> str:
        """What Triton says of an endpoint whose port somebody else has; empty if nothing."""
        return next((found[0] for line in self.lines() if (found := TAKEN_PORT.search(line))), "")

    def last_error(self) -> str:
        """The last line that speaks of an error, without time and place; empty if there is none."""
        plain = ""
        for line in reversed(self.lines()):
            match = LINE.match(line)
            if match and match[1] == "E":
                return match[2]
            if not plain and re.match(r"(error|failed|.*error while loading)", line, re.IGNORECASE):
                plain = line
        return plain
