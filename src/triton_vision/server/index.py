"""Asking a running server, over gRPC, whether it lives and which of its models are broken."""

from __future__ import annotations

import re
from types import TracebackType

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class ServerIndex:
    """A connection to one server, for its keeper.

    Args:
        address: ``HOST:PORT`` of the gRPC endpoint.
    """

    def __init__(self, address: str) -> None:
        # A proxy from the environment must not come between a keeper and its own server.
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.enable_http_proxy", 0), ("grpc.initial_reconnect_backoff_ms", 100)]
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def live(self, timeout: float) -> bool:
        """Whether the server answers within ``timeout`` seconds."""
        try:
            answer = self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(answer.live)

    def broken(self) -> dict[str, str]:
        """Model name -> why, of every model that is not ready; the reason may be empty."""
        index = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=5.0)
        broken: dict[str, str] = {}
        for model in index.models:
            if model.state != "READY":
                broken[model.name] = plain_reason(model.reason)
            else:
                broken.pop(model.name, None)
        return broken

    def __enter__(self) -> ServerIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def plain_reason(reason: str) -> str:
    """Triton's reason without the stack trace that a Python model's exception brings."""
    return re.sub(r"\s+", " ", reason.split("\nAt:")[0]).strip(" ;")
