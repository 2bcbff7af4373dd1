"""Where the rows go: standard output, or a file that has its name only once it is complete. Never half a row."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from triton_vision.cli.find import FileId
from triton_vision.terminal import printable


def complain(text: object) -> None:
    """Says on standard error what is wrong, in one line that commands no terminal, whatever names it holds."""
    print(f"error: {printable(str(text))}", file=sys.stderr)


class OutputError(Exception):
    """Standard output, or what takes its place, cannot be written."""


def say(text: object, end: str = "\n") -> None:
    """Prints on standard output at once; where a process has none, nobody wants to hear it.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None


class Output:
    """Writes each image's rows at once.

    Args:
        path: a file; None for standard output. While it is written, a regular file's name ends in ``.part``.
        waiting: entered around what may take as long as a reader likes.

    Raises:
        OutputError: it cannot be opened.
    """

    def __init__(self, path: str | None, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._waiting = waiting
        self._path: str | None = None
        self.part: str | None = None
        self._own = path is not None
        # What the rows go to, and what a complete run has left there before: no image.
        self.own_files: set[FileId] = set()
        if path is None:
            if sys.stdout is None:
                raise OutputError("standard output is closed")
            sys.stdout.flush()
            self._fd = sys.stdout.fileno()
        else:
            self._fd = self._open(path)
        mode = os.fstat(self._fd)
        self._regular = stat.S_ISREG(mode.st_mode)
        if self._regular:
            self.own_files.add((mode.st_dev, mode.st_ino))
        self.is_terminal = os.isatty(self._fd)
        # What a table is written in; the other formats are UTF-8.
        self.encoding = "utf-8" if path is not None else sys.stdout.encoding
        self._complete = 0  # bytes, of a file of our own

    def _open(self, path: str) -> int:
        try:
            target = os.path.realpath(path)  # a link stays one
            if os.path.lexists(target) and not os.path.isfile(target):  # such as /dev/null, or a named pipe
                return os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            self._path, self.part = target, f"{target}.part"
            with contextlib.suppress(FileNotFoundError):
                before = os.stat(target)
                self.own_files.add((before.st_dev, before.st_ino))
            fd = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise OutputError(f"{self.part} is being written by another run") from None
            os.ftruncate(fd, 0)
            return fd
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from None

    def write(self, rows: bytes) -> None:
        """Writes an image's rows, all of them or, where the command is stopped before the first byte, none.

        Raises:
            BrokenPipeError: the reader has left.
            OutputError: they cannot be written.
        """
        if not self._regular:
            ready = select.poll()
            ready.register(self._fd, select.POLLOUT)
            with self._waiting():
                ready.poll()
        left = memoryview(rows)
        try:
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:  # somebody else has made the pipe non-blocking
                    ready.poll()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._path is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._complete)  # no half row
            raise OutputError(f"cannot write {self._path or 'to standard output'}: {error.strerror}") from None
        self._complete += len(rows)

    def finish(self) -> None:
        """Gives the file its name.

        Raises:
            OutputError: that cannot be done.
        """
        if self._path is not None and self.part is not None:
            try:
                os.fsync(self._fd)
                os.replace(self.part, self._path)
            except OSError as error:
                raise OutputError(f"cannot write {self._path}: {error.strerror}") from None
            self.part = None

    def close(self) -> None:
        """Closes a file of our own. What is not finished keeps its name, unless it holds nothing."""
        if not self._own:
            return
        if self.part is not None and not self._complete:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
            self.part = None
        os.close(self._fd)
