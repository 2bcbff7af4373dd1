"""Turning requests away at a chain's first stage while the rest of the chain cannot answer them in time.

How long an answer takes is known to the server's keeper (``triton_vision.server.pace``), which writes it ten times a
second into a page of shared memory for each first stage. Under a Triton that nobody keeps there is no such page, and
only the lengths of queues bound the wait.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np

from triton_vision import run
from triton_vision.run import PAGE, SLOTS
from triton_vision.stages.errors import Overloaded

# An older page is left from a keeper that does not write any more.
STALE_S = 2.0
# What an answer takes varies, and one that comes just too late is work for nobody.
MARGIN = 1.7
# So many requests may always wait, however many images they hold.
FEW_REQUESTS = 4
# The columns of the slots.
PASSED_AT, PASSED, HERE = 0, slice(1, 3), slice(3, 5)


class Gate:
    """One instance's view of its model's page.

    Args:
        page: the file.
        instance: a number of its own for each of the model's instances.
    """

    def __init__(self, page: Path, instance: int) -> None:
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), run.PAGE_BYTES)
        self._slots = np.frombuffer(self._page, np.float64, offset=PAGE.size).reshape(SLOTS, -1)
        self._own = self._slots[instance % SLOTS]
        self._own[:] = 0.0  # another process may have died with it

    def admit(self, items: int, timeout: float) -> None:
        """Counts a request's items in.

        Args:
            items: of the request.
            timeout: seconds after which nobody waits for its answer; 0: its caller has patience.

        Raises:
            Overloaded: its answer would come too late.
        """
        written, wait, patience, each, waiting = PAGE.unpack_from(self._page)
        age = time.monotonic() - written
        if age > STALE_S:
            return
        # Since the page was written, items have been admitted, and others are done.
        unseen = self._slots[self._slots[:, PASSED_AT] >= written, PASSED].sum(axis=0)
        more, requests = unseen + self._slots[:, HERE].sum(axis=0)
        wait += more * each - age
        if (wait >= patience and waiting + requests >= FEW_REQUESTS) or 0.0 < timeout < MARGIN * wait:
            raise Overloaded(wait)
        self._own[HERE] += (items, 1)

    def passed(self) -> None:
        """All items that have been admitted are on their way to the rest of the chain."""
        own = self._own
        if not own[HERE].any():
            return
        if own[PASSED_AT] < PAGE.unpack_from(self._page)[0]:
            own[PASSED] = 0.0
        own[PASSED] += own[HERE]
        own[PASSED_AT] = time.monotonic()
        own[HERE] = 0.0


def find_gate(model: str, instance: int) -> Gate | None:
    """The gate of a model's instance; None where nobody keeps one."""
    folder = run.folder()
    page = run.page_path(folder, model) if folder is not None else None
    return Gate(page, instance) if page is not None and page.exists() else None
