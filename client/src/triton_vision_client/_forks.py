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
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_broken = False


def watch(client: Survivor) -> None:
    """From now on, has the client's ``_after_fork`` called in every forked child, before anything else runs there.

    What it returns is kept for as long as the child lives.
    """
    _clients.add(client)


def open_channel(owner: Any) -> None:
    """Notes what holds a channel of gRPC's asyncio side: it is open while that is alive, or until it is closed."""
    _open.add(owner)


def closed_channel(owner: Any) -> None:
    """It holds none any more."""
    _open.discard(owner)


def check_asyncio() -> None:
    """Raises RuntimeError in a child that was forked while asyncio channels were open: a call would hang or crash."""
    if _broken:
        raise RuntimeError(
            "gRPC's asyncio connections do not survive a fork: close every AsyncImageClient before it, start "
            "processes by 'spawn', or use ImageClient, which survives it"
        )


def _renew() -> None:
    global _broken
    _broken = _broken or bool(_open)
    _kept.extend([client._after_fork() for client in list(_clients)])


if hasattr(os, "register_at_fork"):  # not on Windows, where there is no fork
    os.register_at_fork(after_in_child=_renew)
