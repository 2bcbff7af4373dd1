"""What becomes of a process's clients in a child that it forks."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Survivor(Protocol):
    """A client, as far as a fork concerns it."""

    def _after_fork(self) -> Any: ...


_clients: weakref.WeakSet[Any] = weakref.WeakSet()
# The parent's connections and shared memory: a child must neither use nor end them.
_kept: list[Any] = []


def watch(client: Survivor) -> None:
    """From now on, has the client's ``_after_fork`` called in every forked child, before anything else runs there.

    What it returns is kept for as long as the child lives.
    """
    _clients.add(client)


def _renew() -> None:
    _kept.extend([client._after_fork() for client in list(_clients)])


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(after_in_child=_renew)
