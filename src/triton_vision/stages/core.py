"""The network on the CPU, inside the Python backend: the core where a server has no other backend for it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from triton_vision.stages.config import StageConfig, Tensor
from triton_vision.stages.errors import ConfigError
from triton_vision.stages.kit import BatchStage

OPENVINO_TYPES = {"TYPE_UINT8": "u8", "TYPE_FP32": "f32", "TYPE_FP16": "f16", "TYPE_INT32": "i32", "TYPE_INT64": "i64"}
# Parameter value -> OpenVINO's INFERENCE_PRECISION_HINT.
PRECISIONS = ("f32", "bf16", "f16")


class EmbeddedCore(BatchStage):
    """``INPUT__0`` to ``OUTPUT__0`` through the ONNX graph that the parameter ``artifacts`` names, with OpenVINO.

    Parameters: ``inference_precision`` (f32, bf16, f16; default f32, since OpenVINO's own default is bf16 wherever
    the CPU has it) and ``threads`` (default: the cores visible to the process).
    """

    def setup(self, config: StageConfig) -> None:
        import openvino

        given = config.require("input", "INPUT__0", {"TYPE_UINT8": (-1, -1, -1), "TYPE_FP32": (-1, -1, -1)})
        answer = config.require("output", "OUTPUT__0", {"TYPE_FP32": (-1,)})
        path = config.artifact("model.onnx")
        precision = config.choice("inference_precision", "f32", PRECISIONS)
        engine = openvino.Core()
        try:
            graph = engine.read_model(path)
        except RuntimeError:
            raise ConfigError(f"parameters artifacts: {path.name} is not a readable ONNX file; make it again") from None
        _check(graph.inputs, given, "input")
        _check(graph.outputs, answer, "output")
        compiled = engine.compile_model(
            graph,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": precision,
                # One batch at a time with all cores: the dynamic batcher has already done the queueing.
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": self.threads,
            },
        )
        self._infer = compiled.create_infer_request()

    def process(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """``[rows, height, width, 3]`` of pixels to ``[rows, classes]`` of logits."""
        result: NDArray[Any] = self._infer.infer([pixels], share_inputs=True, share_outputs=True)[0]
        return result

    def teardown(self) -> None:
        del self._infer


def _check(ports: Any, tensor: Tensor, field: str) -> None:
    """Raises ConfigError unless the graph has exactly the tensor that the configuration declares."""
    names = [name for port in ports for name in port.get_names()]
    if len(ports) != 1 or tensor.name not in names:
        raise ConfigError(f"{field} {tensor.name}: the graph's {field}s are {', '.join(names) or 'none'}")
    port = ports[0]
    shape = port.get_partial_shape()
    dims = tuple(shape[axis].get_length() if shape[axis].is_static else -1 for axis in range(1, len(shape)))
    kind = port.get_element_type().get_type_name()
    if dims != tensor.dims or kind != OPENVINO_TYPES[tensor.triton_type]:
        raise ConfigError(
            f"{field} {tensor.name}: the configuration says {tensor.triton_type} {list(tensor.dims)}, "
            f"the graph {kind} {list(dims)}"
        )
