"""Asking a running server, over gRPC, whether it lives and which of its models are broken; loading models anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision.server.errors import ModelLoadError


class ServerIndex:
    """A connection to one server, for its keeper.

    Args:
        address: ``HOST:PORT`` of the gRPC endpoint.
        headers: sent with every question, such as the token that opens the repository's index.
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self._metadata = tuple((headers or {}).items())
        # A proxy from the environment must not come between a keeper and its own server.
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.enable_http_proxy", 0), ("grpc.initial_reconnect_backoff_ms", 100)]
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def live(self, timeout: float) -> bool:
        """Whether the server answers within ``timeout`` seconds."""
        try:
            answer = self._stub.ServerLive(
                service_pb2.ServerLiveRequest(), timeout=timeout, wait_for_ready=True, metadata=self._metadata
            )
        except grpc.RpcError:
            return False
        return bool(answer.live)

    def broken(self) -> dict[str, str]:
        """Model name -> why, of every model that is not ready; the reason may be empty."""
        request = service_pb2.RepositoryIndexRequest()
        index = self._stub.RepositoryIndex(request, timeout=5.0, metadata=self._metadata)
        return broken_models((model.name, model.state, model.reason) for model in index.models)

    def config(self, model: str) -> dict[str, Any]:
        """The configuration with which a model runs, in Triton's JSON form.

        Raises:
            ModelLoadError: the server does not tell.
        """
        request = service_pb2.ModelConfigRequest(name=model)
        try:
            answer = self._stub.ModelConfig(request, timeout=5.0, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ModelLoadError({model: plain_reason(error.details() or str(error.code()))}) from None
        config: dict[str, Any] = json_format.MessageToDict(answer.config, preserving_proto_field_name=True)
        return config

    def load(self, model: str, config: Mapping[str, Any], timeout: float) -> None:
        """Loads a model with that configuration, in place of the one that runs.

        Raises:
            ModelLoadError: it did not load, and the one that ran goes on; or the server did not answer in time.
        """
        request = service_pb2.RepositoryModelLoadRequest(model_name=model)
        request.parameters["config"].string_param = json.dumps(config)
        try:
            self._stub.RepositoryModelLoad(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ModelLoadError({model: plain_reason(error.details() or str(error.code()))}) from None

    def __enter__(self) -> ServerIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


# What Triton and the stage kit put before a reason: a status, and whose configuration is wrong.
PREFIX = re.compile(r"^(?:(?:Internal|Invalid argument|Not found|Unavailable): )?(?:ConfigError: (?:[^\s:]+: )?)?")
# In a stack trace, a file of the folder of links from which Triton loads.
PLACE = re.compile(r"/models/([^/\s]+/\d+/[^\s(]+)\((\d+)\)")


def broken_models(index: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Model name -> why, of every model in Triton's index (name, state, reason) that is not ready."""
    broken: dict[str, str] = {}
    for name, state, reason in index:
        if state != "READY":
            broken[name] = plain_reason(reason)
        else:
            broken.pop(name, None)
    return broken


def plain_reason(reason: str) -> str:
    """Triton's reason in one sentence; of a Python model's stack trace, the place in the model's own file."""
    text, _, trace = reason.partition("\nAt:")
    text = PREFIX.sub("", re.sub(r"\s+", " ", text).strip(" ;"))
    place = PLACE.search(trace)
    return f"{text} ({place[1]}, line {place[2]})" if place else text
