"""From a PyTorch module to an ONNX graph that takes pixels as they are, checked before it is kept."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

OPSET = 17
INPUT, OUTPUT = "INPUT__0", "OUTPUT__0"
# The largest difference between the engines' logits that is kept, as a share of the logits' range: float32
# arithmetic in another order stays well below it.
TOLERANCE = 1e-4


class GraphError(Exception):
    """The exported graph is not what it must be; nothing of it is kept."""


class FromPixels(nn.Module):
    """UINT8 ``[N, 224, 224, 3]`` to FP32 ``[N, classes]``: the network with its normalisation in front.

    The cast comes first, since TensorRT takes UINT8 nowhere else. The normalisation is one multiplication and one
    addition, ``x * (1 / std) + (-mean / std)``, which engines fuse. It stays in front of the first convolution:
    folded into that one's bias it would be wrong at the borders, where zeros are padded *after* normalisation.
    """

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        deviation = torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        average = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1)
        self.register_buffer("scale", (1.0 / deviation).float())
        self.register_buffer("shift", (-average / deviation).float())

    def forward(self, pixels: Any) -> Any:
        x = pixels.to(torch.float32).permute(0, 3, 1, 2)
        return self.network(x * self.scale + self.shift)


def export(module: FromPixels) -> bytes:
    """The module as ONNX with a dynamic batch.

    Raises:
        GraphError: the graph is not valid, or something other than one Cast reads ``INPUT__0``.
    """
    buffer = io.BytesIO()
    example = torch.zeros(1, 224, 224, 3, dtype=torch.uint8)
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
    graph = buffer.getvalue()
    check_structure(onnx.load_from_string(graph))
    return graph


def check_structure(model: Any) -> None:
    """Raises GraphError unless the graph is valid and one Cast alone reads ``INPUT__0``."""
    onnx.checker.check_model(model, full_check=True)
    readers = [node.op_type for node in model.graph.node if INPUT in node.input]
    if readers != ["Cast"]:
        raise GraphError(f"{INPUT} is read by {readers}, and must be read by one Cast alone")


def compare(module: FromPixels, graph: bytes, seed: int = 0) -> float:
    """The largest absolute difference between the module's logits and ONNX Runtime's, at batches of 1 and 3.

    Raises:
        GraphError: it is above TOLERANCE times the logits' range, or not a number.
    """
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(seed)
    worst = 0.0
    for batch in (1, 3):
        pixels = generator.integers(0, 256, (batch, 224, 224, 3), dtype=np.uint8)
        with torch.no_grad():
            expected = module(torch.from_numpy(pixels)).numpy()
        (found,) = session.run([OUTPUT], {INPUT: pixels})
        difference = float(np.abs(found - expected).max())
        allowed = TOLERANCE * float(np.ptp(expected))
        if found.shape != expected.shape or not difference <= allowed:
            raise GraphError(f"the graph's logits differ by {difference:.3g} from PyTorch's; {allowed:.3g} is allowed")
        worst = max(worst, difference)
    return worst


def versions() -> dict[str, str]:
    """The tools that made a graph."""
    return {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
