"""What the synchronous and the asyncio client share: everything but waiting."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

import grpc
from tritonclient.grpc import service_pb2

from triton_vision_client import _protocol
from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._calls import Attempts, Budget
from triton_vision_client._errors import (
    DeadlineExceededError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._observe import Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._results import ModelInfo, Result, ServerInfo
from triton_vision_client._settings import Fallback, Metadata, Settings, check_timeout, members_of
from triton_vision_client._shm import UNKNOWN_REGION, Region, RegionPool

LOG = logging.getLogger("triton_vision_client")
# What a server that has been reached does not answer.
NOT_REACHED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# What a server answers only once it is done with a request.
ANSWERS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)
UNREGISTER_S = 2.0
REFUSED_S = 30.0
# An ejected server is asked whether it is well; how long it may take to say so.
PROBE_S = 2.0
# How long the look-up of a name may take; without an answer it is gRPC's affair.
LOOK_UP_S = 2.0
# A name that stands for several servers is looked up again when one of them fails, but not more often than this.
LOOK_UP_AGAIN_S = 5.0

Parameters = Mapping[str, Union[bool, int, float, str]]


class Call:
    """One request, whatever it asks for: how it is built, where it goes, and how long it may take.

    Attributes:
        method: of the inference protocol's service.
        build: the seconds left, and for images in shared memory where they are -> the message.
        model: for error messages.
        images: those that shall go through shared memory; empty for none.
        region: where they are.
        told_unknown: whether a server has said that it does not know the region, which may happen once.
    """

    def __init__(self, method: str, build: Callable[..., Any], model: str, timeout: float, metadata: Metadata):
        self.method, self.build, self.model, self.timeout, self.metadata = method, build, model, timeout, metadata
        self.began = time.monotonic()
        self.images: Sequence[bytes] = ()
        self.region: Optional[Region] = None
        self.told_unknown = False


class BaseClient:
    """Settings, and the servers that they name. The twins add connections, and the waiting."""

    def __init__(
        self,
        url: Union[str, Sequence[str]] = "localhost:8001",
        *,
        model: str = "ensemble",
        tls: Optional[TLSConfig] = None,
        headers: Optional[Mapping[str, str]] = None,
        timeout: float = 30.0,
        retry: Optional[RetryPolicy] = None,
        fallback: Optional[Fallback] = None,
        observer: Optional[Observer] = None,
        transport: str = "grpc",
    ) -> None:
        self._settings = Settings.of(url, model, tls, headers, timeout, retry, fallback, observer, transport)
        self._budget = Budget(self._settings.retry.budget, self._settings.retry.reserve)
        self._closed = False
        self._lock = threading.RLock()
        self._looking_up = threading.RLock()
        self._process = os.getpid()
        self._connections: dict[Member, Any] = {}
        self._left_behind: list[Any] = []
        self._tasks: set[Any] = set()
        self._regions: Optional[RegionPool] = None
        # Until when a server that has refused a region is spared further ones; a token may have been missing.
        self._without_shm: dict[Member, float] = {}
        # Which regions each server has been told of, and not yet that they are gone.
        self._told: dict[Member, set[str]] = {}
        # The same by address, from event loops that are gone.
        self._stale: dict[str, set[str]] = {}
        self._start_over()

    def _start_over(self) -> None:
        """Forgets what is known of the servers."""
        self._looked_up, self._look_up_again = 0.0, False
        self._gone: list[Member] = []
        self._balancer = Balancer([Member(url, url=url) for url in self._settings.urls], self._ejected)

    # -- building calls ------------------------------------------------------------------------------------------

    def _classification(
        self,
        images: Sequence[bytes],
        *,
        top_k: Optional[int],
        mask: bool,
        model: Optional[str],
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        model = model or self._settings.model

        def build(left: float, region: Optional[tuple[str, int]] = None) -> Any:
            return _protocol.build_request(model, images, top_k, mask, left, region)

        call = self._call_of("ModelInfer", build, model, timeout, headers, traceparent)
        call.images = images if self._settings.shared_memory else ()
        return call

    def _inference(
        self,
        model: str,
        tensors: Mapping[str, Any],
        outputs: Sequence[str],
        parameters: Optional[Parameters],
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        request = _protocol.build_tensors(model, tensors, outputs, parameters or {})

        def build(left: float) -> Any:
            request.parameters["timeout"].int64_param = max(1, int(left * 1e6))
            return request

        return self._call_of("ModelInfer", build, model, timeout, headers, traceparent)

    def _question(self, method: str, message: Any, timeout: Optional[float]) -> Call:
        def build(left: float) -> Any:  # noqa: ARG001 - such a question carries no deadline of its own
            return message

        return self._call_of(method, build, self._settings.model, timeout, None, None)

    def _call_of(
        self,
        method: str,
        build: Callable[..., Any],
        model: str,
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        if self._closed:
            raise ValueError("the client is closed")
        seconds = self._settings.timeout if timeout is None else check_timeout(timeout)
        return Call(method, build, model, seconds, self._settings.with_headers(headers, traceparent))

    # -- the course of a call ------------------------------------------------------------------------------------

    def _attempts(self, call: Call) -> Attempts:
        return Attempts(self._balancer, self._budget, self._settings.retry, call.timeout)

    def _failed(
        self, error: Any, call: Call, attempts: Attempts, member: Member, connected: bool
    ) -> tuple[VisionClientError, Optional[float]]:
        """The typed error of a failed try, and the pause before the next; None if there shall be none."""
        details = error.details() or ""
        if "refused" in details and _accepts_ipv4(member.address):
            details = "failed to connect: socket closed"  # what the other address, which gRPC does not show, says
        typed = _protocol.translate(
            error.code(), details, model=call.model, address=member.address, timeout=call.timeout, connected=connected
        )
        attempts.settle(member, typed, own_model=call.model == self._settings.model)
        pause = attempts.pause_after(typed, details)
        if pause is None:
            self._tell("call", type(typed).__name__, time.monotonic() - call.began)
        else:
            self._tell("retry", typed)
        return typed, pause

    def _succeeded(self, call: Call, attempts: Attempts, member: Member) -> None:
        attempts.settle(member, None)
        self._tell("call", "ok", time.monotonic() - call.began)

    def _tell(self, what: str, *arguments: Any) -> None:
        """Tells the observer, whose own mistakes must not cost an answer."""
        try:
            getattr(self._settings.observer, what)(*arguments)
        except Exception:
            LOG.exception("the observer raised")

    def _degrades(self, error: VisionClientError) -> bool:
        """Whether the fallback answers for servers that did not."""
        return self._settings.fallback is not None and isinstance(
            error, (ServerUnavailableError, DeadlineExceededError)
        )

    # -- shared memory -------------------------------------------------------------------------------------------

    def _place(self, call: Call) -> None:
        """Puts the call's images into a region, where there is room for one; else they go in the message."""
        if not call.images or call.region is not None:
            return
        with self._lock:
            pool = self._regions = self._regions or RegionPool()
        try:
            call.region = pool.take(call.images)
        except OSError as error:
            LOG.warning("shared memory is not used for this call: /dev/shm has no room for it (%s)", error.strerror)
            call.images = ()

    def _must_register(self, call: Call, member: Member) -> bool:
        """Whether the server is to be told of the call's region."""
        return (
            call.region is not None
            and self._regions is not None
            and not self._spares(member)
            and member not in self._regions.registered[call.region]
        )

    def _registered(self, call: Call, member: Member, error: Optional[Any]) -> None:
        """The server has taken the region or, with an error, refused it."""
        assert self._regions is not None
        assert call.region is not None
        if error is None:
            self._regions.registered[call.region].add(member)
        elif error.code() in NOT_REACHED and "restricted" not in (error.details() or ""):
            raise error
        else:
            first = member not in self._without_shm
            self._without_shm[member] = time.monotonic() + REFUSED_S
            self._told.get(member, set()).discard(call.region.name)
            LOG.log(
                logging.WARNING if first else logging.DEBUG,
                "%s takes no shared memory from here, so images go over gRPC (%s)",
                member.address,
                error.details(),
            )

    def _spares(self, member: Member) -> bool:
        return time.monotonic() < self._without_shm.get(member, 0.0)

    def _message(self, call: Call, member: Member, left: float) -> Any:
        if call.region is None or self._spares(member):
            return call.build(left)
        return call.build(left, (call.region.name, sum(4 + len(image) for image in call.images)))

    def _knows_no_region(self, error: Any, call: Call, member: Member) -> bool:
        """Whether a try failed because the server has forgotten the regions: it has been restarted."""
        known = call.region is None or UNKNOWN_REGION not in (error.details() or "").lower()
        if known or call.told_unknown or self._regions is None:
            return False
        call.told_unknown = True
        self._regions.forget(member)
        self._told.pop(member, None)
        return True

    def _release(self, call: Call, answered: bool) -> list[tuple[str, Member]]:
        """Frees the call's region; returns the names of regions that are gone, with a server to be told of each.

        A region whose call has not been answered may still be read: it is never used again.
        """
        region, call.region = call.region, None
        if region is None or self._regions is None:
            return []
        gone = self._regions.give_back(region) if answered else [region]
        return [(one.name, member) for one in gone for member in self._regions.drop(one)]

    def _abandon_regions(self) -> list[tuple[str, Member]]:
        """Removes all regions, at the end; returns what servers are still to be told."""
        if self._regions is not None:
            self._regions.close()
            self._regions = None
        told, self._told = self._told, {}
        return [(name, member) for member, names in told.items() for name in names]

    # -- servers -------------------------------------------------------------------------------------------------

    def _ejected(self, member: Member) -> None:
        self._look_up_again = True
        self._tell("ejection", member.address)

    def _must_look_up(self) -> bool:
        """Whether the addresses shall be resolved now: before the first call, and after an ejection."""
        now = time.monotonic()
        if self._looked_up and not (self._look_up_again and now - self._looked_up > LOOK_UP_AGAIN_S):
            return False
        self._looked_up, self._look_up_again = now, False
        return True

    def _take(self, answers: Sequence[Sequence[Any]]) -> None:
        """Takes the resolvers' answers, one for each URL. Servers that are gone end with their last call."""
        members: list[Member] = []
        for url, found in zip(self._settings.urls, answers):
            known = [member for member in self._balancer.members if member.url == url]
            # A resolver that does not answer has nothing to say against what is known.
            members += known if known and not found else members_of(url, found)
        self._gone += self._balancer.replace(list({member.address: member for member in members}.values()))

    def _retired(self) -> list[Member]:
        """The servers that are gone and that no call is under way to any more."""
        ended = [member for member in self._gone if not member.outstanding]
        self._gone = [member for member in self._gone if member.outstanding]
        return ended

    def _readiness(self) -> Any:
        return service_pb2.ModelReadyRequest(name=self._settings.model)


def _accepts_ipv4(address: str) -> bool:
    """Whether somebody listens at localhost's IPv4 address, of whom gRPC tells nothing where ::1 refuses as well."""
    host, _, port = address.rpartition(":")
    if host != "localhost":
        return False
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=0.2):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def is_well(error: Any) -> bool:
    """Whether a server that answers a question about its readiness with an error may be called all the same.

    It may want a token that only calls have.
    """
    return error.code() not in NOT_REACHED or "restricted" in (error.details() or "").lower()


def server_info(response: Any) -> ServerInfo:
    """From the protocol's ServerMetadata."""
    return ServerInfo(response.name, response.version, tuple(response.extensions))


def model_infos(response: Any) -> list[ModelInfo]:
    """From the protocol's RepositoryIndex."""
    return [ModelInfo(entry.name, entry.version, entry.state, entry.reason) for entry in response.models]


def degraded(sources: Sequence[Any], answers: Sequence[Any]) -> list[Result]:
    """The fallback's answers as results."""
    return [Result(source, tuple(answer), degraded=True) for source, answer in zip(sources, answers)]
