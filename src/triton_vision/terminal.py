"""Text on a terminal: names that cannot command it, columns that line up, and one line that is drawn over and over."""

from __future__ import annotations

import os
import shutil
import unicodedata
from typing import TextIO


def printable(text: str) -> str:
    """The text without anything that breaks a line or commands a terminal; bytes that are no UTF-8 as ``\\xNN``."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    if 0xDC80 <= ord(char) <= 0xDCFF:  # Python's stand-in for a byte of a file name that is no UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def columns_of(text: str) -> int:
    """How many columns a terminal needs for printable text: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """As much of printable text as so many columns hold."""
    if columns_of(text) <= columns:
        return text
    taken, used = [], 0
    for char in text:
        used += _columns(char)
        if used > columns:
            break
        taken.append(char)
    return "".join(taken)


def gauge(done: int, total: int, width: int) -> str:
    """A bar of ``width`` characters, such as ``[###.....]``."""
    filled = min(width, width * done // total) if total else width
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def short_rate(rate: float) -> str:
    """A number a second, with a digit behind the point where it matters."""
    return f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"


def short_time(seconds: float) -> str:
    """Hours, minutes and seconds: ``0:09``, ``12:00``, ``27:46:39``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class StatusLine:
    """One line at the bottom of a terminal.

    Attributes:
        possible: whether the stream is a terminal that can clear a line; elsewhere nothing is ever written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.possible = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False

    def draw(self, text: str) -> None:
        """Shows the text in the place of the one before, as much as fits; nothing while in the background (``&``)."""
        if self.possible and self._stream is not None and self._in_foreground():
            # One column stays free: a full line would wrap on some terminals.
            self._write(f"\r{cut(text, self._columns() - 1)}\x1b[K")
            self._drawn = True

    def clear(self) -> None:
        """Removes the line."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError:  # the terminal is gone; nothing that matters is written here
            self.possible = self._drawn = False

    def _columns(self) -> int:
        assert self._stream is not None
        try:
            # Of the stream itself: standard output may be a file.
            width = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            width = 0
        return width or shutil.get_terminal_size().columns

    def _in_foreground(self) -> bool:
        assert self._stream is not None
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # not this process's own terminal
            return True
