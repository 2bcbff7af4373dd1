"""The files that arguments name: files, folders with all below them, globs. Found one by one, never as a whole list."""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import TypeAlias, TypeVar

# A folder of at most so many entries is sorted; a larger one goes on in the order in which the system lists it, so
# that its first image is sent before its last name is known.
SORTED = 10_000


@dataclass(frozen=True)
class Unreadable:
    """What was named and cannot be sent: to the client a file that fails when it is read, and so refused in its place.

    Attributes:
        path: its name.
        why: for a person.
    """

    path: str
    why: str

    def read(self) -> bytes:
        """Raises OSError."""
        raise OSError(errno.EIO, self.why)


Found: TypeAlias = str | Unreadable
# A file's device and number.
FileId: TypeAlias = tuple[int, int]
Entry = TypeVar("Entry")


def check(paths: Iterable[str]) -> None:
    """Raises FileNotFoundError if one of the paths names nothing."""
    for path in paths:
        if not _exists(path) and next(_matches(path), None) is None:
            raise FileNotFoundError(f"there is no {path}")


def find(paths: Sequence[str], leave_out: Collection[FileId] = ()) -> Iterator[Found]:
    """The files that the paths name, in order; each once, however often its name as spelt comes up.

    Hidden files and folders below a folder are left out, and so is what is neither a file nor a folder; links to
    folders are not followed. What cannot be read is Unreadable.

    Args:
        leave_out: files that are not meant, wherever they lie below a folder: those that the answers are written to.
    """
    seen = _Seen()
    for path in paths:
        key = str(PurePath(path))
        if not _exists(path):
            for match in _in_order(_matches(path), str):
                if not seen.has(str(PurePath(match))):
                    seen.files.add(str(PurePath(match)))
                    yield match
        elif seen.has(key):
            continue
        elif os.path.isdir(path):
            yield from _walk(key, seen, leave_out)
            seen.folders.add(key)
        else:
            yield path
            seen.files.add(key)


def find_files(paths: Iterable[str]) -> Iterator[str]:
    """The readable files among those that ``find`` finds.

    Raises:
        FileNotFoundError: a path names nothing.
    """
    paths = list(paths)
    check(paths)
    return (found for found in find(paths) if isinstance(found, str))


class _Seen:
    """What the arguments so far have named; only they are kept, not the files below a folder."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.folders: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the file or folder has come up: itself, or below a folder."""
        if key in self.files or key in self.folders:
            return True
        between = [PurePath(key)]
        for parent in PurePath(key).parents if self.folders else ():
            if str(parent) in self.folders:
                return all(map(_walkable, between))
            between.append(parent)
        return False


def _walkable(path: PurePath) -> bool:
    """Whether a walk goes this way: a folder's links to folders and its hidden entries are left out."""
    return not path.name.startswith(".") and not (os.path.islink(path) and os.path.isdir(path))


def _exists(path: str) -> bool:
    """Whether something has this very name, be it readable or not."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _matches(pattern: str) -> Iterator[str]:
    """The files that a glob names. ``**`` goes as far as a walk: links to folders may lead round in circles."""
    parts = pattern.split("/")
    if "**" not in parts:
        if glob.has_magic(pattern):
            yield from filter(os.path.isfile, glob.iglob(pattern))
        return
    at = parts.index("**")
    deep = [part for part in parts[at:] if part]
    if pattern.endswith("/"):
        return  # that names folders
    start = "/".join(parts[:at]) or ("/" if pattern.startswith("/") else ".")
    for root in sorted(glob.iglob(start)) if glob.has_magic(start) else [start]:
        if os.path.isdir(root):
            skip = 0 if root == "." else len(root.rstrip("/")) + 1
            for found in _walk(root, _Seen(), ()):
                if isinstance(found, str) and _fits(deep, found[skip:].split("/")):
                    yield found


def _fits(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the names of a path are those of a glob's parts, ``**`` being any number of them."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(parts[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _fits(parts[1:], names[1:])


def _in_order(entries: Iterator[Entry], key: Callable[[Entry], str]) -> Iterator[Entry]:
    """The entries, sorted as far as that needs no long list."""
    yield from sorted(islice(entries, SORTED), key=key)
    yield from entries


def _walk(root: str, seen: _Seen, leave_out: Collection[FileId]) -> Iterator[Found]:
    """The files below a folder. A stack instead of recursion, as deep as names may be."""
    numbers = {number for _, number in leave_out}
    stack = [_entries(root)]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
        elif isinstance(entry, Unreadable):
            yield entry
        else:
            path = entry.name if root == "." and len(stack) == 1 else entry.path
            if entry.name.startswith(".") or path in seen.files or path in seen.folders:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(_entries(path))
                elif entry.is_file():
                    if entry.inode() not in numbers or (entry.stat().st_dev, entry.inode()) not in leave_out:
                        yield path
                elif entry.is_symlink() and not os.path.exists(path):
                    yield Unreadable(path, "a link to a file that is not there")
            except OSError as error:
                yield Unreadable(path, error.strerror or str(error))


def _entries(folder: str) -> Iterator[os.DirEntry[str] | Unreadable]:
    try:
        with os.scandir(folder) as listing:
            first = sorted(islice(listing, SORTED), key=_name)
            if len(first) == SORTED:
                yield from first
                yield from listing
                return
    except OSError as error:
        yield Unreadable(folder, f"the folder cannot be listed: {error.strerror or error}")
        return
    yield from first  # the listing is closed: a deep tree does not hold many open


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name
