"""Which images of which call are in which region of shared memory, and what each server knows of them. No I/O."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple, Optional

import grpc
from tritonclient.grpc import service_pb2

from triton_vision_client._balancer import Member
from triton_vision_client._calls import Call, Metadata
from triton_vision_client._shm import UNKNOWN_REGION, Region, RegionPool
from triton_vision_client._translate import is_refusal

LOG = logging.getLogger("triton_vision_client")
# How long a server that has refused a region is spared further ones; a token may have been missing.
REFUSED_S = 30.0
# What Triton answers while a request reads the region, which may be so for a moment after its answer.
IN_USE = "in use"
WANTS_TOKEN = (
    ": start it with --shm-token-file, and give the client that token (shm_token=); or start it with --shm-open"
)


class Left(NamedTuple):
    """A region that is gone, a server that is to be told of it, and the metadata for that."""

    name: str
    member: Member
    metadata: Metadata

    def message(self) -> Any:
        """What tells the server."""
        return service_pb2.SystemSharedMemoryUnregisterRequest(name=self.name)


class Regions:
    """The shared memory of one client in one process and, with asyncio, one event loop.

    Attributes:
        told: which regions each server has been told of, with which metadata, and not yet that they are gone. An entry
            is made before the telling, which may arrive even if its answer does not.
    """

    def __init__(self) -> None:
        self.told: dict[Member, dict[str, Metadata]] = {}
        # Those that a server may have been told of too late to say so: it is told twice that they are gone.
        self._doubtful: dict[Member, set[str]] = {}
        self._lock = threading.RLock()
        self._pool: Optional[RegionPool] = None
        self._spared_until: dict[Member, float] = {}
        self._has_warned = False

    def place(self, call: Call) -> None:
        """Puts the call's images into a region, where there is room for one; else they go in the message."""
        if not call.images or call.region is not None:
            return
        with self._lock:
            pool = self._pool = self._pool or RegionPool()
        try:
            call.region = pool.take(call.images)
        except OSError as error:
            # Said once: the next calls fare no better, as a rule.
            level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
            LOG.log(level, "images go over gRPC, as /dev/shm takes no region for them (%s)", error.strerror)
            call.images = ()
        except ValueError:  # a region that is no more
            raise ValueError("the client is closed") from None

    def unknown_to(self, call: Call, member: Member) -> Optional[Region]:
        """The call's region if the server is still to be told of it."""
        pool, region = self._pool, call.region
        if region is None or pool is None or self.spares(member):
            return None
        return None if member in pool.registered.get(region, ()) else region

    def meets(self, member: Member) -> bool:
        """Whether a server is about to be told of a region for the first time."""
        with self._lock:
            first = member not in self.told
            self.told.setdefault(member, {})
            return first

    def tells(self, member: Member, name: str, metadata: Metadata) -> None:
        """A server is about to be told of a region; with a token, it may be, that taking it back wants, too."""
        with self._lock:
            self.told.setdefault(member, {})[name] = metadata
            self._doubtful.setdefault(member, set()).add(name)

    def left_at(self, member: Member) -> list[Left]:
        """Regions that are gone, of which the server may still not know it."""
        with self._lock:
            passed_over = self._doubtful.get(member, set()) | (set() if self._pool is None else self._pool.names())
            told = self.told.get(member, {})
            return [Left(name, member, told[name]) for name in told if name not in passed_over]

    def heard(self, region: Region, member: Member, metadata: Metadata, error: Optional[Any]) -> None:
        """The server has taken the region or, with an error, refused it.

        Raises:
            grpc.RpcError: the error itself, if it is not a refusal.
        """
        pool = self._pool
        if pool is None or region not in pool.registered:
            return  # the client has been closed meanwhile
        if error is None or error.code() == grpc.StatusCode.ALREADY_EXISTS:  # whose earlier answer got lost
            with self._lock:
                pool.registered[region].add(member)
                # Anew: another call may have found meanwhile that the server had forgotten everything.
                self.told.setdefault(member, {})[region.name] = metadata
                self._doubtful.get(member, set()).discard(region.name)
        elif not is_refusal(error):
            raise error
        else:
            first = member not in self._spared_until
            self._spared_until[member] = time.monotonic() + REFUSED_S
            with self._lock:
                self._doubtful.get(member, set()).discard(region.name)
                self.told.get(member, {}).pop(region.name, None)
            details = error.details() or ""
            LOG.log(
                logging.WARNING if first else logging.DEBUG,
                "%s takes no shared memory from here, so images go over gRPC (%s)%s",
                member.address,
                details,
                WANTS_TOKEN if "restricted" in details.lower() else "",
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
        """Whether a try failed because the server, restarted, has forgotten the regions; once for each server."""
        known = call.region is None or UNKNOWN_REGION not in (error.details() or "").lower()
        if known or member in call.forgotten_by:
            return False
        call.forgotten_by.add(member)
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

    def release(self, call: Call, *, answered: bool) -> list[Left]:
        """Frees the call's region; returns the regions that are gone, each for every server to be told of it.

        A region whose call has not been answered may still be read: it is never used again.
        """
        region, call.region = call.region, None
        if region is None or self._pool is None:
            return []
        gone = self._pool.give_back(region) if answered else [region]
        for one in gone:
            self._pool.drop(one)
        with self._lock:
            return [
                Left(one.name, member, names[one.name])
                for one in gone
                for member, names in self.told.items()
                if one.name in names
            ]

    def removed(self, left: Left) -> None:
        """A server has been told that a region is gone."""
        with self._lock:
            doubtful = self._doubtful.get(left.member, set())
            if left.name in doubtful:
                doubtful.discard(left.name)
            else:
                self.told.get(left.member, {}).pop(left.name, None)

    def end(self) -> list[Left]:
        """Removes all regions; returns what servers are still to be told."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            told, self.told = self.told, {}
            return [Left(name, member, metadata) for member, names in told.items() for name, metadata in names.items()]
