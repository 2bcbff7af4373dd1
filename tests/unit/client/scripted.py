"""Servers scripted in process: what they answer, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from triton_vision_client import RetryPolicy
from triton_vision_client._translate import translate
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conftest import wait_until

CODE = grpc.StatusCode
ONCE = RetryPolicy(attempts=2, initial=0.01)
Script = Callable[[Any, Any], Any]


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each call as a script says; keeps what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return self.script(request, context)


class Ready(Scripted):
    """It says that it is live and ready, too, unless it wants a token for that, or has other models alone."""

    token = ""
    models: set[str] | None = None
    live: Script | None = None
    ready: Script | None = None
    # What it says of itself. This one does not survive cancelled calls.
    name, version = "triton", "2.51.0"

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        return service_pb2.ServerMetadataResponse(name=self.name, version=self.version)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        if not self.token or dict(context.invocation_metadata()).get("token") != self.token:
            context.abort(CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")
        index = service_pb2.RepositoryIndexResponse()
        index.models.add(name="m", version="1", state="READY")
        index.models.add(name="n", version="1", state="UNAVAILABLE")
        return index

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        statistics = service_pb2.ModelStatisticsResponse()
        statistics.model_stats.add(name="m", version="1")
        return statistics

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's
        return self.live(request, context) if self.live else service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's
        if self.token and dict(context.invocation_metadata()).get("token") != self.token:
            context.abort(CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")
        if self.ready:
            return self.ready(request, context)
        return service_pb2.ModelReadyResponse(ready=self.models is None or request.name in self.models)


Start = Callable[..., tuple[str, Ready]]


def answer(request: Any, context: Any) -> Any:  # noqa: ARG001
    """One class for each image, whose id is the image's length."""
    raw, ids, at = request.raw_input_contents[0], [], 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        ids.append(length)
        at += 4 + length
    response = service_pb2.ModelInferResponse(model_name=request.model_name)
    count = len(ids)
    for name, kind, content in (
        ("LABELS", "BYTES", b"\1\0\0\0x" * count),
        ("CLASS_IDS", "INT32", np.array(ids, np.int32).tobytes()),
        ("SCORES", "FP32", np.ones(count, np.float32).tobytes()),
        ("STATUS", "BYTES", b"\0\0\0\0" * count),
    ):
        response.outputs.add(name=name, datatype=kind, shape=[count, 1])
        response.raw_output_contents.append(content)
    return response


def abort(code: grpc.StatusCode, details: str) -> Script:
    def script(request: Any, context: Any) -> None:  # noqa: ARG001
        context.abort(code, details)

    return script


def unless(down: Callable[[], bool]) -> Script:
    """Answers, but loses the connection for as long as ``down`` says so."""

    def script(request: Any, context: Any) -> Any:
        if down():
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        return answer(request, context)

    return script


def hanging() -> tuple[Script, threading.Event]:
    release = threading.Event()

    def script(request: Any, context: Any) -> Any:
        release.wait(20)
        return answer(request, context)

    return script, release


def typed(code: Any, details: str, *, tls: bool = False) -> Exception:
    """What the client makes of a status."""
    return translate(code, details, model="m", address="host:1", timeout=30.0, connected=True, tls=tls)


def silent(request: Any, context: Any) -> Any:  # noqa: ARG001
    """Leaves its caller without an answer."""
    wait_until(lambda: not context.is_active(), 20)
