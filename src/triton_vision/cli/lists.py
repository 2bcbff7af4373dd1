"""Lists of paths: one a line, or separated by NUL bytes, from a file, a pipe or a terminal."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator

from triton_vision.cli.find import Found, Unreadable

CHUNK = 1 << 16
# Longer than any path that a system takes; what has no separator for so long is not a list.
LONGEST = 1 << 16
# After so many milliseconds without a name the caller hears of it.
PATIENCE_MS = 100


class ListError(Exception):
    """This is not a list of paths."""


def read_list(fd: int, name: str, nul: bool, check: bool = True) -> Iterator[Found | None]:
    """The paths of a list, as they come: each is one file, with neither globs nor folders in it.

    A file is read from where it stands without moving on, so that it can be read twice.

    Args:
        fd: where from.
        name: what messages call it.
        nul: whether NUL bytes separate the paths, which may then hold line ends.
        check: whether to look at the files, and yield what is none as Unreadable.

    Yields:
        None whenever there is nothing new yet.

    Raises:
        ListError: its content cannot be paths.
        OSError: it cannot be read.
    """
    separator = b"\0" if nul else b"\n"
    rest = b""
    for chunk in _chunks(fd):
        if chunk is None:
            yield None
            continue
        if not nul and b"\0" in chunk:
            raise ListError(
                f"{name} holds NUL bytes, so it is not a list of one path a line: add -0 if NUL bytes separate the "
                "paths; an image itself cannot be given this way"
            )
        *lines, rest = (rest + chunk).split(separator)
        for line in lines:
            yield from _entry(line, nul, check)
        if len(rest) > LONGEST:
            raise ListError(
                f"{name} is not a list of paths: nothing separates them" + ("; leave out -0" if nul else "")
            )
    yield from _entry(rest, nul, check)


def is_file(fd: int) -> bool:
    """Whether the list is all there already."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _chunks(fd: int) -> Iterator[bytes | None]:
    if is_file(fd):
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        while chunk := os.pread(fd, CHUNK, offset):
            yield chunk
            offset += len(chunk)
        return
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    while True:
        if not ready.poll(PATIENCE_MS):
            yield None
        elif chunk := os.read(fd, CHUNK):
            yield chunk
        else:
            return


def _entry(line: bytes, nul: bool, check: bool) -> Iterator[Found]:
    if not nul:
        line = line.rstrip(b"\r")  # a list made on Windows
    if not line:
        return
    path = os.fsdecode(line)
    why = _complaint(path) if check else None
    yield path if why is None else Unreadable(path, why)


def _complaint(path: str) -> str | None:
    """Why the path is not a file that can be sent: a pipe, for example, would be waited for without end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(mode):
        return "a folder; a list names files"
    return None if stat.S_ISREG(mode) else "neither a file nor a link to one"
