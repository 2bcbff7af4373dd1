"""A stand-in for Triton's Python backend, so that a stage runs in plain Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from triton_vision.stages import adapt
from triton_vision.stages.kit import Adapter, Stage


@dataclass
class FakeTensor:
    name: str
    value: Any

    def as_numpy(self) -> Any:
        return self.value


@dataclass
class FakeRequest:
    tensors: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)

    def parameters(self) -> str:
        return json.dumps(self.given)


class FakeError:
    INVALID_ARG, INTERNAL = "INVALID_ARG", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class FakeResponse:
    def __init__(self, output_tensors: list[FakeTensor], error: FakeError | None = None) -> None:
        self.error = error
        self.outputs = {tensor.name: tensor.value for tensor in output_tensors}


class FakeLogger:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log_error(self, line: str) -> None:
        self.lines.append(line)


class FakeUtils:
    """What the kit uses of ``triton_python_backend_utils``."""

    Tensor, InferenceResponse, TritonError = FakeTensor, FakeResponse, FakeError

    def __init__(self) -> None:
        self.Logger = FakeLogger()

    def get_input_tensor_by_name(self, request: FakeRequest, name: str) -> FakeTensor:
        return FakeTensor(name, request.tensors[name])


def arguments(config: str, folder: Path = Path()) -> dict[str, str]:
    """What Triton would hand to ``initialize`` for a config.pbtxt's text."""
    message = text_format.Parse(config, model_config_pb2.ModelConfig())
    model = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return {"model_config": json.dumps(model), "model_repository": str(folder), "model_version": "1"}


def load(stage: type[Stage], config: str, folder: Path = Path()) -> Adapter:
    """The stage, set up as Triton would."""
    adapter = adapt(stage)(FakeUtils())
    adapter.initialize(arguments(config, folder))
    return adapter


def images(*contents: bytes, status: list[bytes] | None = None, **parameters: Any) -> FakeRequest:
    """A request of encoded images."""
    tensors = {"IMAGE": np.array(contents, np.object_).reshape(-1, 1)}
    if status is not None:
        tensors["STATUS"] = np.array(status, np.object_).reshape(-1, 1)
    return FakeRequest(tensors, parameters)
