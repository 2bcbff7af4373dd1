"""What a server's keeper and the stages inside that server share: a folder, with pages of memory and locks in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# The environment variable in which a stage finds the run-time folder of its server.
VARIABLE = "TRITON_VISION_RUN"
# A page for each first stage. The keeper writes the time (time.monotonic, which all processes of a machine share),
# seconds that a request admitted then would wait, seconds that one may wait at most, by how many seconds each further
# item makes the wait longer, and how many requests wait.
PAGE = struct.Struct("<ddddd")
# Behind that, each of the stage's instances writes a slot: when it last handed something over to the next stage, how
# many items and requests it has handed over since the keeper wrote, and how many it is working on.
SLOTS, SLOT = 64, struct.Struct("<ddddd")
PAGE_BYTES = PAGE.size + SLOTS * SLOT.size


def folder() -> Path | None:
    """The run-time folder of the server that this process belongs to; None where nobody keeps one."""
    run = os.environ.get(VARIABLE)
    return Path(run) if run else None


def page_path(run: Path, model: str) -> Path:
    """Where the page of a model lies."""
    return run / f"pace-{model}"


class Debt:
    """Tells the keeper that this process owes answers, so that it is not replaced meanwhile.

    Triton cannot take an answer from a process that it is ending. So a process that owes one holds the kernel's lock on
    the first byte of a file, shared with others of its model, and the keeper waits for that byte (``paid``). Meanwhile
    the keeper holds the second byte, and no process gets into debt. Locks go with the process that has them.

    Args:
        path: the file, ``debt_path``; None where there is no keeper.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def begin(self) -> bool:
        """Whether this process may owe answers from now on, until ``end``."""
        if self._file is None:
            return True
        return not self.is_called_in() and _locked(self._file, fcntl.LOCK_SH, 0)

    def is_called_in(self) -> bool:
        """Whether the keeper waits for the answers that this process owes."""
        if self._file is None:
            return False
        if not _locked(self._file, fcntl.LOCK_SH, 1):
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1)
        return False

    def end(self) -> None:
        """This process has answered everything."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)


@contextlib.contextmanager
def paid(path: Path, seconds: float) -> Iterator[bool]:
    """Waits until no process of a model owes an answer, and keeps it so within the block.

    Args:
        path: the file, ``debt_path``.
        seconds: how long to wait at most; yields whether that was enough.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while not (_locked(file, fcntl.LOCK_EX, 1) and _locked(file, fcntl.LOCK_EX, 0)):
            if time.monotonic() > deadline:
                yield False
                return
            time.sleep(0.02)
        yield True
    finally:
        os.close(file)


def debt_path(run: Path, model: str) -> Path:
    """The file by which a model's processes tell that they owe answers."""
    return run / f"debt-{model}"


def _locked(file: int, how: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, how | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True
