"""Turning requests away at a chain's first stage while the rest of the chain cannot answer them in time.

How long an answer takes is known to the server's keeper (``triton_vision.server.pace``), which writes it ten times a
second into a page of shared memory for each first stage. Under a Triton that nobody keeps there is no such page, and
only the lengths of queues bound the wait.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from triton_vision import run
from triton_vision.run import PAGE
from triton_vision.stages.errors import Overloaded

# An older page is left from a keeper that does not write any more.
STALE_S = 2.0
MARGIN = 2.0


class Gate:
    """One instance's view of its model's page.

    Args:
        page: the file; it has the size of PAGE.
    """

    def __init__(self, page: Path) -> None:
        with page.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE.size, prot=mmap.PROT_READ)
        self._written = 0.0
        self._admitted = 0

    def admit(self, items: int, timeout: float) -> None:
        """Counts a request's items in.

        Args:
            items: of the request.
            timeout: seconds after which nobody waits for its answer; 0: its caller has patience.

        Raises:
            Overloaded: its answer would come too late.
        """
        written, wait, room, each = PAGE.unpack(self._page)
        if time.monotonic() - written > STALE_S:
            return
        if written != self._written:
            self._written, self._admitted = written, 0
        wait += self._admitted * each
        # What an answer takes varies, and one that comes just too late is work for nobody.
        if self._admitted >= room or 0.0 < timeout < MARGIN * wait:
            raise Overloaded(wait)
        self._admitted += items


def find_gate(model: str) -> Gate | None:
    """The gate of a model; None where nobody keeps one."""
    folder = run.folder()
    page = run.page_path(folder, model) if folder is not None else None
    return Gate(page) if page is not None and page.exists() else None
