"""A server's run-time folder: its lock, its links, and the shared memory that goes with its prefix.

Every server has a prefix for its Python backend's shared memory and a folder named after it. The folder's lock is
held as long as the server's keeper lives, so whoever finds a folder unlocked may clear it, what lies in /dev/shm under
its prefix, and the Python processes that use it: that server is gone, however it ended. The folders lie in /dev/shm
themselves, so that whoever shares the regions (with another TMPDIR, or in another container with the host's IPC) shares
the locks, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path
from types import TracebackType

from triton_vision.server.errors import SetupError
from triton_vision.server.stubs import SHM, end_stubs

# A killed server's guard holds the lock for a moment while it clears up.
GUARD_PATIENCE_S = 2.0
# Triton names a region PREFIX + a UUID4, with nothing in between.
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def runtime_root() -> Path:
    """The folder that holds this user's run-time folders, made if needed.

    Raises:
        SetupError: it exists but belongs to somebody else or is open to others.
    """
    root = SHM / f"triton-vision-{os.getuid()}"
    while True:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        try:
            info = root.lstat()
            break
        except FileNotFoundError:
            continue  # another server has just ended and removed it
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise SetupError(f"{root} is not a private folder of this user: remove it")
    return root


def clear_shared_memory(prefix: str) -> int:
    """Removes this user's regions of exactly this prefix; returns how many there were.

    Another user's server may have the same prefix, in a container of its own with the host's shared memory, and its
    lock cannot be seen from here.
    """
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(SHM):
            if _is_region(prefix, entry.name):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        os.unlink(entry.path)
                        count += 1
    return count


def clear(prefix: str) -> int:
    """Ends what a killed server of exactly this prefix left running, and removes its regions; returns their number."""
    end_stubs(lambda region: _is_region(prefix, region))
    return clear_shared_memory(prefix)


def _is_region(prefix: str, name: str) -> bool:
    return name.startswith(prefix) and UUID.fullmatch(name[len(prefix) :]) is not None


class RunDir:
    """One server's run-time folder, locked while it is held.

    Use as a context manager; on leaving, the folder and the prefix's shared memory are removed.

    Args:
        prefix: letters, digits, ``_``, ``-`` and ``.``; it must not be in use by a running server.

    Raises:
        SetupError: the prefix is malformed or in use.
    """

    def __init__(self, prefix: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", prefix):
            raise SetupError(f"the shared-memory prefix {prefix!r} must be 1 to 64 letters, digits, '_', '-' or '.'")
        self.prefix = prefix
        root = runtime_root()
        sweep(root, keep=prefix)
        self.path = root / prefix
        self._lock = _lock(self.path)
        deadline = time.monotonic() + GUARD_PATIENCE_S
        while self._lock is None and time.monotonic() < deadline:
            time.sleep(0.05)
            self._lock = _lock(self.path)
        if self._lock is None:
            raise SetupError(f"a running server uses the shared-memory prefix {prefix!r}: choose another --shm-prefix")
        # What a server with this prefix left when it was killed.
        self.cleared = clear(prefix)
        for entry in self.path.iterdir():
            if entry.name != "lock":
                _remove(entry)

    @property
    def lock_fd(self) -> int:
        """The lock's descriptor, for a child that shall keep the folder locked as long as it lives."""
        if self._lock is None:
            raise ValueError("the run-time folder is closed")
        return self._lock

    def close(self) -> None:
        """Removes the folder and the prefix's shared memory, then unlocks. Idempotent."""
        if self._lock is None:
            return
        clear_shared_memory(self.prefix)
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_if_empty(self.path.parent)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep(root: Path, keep: str | None = None) -> None:
    """Clears what servers left that were killed together with their guard: processes, regions, unlocked folders."""
    for folder in list(root.iterdir()):
        if folder.name == keep or not folder.is_dir() or folder.is_symlink():
            continue
        lock = _lock(folder)
        if lock is not None:
            clear(folder.name)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Makes the folder and takes its lock; None if another process holds it."""
    while True:
        path = folder / "lock"
        try:
            runtime_root()
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another server has just removed what the lines above made
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        # The holder before us may have removed the file we opened: then our lock guards nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # other servers' folders lie in it
        folder.rmdir()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
