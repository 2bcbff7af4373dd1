"""Reading tritonserver's output: what passes through, and what the end of it says."""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from typing import IO, TextIO

LEVELS = ("error", "warning", "info", "verbose")
# Triton's lines begin with a level letter, the date and the time: "E1130 04:53:53.785825 2854 file.cc:241] …".
LINE = re.compile(r'^([EWIV])\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(.*?)"?$')
# Said on every machine without a GPU or at every end, and nothing to act on.
NOISE = (
    "CudaDriverHelper has not been initialized",
    "CUDA driver version is insufficient for CUDA runtime version",
    "no pinned memory pool, falling back to non-pinned system memory",
    "Failed to initialize NVML",
    "Signal (15) received.",
)


def log_flags(level: str) -> list[str]:
    """tritonserver's options for one of LEVELS."""
    rank = LEVELS.index(level)
    return [
        "--log-error=true",
        f"--log-warning={str(rank >= 1).lower()}",
        f"--log-info={str(rank >= 2).lower()}",
        f"--log-verbose={int(rank >= 3)}",
    ]


class LogReader:
    """Passes a server's output on to ``target`` line by line, and keeps its last lines.

    Args:
        pipe: the server's stdout and stderr in one, text mode.
        target: where the lines go; None keeps them only.
    """

    def __init__(self, pipe: IO[str], target: TextIO | None = sys.stderr) -> None:
        self._pipe = pipe
        self._target = target
        self._last: deque[str] = deque(maxlen=400)
        self._thread = threading.Thread(target=self._read, name="triton-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            if any(noise in line for noise in NOISE):
                continue
            self._last.append(line.rstrip("\n"))
            if self._target is not None:
                try:
                    self._target.write(line)
                    self._target.flush()
                except (OSError, ValueError):
                    self._target = None  # nobody reads any more; the server must go on all the same

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
