"""Running a stage in plain Python, without Triton, as Triton's Python backend would.

    runner = StageRunner(Grey, config_text)
    answer = runner.infer({"PIXELS": pixels}, parameters={"top_k": 3})
    answer.outputs["GREY"]          # or answer.error, answer.code

Nothing here is imported by a stage that serves.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from triton_vision.stages.adapter import Adapter, adapt
from triton_vision.stages.kit import Stage


@dataclass(frozen=True)
class Tensor:
    """``pb_utils.Tensor``: a name and an array; strings are bytes objects."""

    name: str
    value: Any

    def as_numpy(self) -> Any:
        """The array."""
        return self.value


class Sender:
    """``pb_utils.InferenceResponseSender``: keeps the one response."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answer: Answer | None = None
        self._sent = threading.Event()

    def send(self, response: Answer, flags: int) -> None:
        """Keeps the response, which must be the final one."""
        assert flags == Utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.answer = response
        self._sent.set()

    def is_cancelled(self) -> bool:
        """Whether the request has been cancelled."""
        return self.request.cancelled

    def wait(self) -> Answer:
        """The response, as soon as it has been sent."""
        self._sent.wait()
        assert self.answer is not None
        return self.answer


@dataclass
class Request:
    """``pb_utils.InferenceRequest``, as far as the kit looks at it.

    Attributes:
        tensors: input name -> array with a batch dimension.
        given: the request parameters.
        id: the request id.
        timeout_us: microseconds; 0 is none.
        cancelled: whether the caller has cancelled it.
    """

    tensors: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    timeout_us: int = 0
    cancelled: bool = False
    sender: Sender | None = None

    def get_response_sender(self) -> Sender:
        """Where the answer goes that does not come with those of the batch."""
        self.sender = Sender(self)
        return self.sender

    def parameters(self) -> str:
        """The request parameters, as JSON."""
        return json.dumps(dict(self.given)) if self.given else ""

    def request_id(self) -> str:
        """The request id."""
        return self.id

    def timeout(self) -> int:
        """Microseconds."""
        return self.timeout_us

    def is_cancelled(self) -> bool:
        """Whether the caller has cancelled it."""
        return self.cancelled


class TritonError:
    """``pb_utils.TritonError``; its codes are their names here."""

    INVALID_ARG, INTERNAL, UNAVAILABLE, CANCELLED = "INVALID_ARG", "INTERNAL", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Answer:
    """``pb_utils.InferenceResponse``.

    Attributes:
        outputs: output name -> array; empty after an error.
        error, code: what the caller is told; empty if it is answered.
    """

    def __init__(self, output_tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.value for tensor in output_tensors}
        self.error = error.message if error else ""
        self.code = error.code if error else ""


class Logger:
    """``pb_utils.Logger``: lines are kept, each with its level."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def log_error(self, line: str) -> None:
        """Keeps an error."""
        self.lines.append(("error", line))

    def log_warn(self, line: str) -> None:
        """Keeps a warning."""
        self.lines.append(("warning", line))


class Utils:
    """What the kit uses of ``triton_python_backend_utils``.

    Attributes:
        Logger: what has been logged.
        counters: (metric, label values in order of their names) -> value.
    """

    Tensor, InferenceResponse, TritonError = Tensor, Answer, TritonError
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def __init__(self) -> None:
        self.Logger = Logger()
        self.counters: dict[tuple[str, ...], float] = {}
        counters = self.counters

        class Metric:
            def __init__(self, key: tuple[str, ...]) -> None:
                self.key = key

            def increment(self, value: float) -> None:
                counters[self.key] = counters.get(self.key, 0.0) + value

        class MetricFamily:
            COUNTER = "counter"

            def __init__(self, *, name: str, description: str, kind: str) -> None:
                self.name, self.description, self.kind = name, description, kind

            def Metric(self, *, labels: Mapping[str, str]) -> Metric:  # noqa: N802 - Triton's name
                return Metric((self.name, *(labels[key] for key in sorted(labels))))

        self.MetricFamily = MetricFamily

    def get_input_tensor_by_name(self, request: Request, name: str) -> Any:
        """The request's input."""
        return self.Tensor(name, request.tensors[name])


class StageRunner:
    """A stage set up as Triton would.

    Args:
        stage: the class that ``model.py`` hands to ``adapt``.
        config: the text of a ``config.pbtxt``, with a ``name``.
        folder: the model's directory, for stages that read files.

    Raises:
        ConfigError: as at load.
    """

    def __init__(self, stage: type[Stage], config: str, folder: Path = Path()) -> None:
        message = text_format.Parse(config, model_config_pb2.ModelConfig())
        self.utils = Utils()
        self.adapter: Adapter = adapt(stage)(self.utils)
        self.adapter.initialize(
            {
                "model_config": json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True)),
                "model_repository": str(folder),
                "model_version": "1",
            }
        )

    def execute(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to several requests that come in one batch; waits for those that the stage sets aside."""
        answers = self.adapter.execute(requests)
        return [
            request.sender.wait() if request.sender is not None and answer is None else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def infer(self, tensors: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> Answer:
        """The answer to one request; lists of bytes become a STRING tensor ``[rows, 1]``."""
        arrays = {
            name: np.array(value, np.object_).reshape(-1, 1) if isinstance(value, list) else value
            for name, value in tensors.items()
        }
        return self.execute([Request(arrays, parameters or {})])[0]

    def close(self) -> dict[tuple[str, ...], float]:
        """Unloads the stage; returns what it counted: (metric, label values in order of their names) -> value."""
        self.adapter.finalize()
        return self.utils.counters
