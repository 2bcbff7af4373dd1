"""Writing lines to where perhaps nobody reads: a pipe that is full must not hold up whoever has something to say."""

from __future__ import annotations

import errno
import os
import queue
import re
import select
import threading
import time
from typing import TextIO

from triton_vision.terminal import printable

# So many lines may wait; what comes beyond them is dropped until all have been written.
WAITING = 1000


class Outlet:
    """Hands lines to a stream from a thread of its own.

    Args:
        stream: where the lines go. Its descriptor is written to directly where it has one, since a thread that hangs
            in a Python stream would hang the interpreter's end, too. None, as where a process has no such stream, takes
            the lines and forgets them.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        try:
            self._descriptor = stream.fileno() if stream is not None else -1
        except (OSError, ValueError):
            self._descriptor = -1
        # A model's exceptions reach the log as they are, with what its callers sent: that must not command a terminal.
        self._terminal = self._descriptor >= 0 and os.isatty(self._descriptor)
        self._lines: queue.Queue[str] = queue.Queue(WAITING)
        self._dropped = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="outlet", daemon=True).start()

    def put(self, line: str) -> None:
        """Takes a line, with its end; never blocks."""
        with self._lock:
            if self._dropped or self._lines.full():
                self._dropped += 1
            else:
                self._lines.put_nowait(line)

    def flush(self, timeout: float) -> None:
        """Waits until all that was put has been written, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        broken = False
        while True:
            line = self._lines.get()
            try:
                if not broken:
                    self._write(line)
            except (OSError, ValueError) as error:
                # Nobody reads any more; whoever speaks goes on all the same. A full disk costs only the line.
                broken = not isinstance(error, OSError) or error.errno in (errno.EPIPE, errno.EBADF)
            with self._lock:
                if self._dropped and self._lines.empty():
                    self._lines.put_nowait(f"warning: {self._dropped} lines were dropped, since nobody read them\n")
                    self._dropped = 0
            self._lines.task_done()

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        if self._descriptor < 0:
            self._stream.write(line)
            self._stream.flush()
            return
        if self._terminal:
            line = re.sub(r"[^\n\t]+", lambda text: printable(text[0]), line)
        data = line.encode(self._stream.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody who shares it has made it so
                select.select([], [self._descriptor], [])
