"""What the synchronous and the asyncio client share: everything but waiting."""

from __future__ import annotations

import os
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

# What a server that has been reached does not answer.
NOT_REACHED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# An ejected server is asked whether it is well; how long it may take to say so.
PROBE_S = 2.0
# A name that stands for several servers is looked up again when one of them fails, but not more often than this.
LOOK_UP_AGAIN_S = 5.0

Parameters = Mapping[str, Union[bool, int, float, str]]


class Call:
    """One request, whatever it asks for: how it is built, where it goes, and how long it may take.

    Attributes:
        method: of the inference protocol's service.
        build: the seconds left -> the message.
        model: for error messages.
    """

    def __init__(self, method: str, build: Callable[[float], Any], model: str, timeout: float, metadata: Metadata):
        self.method, self.build, self.model, self.timeout, self.metadata = method, build, model, timeout, metadata
        self.began = time.monotonic()


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
    ) -> None:
        self._settings = Settings.of(url, model, tls, headers, timeout, retry, fallback, observer)
        self._budget = Budget(self._settings.retry.budget, self._settings.retry.reserve)
        self._closed = False
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._connections: dict[Member, Any] = {}
        self._left_behind: list[Any] = []
        self._probes: set[Any] = set()
        self._start_over()

    def _start_over(self) -> None:
        """Forgets what is known of the servers."""
        self._looked_up, self._look_up_again = 0.0, False
        self._balancer = Balancer([Member(url) for url in self._settings.urls], self._ejected)

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

        def build(left: float) -> Any:
            return _protocol.build_request(model, images, top_k, mask, left)

        return self._call_of("ModelInfer", build, model, timeout, headers, traceparent)

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
        build: Callable[[float], Any],
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
        typed = _protocol.translate(
            error.code(), details, model=call.model, address=member.address, timeout=call.timeout, connected=connected
        )
        attempts.settle(member, typed)
        pause = attempts.pause_after(typed, details)
        if pause is None:
            self._settings.observer.call(type(typed).__name__, time.monotonic() - call.began)
        else:
            self._settings.observer.retry(typed)
        return typed, pause

    def _succeeded(self, call: Call, attempts: Attempts, member: Member) -> None:
        attempts.settle(member, None)
        self._settings.observer.call("ok", time.monotonic() - call.began)

    def _degrades(self, error: VisionClientError) -> bool:
        """Whether the fallback answers for servers that did not."""
        return self._settings.fallback is not None and isinstance(
            error, (ServerUnavailableError, DeadlineExceededError)
        )

    # -- servers -------------------------------------------------------------------------------------------------

    def _ejected(self, member: Member) -> None:
        self._look_up_again = True
        self._settings.observer.ejection(member.address)

    def _must_look_up(self) -> bool:
        """Whether the addresses shall be resolved now: before the first call, and after an ejection."""
        now = time.monotonic()
        if self._looked_up and not (self._look_up_again and now - self._looked_up > LOOK_UP_AGAIN_S):
            return False
        self._looked_up, self._look_up_again = now, False
        return True

    def _take(self, answers: Sequence[Sequence[Any]]) -> list[Member]:
        """Takes the resolvers' answers, one for each URL; returns the servers that are gone."""
        members = [member for url, found in zip(self._settings.urls, answers) for member in members_of(url, found)]
        return self._balancer.replace(list({member.address: member for member in members}.values()))

    def _readiness(self) -> Any:
        return service_pb2.ModelReadyRequest(name=self._settings.model)


def server_info(response: Any) -> ServerInfo:
    """From the protocol's ServerMetadata."""
    return ServerInfo(response.name, response.version, tuple(response.extensions))


def model_infos(response: Any) -> list[ModelInfo]:
    """From the protocol's RepositoryIndex."""
    return [ModelInfo(entry.name, entry.version, entry.state, entry.reason) for entry in response.models]


def degraded(sources: Sequence[Any], answers: Sequence[Any]) -> list[Result]:
    """The fallback's answers as results."""
    return [Result(source, tuple(answer), degraded=True) for source, answer in zip(sources, answers)]
