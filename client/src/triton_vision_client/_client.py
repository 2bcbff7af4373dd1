"""What the synchronous and the asyncio client share: everything but waiting."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from tritonclient.grpc import service_pb2

from triton_vision_client import _protocol
from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._calls import NOT_REACHED, Attempts, Budget, Call
from triton_vision_client._errors import (
    DeadlineExceededError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._names import Names, members_of
from triton_vision_client._observe import Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._regions import Regions
from triton_vision_client._results import ModelInfo, Prediction, Result, ServerInfo
from triton_vision_client._settings import Fallback, Settings, check_timeout

LOG = logging.getLogger("triton_vision_client")
# An ejected server is asked whether it is well; how long it may take to say so.
PROBE_S = 2.0
UNREGISTER_S = 2.0

Parameters = Mapping[str, Union[bool, int, float, str]]


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
        self._process = os.getpid()
        self._connections: dict[Member, Any] = {}
        self._left_behind: list[Any] = []
        self._tasks: set[Any] = set()
        self._regions = Regions()
        # Regions that servers have been told of, by address, from event loops that are gone.
        self._stale: dict[str, set[str]] = {}
        self._start_over()

    def _start_over(self) -> None:
        """Forgets what is known of the servers."""
        self._gone: list[Member] = []
        self._found = {url: [Member(url)] for url in self._settings.urls}
        self._balancer = Balancer([member for row in self._found.values() for member in row], self._ejected)
        self._names = Names(self._settings.urls, self._take)

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
        pause = attempts.pause_after(typed)
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

    # -- servers -------------------------------------------------------------------------------------------------

    def _ejected(self, member: Member) -> None:
        self._names.suspect()
        self._tell("ejection", member.address)

    def _take(self, url: str, answers: Sequence[Any]) -> None:
        """Takes what the resolver says of an address. Servers that are gone end with their last call."""
        with self._lock:
            self._found[url] = members_of(url, answers)
            members = {member.address: member for row in self._found.values() for member in row}
            self._gone += self._balancer.replace(list(members.values()))

    def _retired(self) -> list[Any]:
        """The connections to servers that are gone and that no call is under way to any more."""
        if not self._gone:
            return []
        with self._lock:
            ended = [member for member in self._gone if not member.outstanding and not member.probing]
            self._gone = [member for member in self._gone if member not in ended]
            for member in ended:
                self._regions.forget(member)
            return [self._connections.pop(member) for member in ended if member in self._connections]

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
    """The fallback's answers as results.

    Raises:
        TypeError: an answer is no sequence of Predictions.
    """
    results = []
    for source, answer in zip(sources, answers):
        if not isinstance(answer, (list, tuple)) or not all(isinstance(entry, Prediction) for entry in answer):
            raise TypeError(f"the fallback must return a list of Predictions, and has returned {answer!r:.100}")
        results.append(Result(source, tuple(answer), degraded=True))
    return results
