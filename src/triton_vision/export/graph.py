"""From a PyTorch module to an ONNX graph that takes pixels as they are."""

from __future__ import annotations

import io
import warnings
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn

from triton_vision.export.networks import INPUT, OUTPUT, SIDE, PrepareError

OPSET = 17


class GraphError(PrepareError):
    """An artifact is not what it must be; nothing of it is kept."""


class FromPixels(nn.Module):
    """UINT8 ``[N, 224, 224, 3]`` to FP32 ``[N, classes]``: the network with its normalisation in front.

    The cast comes first, since TensorRT takes UINT8 nowhere else. The normalisation is one multiplication and one
    addition, ``x * (1 / std) + (-mean / std)``, which engines fuse. It stays in front of the first convolution:
    folded into that one's bias it would be wrong at the borders, where zeros are padded *after* normalisation.

    Args:
        network: normalised FP32 ``[N, 3, 224, 224]`` to logits; it is taken over, and changed by ``half``.
        mean, std: per channel (RGB), on pixel values from 0 to 255.
        half: whether the network computes in FP16. The normalisation stays FP32, and so do the logits' tensors.
    """

    def __init__(
        self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False
    ) -> None:
        super().__init__()
        self.half_precision = half
        self.network = network.half() if half else network
        deviation = torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        average = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1)
        self.register_buffer("scale", (1.0 / deviation).float())
        self.register_buffer("shift", (-average / deviation).float())

    def forward(self, pixels: Any) -> Any:
        x = pixels.to(torch.float32).permute(0, 3, 1, 2)
        x = x * self.scale + self.shift
        return self.network(x.half()).float() if self.half_precision else self.network(x)


class PixelsToScript(nn.Module):
    """What FromPixels does, around a TorchScript module, which cannot be traced through: this is compiled itself."""

    def __init__(self, network: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        front = FromPixels(nn.Identity(), mean, std)
        self.network = network
        self.register_buffer("scale", front.scale)
        self.register_buffer("shift", front.shift)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = pixels.to(torch.float32).permute(0, 3, 1, 2)
        return self.network(x * self.scale + self.shift)


def around_script(network: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """A TorchScript network of normalised planes as one of UINT8 pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return torch.jit.script(PixelsToScript(network, mean, std).eval())


def export(module: nn.Module) -> bytes:
    """The module (UINT8 pixels to logits) as ONNX with a dynamic batch.

    Raises:
        GraphError: the graph is not valid, or something other than one Cast reads ``INPUT__0``.
    """
    buffer = io.BytesIO()
    example = torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer's remarks on constants, and on its own deprecation
        torch.onnx.export(
            module,
            (example,),
            buffer,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_axes={INPUT: {0: "batch"}, OUTPUT: {0: "batch"}},
            opset_version=OPSET,
            dynamo=False,
        )
    graph = _without_copies(buffer.getvalue())
    check_structure(graph)
    return graph


def _without_copies(graph: bytes) -> bytes:
    """The graph without Identity nodes on constants.

    The exporter keeps equal weights once and copies them to their other places; TensorRT wants a convolution's bias to
    be a constant itself.
    """
    model = onnx.load_from_string(graph)
    constants = {tensor.name for tensor in model.graph.initializer}
    copies = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Identity" and node.input[0] in constants and node.output[0] != OUTPUT
    }
    kept = [node for node in model.graph.node if node.output[0] not in copies]
    for node in kept:
        for index, name in enumerate(node.input):
            node.input[index] = copies.get(name, name)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return bytes(model.SerializeToString())


def check_structure(graph: bytes) -> None:
    """Raises GraphError unless the graph is valid, with the contract's tensors and one Cast alone to read the input."""
    model = onnx.load_from_string(graph)
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.checker.ValidationError as error:
        raise GraphError(f"the graph is not valid ONNX: {str(error).splitlines()[0]}") from None
    readers = [node.op_type for node in model.graph.node if INPUT in node.input]
    if readers != ["Cast"]:
        raise GraphError(f"{INPUT} is read by {readers}, and must be read by one Cast alone")
    (given,), (answer,) = model.graph.input, model.graph.output
    shape = [size.dim_value or size.dim_param for size in given.type.tensor_type.shape.dim]
    if given.type.tensor_type.elem_type != onnx.TensorProto.UINT8 or shape[1:] != [SIDE, SIDE, 3]:
        raise GraphError(f"{INPUT} is not UINT8 [batch, {SIDE}, {SIDE}, 3]")
    if isinstance(shape[0], int) or isinstance(answer.type.tensor_type.shape.dim[0].dim_value or "", int):
        raise GraphError(f"{INPUT} has no dynamic batch")
    if answer.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        raise GraphError(f"{OUTPUT} is not FP32")


def versions() -> dict[str, str]:
    """The tools that make artifacts."""
    return {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
