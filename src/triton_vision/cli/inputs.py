"""What ``classify`` is given: paths and lists of paths, as one stream."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from triton_vision.cli.find import FileId, Found, check, find
from triton_vision.cli.lists import is_file, read_list


class Inputs:
    """The images of one run.

    Args:
        paths: files, folders and globs; ``-`` for a list on standard input.
        lists: files that hold a path a line; ``-`` for standard input.
        nul: whether NUL bytes separate the lists' paths.
        stack: closes the lists.

    Raises:
        ValueError: nothing is given, or standard input twice.
        OSError: a path names nothing, or a list cannot be opened.
    """

    def __init__(self, paths: Sequence[str], lists: Sequence[str], nul: bool, stack: contextlib.ExitStack) -> None:
        self._paths = [path for path in paths if path != "-"]
        names = [*(path for path in paths if path == "-"), *lists]
        if not paths and not lists:
            raise ValueError("give at least one file, folder or glob, - for a list on standard input, or --files-from")
        if names.count("-") > 1:
            raise ValueError("standard input can be read only once, and - is given more often")
        if nul and not names:
            raise ValueError("-0 is about lists: give one with - or --files-from")
        check(self._paths)
        self._nul = nul
        self._lists = [_open(name, stack) for name in names]

    @property
    def may_be_empty(self) -> bool:
        """Whether no image at all is an answer, too: a list that happens to be empty."""
        return bool(self._lists)

    def named(self) -> str:
        """The paths, for a message."""
        return ", ".join(self._paths)

    def items(self, leave_out: Collection[FileId] = ()) -> Iterator[Found | None]:
        """The images, the paths' before the lists'; None where there is nothing new yet."""
        yield from find(self._paths, leave_out)
        for fd, name in self._lists:
            yield from read_list(fd, name, self._nul)

    def count(self, leave_out: Collection[FileId] = ()) -> Iterator[object]:
        """As many of anything as there are images; may be asked only if ``can_be_counted``."""
        yield from find(self._paths, leave_out)
        for fd, name in self._lists:
            yield from read_list(fd, name, self._nul, check=False)

    def can_be_counted(self) -> bool:
        """Whether all can be found twice: what comes through a pipe cannot."""
        return all(is_file(fd) for fd, _ in self._lists)


def _open(name: str, stack: contextlib.ExitStack) -> tuple[int, str]:
    if name == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed")
        return sys.stdin.fileno(), "the list on standard input"
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    if os.path.isdir(name):
        os.close(fd)
        raise ValueError(f"{name} is a folder, and --files-from takes a list of files: give the folder itself")
    stack.callback(partial(os.close, fd))
    return fd, name
