"""The Python backend's processes ("stubs") below one tritonserver: which there are, and which have died.

Triton waits in silence for one that dies while its model loads, and never replaces one that dies later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SHM = Path("/dev/shm")
PROGRAM = "triton_python_backend_stub"
# A stub that Triton has ended because its model failed leaves its region for a moment only.
PATIENCE_S = 5.0
NAMELESS = "a Python model"
# A stub that was seen stopped so many times in a row answers nobody. Looks, not seconds: while the keeper itself is
# stopped, it does not look.
FROZEN_LOOKS = 15
# Between a stub's end and the removal of its region, where Triton itself ends it.
REMOVAL_S = 0.6


class Stub(NamedTuple):
    """One process: its id, its model's name, and the shared-memory region that it has with Triton."""

    pid: int
    model: str
    region: str

    def size(self) -> int:
        """Bytes of memory that its region takes; 0 without one."""
        try:
            return os.stat(SHM / self.region).st_blocks * 512
        except OSError:
            return 0


def read_stub(pid: int) -> Stub | None:
    """The stub with that process id; None if it is another program or has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    # …/triton_python_backend_stub REPOSITORY/MODEL/VERSION/model.py REGION …
    if len(words) < 3 or not words[0].endswith(PROGRAM):
        return None
    return Stub(pid, Path(words[1]).parent.parent.name, words[2].lstrip("/"))


def _state(pid: int) -> tuple[str, str]:
    """A process's name, of which the kernel keeps 15 letters, and its state; empty if there is none."""
    try:
        _, rest = Path(f"/proc/{pid}/stat").read_text().split("(", 1)
    except (OSError, ValueError):
        return "", ""
    name, _, fields = rest.rpartition(")")
    return name, fields.split()[0]


def end_stubs(of_region: Callable[[str], bool]) -> int:
    """Kills this user's stubs with such a region, wherever they came from; returns how many there were."""
    count = 0
    for entry in Path("/proc").iterdir():
        stub = read_stub(int(entry.name)) if entry.name.isdecimal() else None
        if stub is not None and of_region(stub.region):
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.getuid():
                    os.kill(stub.pid, signal.SIGKILL)
                    count += 1
    return count


class StubWatch:
    """Follows the stubs of one tritonserver.

    Args:
        server: tritonserver's process id.
        pause: seconds between two searches for new stubs, which read a file for each of its hundreds of threads.
    """

    def __init__(self, server: int, pause: float = 0.0) -> None:
        self._server = server
        self._tasks = Path(f"/proc/{server}/task")
        self._pause = pause
        self._searched = -pause
        self._known: dict[int, Stub] = {}
        self._dead_since: dict[int, float] = {}
        self._nameless: dict[int, float] = {}
        self._stopped: dict[int, int] = {}

    def look(self, *, search: bool = False) -> list[Stub]:
        """Those that run now; ``search``: new ones may have been made just now."""
        now = time.monotonic()
        if search or now - self._searched >= self._pause:
            self._searched = now
            children = self._children()
            for pid in children:
                stub = read_stub(pid)
                if stub is not None:
                    self._known.setdefault(pid, stub)
            # One that died before it was seen alive has left no name.
            zombies = [pid for pid in children if pid not in self._known and _state(pid) == (PROGRAM[:15], "Z")]
            self._nameless = {pid: self._nameless.get(pid, now) for pid in zombies}
        # A zombie has no command line, and another process of the same number another one.
        running = {pid: stub for pid, stub in self._known.items() if read_stub(pid) == stub}
        for pid, stub in list(self._known.items()):
            if pid in running:
                self._dead_since.pop(pid, None)
            elif (SHM / stub.region).exists():
                self._dead_since.setdefault(pid, now)
            else:  # Triton has ended it, and cleared up after it
                del self._known[pid]
                self._dead_since.pop(pid, None)
        # Who stops the server, too, means to let it go on.
        stopped = [] if _state(self._server)[1] == "T" else [pid for pid in running if _state(pid)[1] == "T"]
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        return list(running.values())

    def frozen(self) -> list[Stub]:
        """Those that somebody has stopped (SIGSTOP), as the last looks saw it."""
        return [self._known[pid] for pid, looks in self._stopped.items() if looks == FROZEN_LOOKS]

    def dead_model(self) -> str:
        """The name of a model whose process has been dead for PATIENCE_S seconds; empty if there is none."""
        self.look(search=True)
        dead = self.lost(PATIENCE_S)
        if dead:
            return dead[0].model
        return NAMELESS if self.nameless(PATIENCE_S) else ""

    def nameless(self, seconds: float) -> bool:
        """Whether a process has been dead for so long that died before it was seen alive, and so has left no name."""
        now = time.monotonic()
        return any(now - since > seconds for since in self._nameless.values())

    def lost(self, seconds: float = 0.0) -> list[Stub]:
        """Those that died by themselves so long ago, as far as seen: Triton still holds on to their regions."""
        now = time.monotonic()
        return [self._known[pid] for pid, since in self._dead_since.items() if now - since > max(seconds, REMOVAL_S)]

    def _children(self) -> list[int]:
        children: list[int] = []
        try:
            for task in self._tasks.iterdir():
                children += map(int, (task / "children").read_text().split())
        except OSError:
            pass  # threads come and go; the next look sees them
        return children
