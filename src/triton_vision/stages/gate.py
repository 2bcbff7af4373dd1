"""Turning requests away at a chain's first stage while the rest of the chain cannot answer them in time.

How long an answer takes is known to the server's keeper (``triton_vision.server.pace``), which writes it ten times a
second into a page of shared memory for each first stage. Under a Triton that nobody keeps there is no such page, and
only the lengths of queues bound the wait.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from pathlib import Path

from triton_vision import run
from triton_vision.run import PAGE
from triton_vision.stages.errors import Overloaded

# An older page is left from a keeper that does not write any more.
STALE_S = 2.0
MARGIN = 2.5


class Gate:
    """One instance's view of its model's page.

    Args:
        page: the file; it has the size of PAGE.
    """

    def __init__(self, page: Path) -> None:
        with page.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE.size, prot=mmap.PROT_READ)
        # What the page does not count yet: the items of each request, and when they left this stage.
        self._unseen: deque[tuple[float, int]] = deque()
        self._here: list[int] = []
        self._admitted = 0

    def admit(self, items: int, timeout: float) -> None:
        """Counts a request's items in.

        Args:
            items: of the request.
            timeout: seconds after which nobody waits for its answer; 0: its caller has patience.

        Raises:
            Overloaded: its answer would come too late.
        """
        written, wait, patience, each = PAGE.unpack(self._page)
        age = time.monotonic() - written
        if age > STALE_S:
            return
        while self._unseen and self._unseen[0][0] < written:
            self._admitted -= self._unseen.popleft()[1]
        # Since the page was written, items have been added to the queue, and others have left it.
        # ``each`` takes it that all instances admit as many, which one large request does not show.
        requests = len(self._unseen) + len(self._here)
        wait += self._admitted * each * min(1.0, requests / 3) - age
        # What an answer takes varies, and one that comes just too late is work for nobody.
        if wait >= patience or 0.0 < timeout < MARGIN * wait:
            raise Overloaded(wait)
        self._admitted += items
        self._here.append(items)

    def passed(self) -> None:
        """All items that have been admitted are on their way to the rest of the chain."""
        now = time.monotonic()
        self._unseen.extend((now, items) for items in self._here)
        self._here.clear()


def find_gate(model: str) -> Gate | None:
    """The gate of a model; None where nobody keeps one."""
    folder = run.folder()
    page = run.page_path(folder, model) if folder is not None else None
    return Gate(page) if page is not None and page.exists() else None
