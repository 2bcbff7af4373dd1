"""Which images of which call are in which region of shared memory, and what each server knows of them. No I/O."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Optional

import grpc

from triton_vision_client._balancer import Member
from triton_vision_client._calls import NOT_REACHED, Call
from triton_vision_client._shm import UNKNOWN_REGION, Region, RegionPool

LOG = logging.getLogger("triton_vision_client")
# How long a server that has refused a region is spared further ones; a token may have been missing.
REFUSED_S = 30.0


class Regions:
    """The shared memory of one client in one process and, with asyncio, one event loop.

    Attributes:
        told: which regions each server has been told of, and not yet that they are gone. An entry is made before the
            telling, which may arrive even if its answer does not.
    """

    def __init__(self) -> None:
        self.told: dict[Member, set[str]] = {}
        # Those that a server may have been told of too late to say so: it is told twice that they are gone.
        self._doubtful: dict[Member, set[str]] = {}
        self._lock = threading.RLock()
        self._pool: Optional[RegionPool] = None
        self._spared_until: dict[Member, float] = {}

    def place(self, call: Call) -> None:
        """Puts the call's images into a region, where there is room for one; else they go in the message."""
        if not call.images or call.region is not None:
            return
        with self._lock:
            pool = self._pool = self._pool or RegionPool()
        try:
            call.region = pool.take(call.images)
        except OSError as error:
            LOG.warning("shared memory is not used for this call: /dev/shm has no room for it (%s)", error.strerror)
            call.images = ()

    def unknown_to(self, call: Call, member: Member) -> Optional[Region]:
        """The call's region if the server is still to be told of it."""
        if call.region is None or self._pool is None or self.spares(member):
            return None
        return None if member in self._pool.registered[call.region] else call.region

    def tells(self, member: Member, name: str) -> None:
        """A server is about to be told of a region."""
        with self._lock:
            self.told.setdefault(member, set()).add(name)
            self._doubtful.setdefault(member, set()).add(name)

    def left_at(self, member: Member) -> list[str]:
        """Regions that are gone, of which the server may still not know it."""
        with self._lock:
            here = set() if self._pool is None else self._pool.names()
            return sorted(self.told.get(member, set()) - self._doubtful.get(member, set()) - here)

    def heard(self, region: Region, member: Member, error: Optional[Any]) -> None:
        """The server has taken the region or, with an error, refused it.

        Raises:
            grpc.RpcError: the error itself, if it says that the server was not reached.
        """
        assert self._pool is not None
        if error is None or error.code() == grpc.StatusCode.ALREADY_EXISTS:  # whose earlier answer got lost
            with self._lock:
                self._pool.registered[region].add(member)
                self._doubtful[member].discard(region.name)
        elif error.code() in NOT_REACHED and "restricted" not in (error.details() or ""):
            raise error
        else:
            first = member not in self._spared_until
            self._spared_until[member] = time.monotonic() + REFUSED_S
            with self._lock:
                self._doubtful[member].discard(region.name)
                self.told[member].discard(region.name)
            LOG.log(
                logging.WARNING if first else logging.DEBUG,
                "%s takes no shared memory from here, so images go over gRPC (%s)",
                member.address,
                error.details(),
            )

    def spares(self, member: Member) -> bool:
        """Whether the server is sent messages for now."""
        return time.monotonic() < self._spared_until.get(member, 0.0)

    def message(self, call: Call, member: Member, left: float) -> Any:
        """The call's message to the server, with ``left`` seconds to go."""
        if call.region is None or self.spares(member):
            return call.build(left)
        return call.build(left, (call.region.name, sum(4 + len(image) for image in call.images)))

    def forgotten(self, error: Any, call: Call, member: Member) -> bool:
        """Whether a try failed because the server has forgotten the regions, having been restarted; once in a call."""
        known = call.region is None or UNKNOWN_REGION not in (error.details() or "").lower()
        if known or call.told_unknown:
            return False
        call.told_unknown = True
        self.forget(member)
        return True

    def forget(self, member: Member) -> None:
        """A server knows no region any more: it has been restarted, or is gone."""
        with self._lock:
            if self._pool is not None:
                self._pool.forget(member)
            self.told.pop(member, None)
            self._doubtful.pop(member, None)
            self._spared_until.pop(member, None)

    def release(self, call: Call, *, answered: bool) -> list[tuple[str, Member]]:
        """Frees the call's region; returns the names of regions that are gone, with a server to be told of each.

        A region whose call has not been answered may still be read: it is never used again.
        """
        region, call.region = call.region, None
        if region is None or self._pool is None:
            return []
        gone = self._pool.give_back(region) if answered else [region]
        for one in gone:
            self._pool.drop(one)
        with self._lock:
            return [(one.name, member) for one in gone for member, names in self.told.items() if one.name in names]

    def removed(self, name: str, member: Member) -> None:
        """A server has been told that a region is gone."""
        with self._lock:
            doubtful = self._doubtful.get(member, set())
            if name in doubtful:
                doubtful.discard(name)
            else:
                self.told.get(member, set()).discard(name)

    def end(self) -> list[tuple[str, Member]]:
        """Removes all regions; returns what servers are still to be told."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
            told, self.told = self.told, {}
            return [(name, member) for member, names in told.items() for name in names]
