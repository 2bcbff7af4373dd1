"""Memory for large images, shared by all processes of a server: who wants more than is free waits for its turn.

A budget is a file of which nobody reads a byte. Each of its bytes stands for UNIT bytes of memory, and whoever holds
the kernel's lock on it holds that memory. The kernel gives back what a process held that died, however it died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from triton_vision import run
from triton_vision.cgroup import CGROUPS, OWN, limit_files

UNIT = 16 * 1024 * 1024
# Of the machine's memory, or of what the control group leaves; the rest is for the server and its stages.
SHARE = 4
POLL_S = 0.02


class MemoryBudget:
    """For use from any thread.

    Args:
        total: bytes, the same in every process that shares the file.
        most: bytes that this process may hold.
        folder: where the file lies; by default the server's own, or else the temporary one.
    """

    def __init__(self, total: int, most: int, folder: Path | None = None) -> None:
        self.total = total
        self._units = max(1, total // UNIT)
        self._most = min(self._units, _units(most))
        shared = folder or run.folder()
        path = shared / "memory" if shared else Path(tempfile.gettempdir(), f"triton-vision-{os.getuid()}.memory")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # a read-only file system: each process then has the whole for itself
            self._file = os.memfd_create("budget")
        # The kernel's locks keep processes apart; this keeps the threads of this one.
        self._ours: set[int] = set()
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def taken(self, needed: float, check: Callable[[], None]) -> Iterator[None]:
        """Holds ``needed`` bytes, or all that this process may hold, as soon as they are free.

        Args:
            check: called while waiting; may raise.
        """
        wanted = min(self._most, _units(needed))
        held: list[int] = []
        try:
            while True:
                with self._mutex:
                    for unit in range(self._units):
                        if len(held) == wanted or len(self._ours) == self._most:
                            break
                        if unit not in self._ours and self._lock(unit):
                            held.append(unit)
                            self._ours.add(unit)
                if len(held) == wanted:
                    break
                # Two that each hold a part must not wait for each other.
                self._release(held)
                check()
                time.sleep(POLL_S)
            yield
        finally:
            self._release(held)

    def close(self) -> None:
        """Closes the file; whatever is held is free."""
        os.close(self._file)

    def _lock(self, unit: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        except OSError:
            return False
        return True

    def _release(self, held: list[int]) -> None:
        with self._mutex:
            while held:
                unit = held.pop()
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, unit)
                self._ours.discard(unit)


def _units(size: float) -> int:
    return max(1, -(-int(size) // UNIT))


def default_budget(cgroups: Path = CGROUPS, memory: Path = Path("/proc/meminfo"), own: Path = OWN) -> int:
    """A SHARE-th of the memory that this process may use: its control groups' limit, or the machine's."""
    total = 1024 * int(memory.read_text().split("MemTotal:")[1].split()[0])
    for _, file in limit_files("memory", "memory.max", "memory.limit_in_bytes", cgroups, own):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(file.read_text()))
    return total // SHARE
