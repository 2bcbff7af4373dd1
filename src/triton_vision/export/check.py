"""Whether an artifact answers as its module does, and how far it is off."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch

from triton_vision.export.graph import GraphError
from triton_vision.export.networks import INPUT, OUTPUT, SIDE

Runner = Callable[[Any], Any]
# What is kept: the root mean square of the logits' differences, as a share of their standard deviation over the
# classes. Measured on both networks: float32 in another order 1e-6, FP16 up to 0.03, INT8 0.03 and 0.15. Much more says
# that the calibration images are not the network's kind.
TOLERANCE = {"fp32": 1e-4, "fp16": 0.1, "int8": 0.35}
BATCHES = (1, 3)


@dataclass(frozen=True)
class Difference:
    """How an artifact differs from its module, over the images it was compared on.

    Attributes:
        largest: of the logits' absolute differences.
        relative: root mean square of the differences, as a share of the logits' standard deviation over the classes.
        agreeing: images with the same best label.
        images: how many there were.
        classes: how many logits.
    """

    largest: float
    relative: float
    agreeing: int
    images: int
    classes: int

    def __str__(self) -> str:
        return f"logits differ by at most {self.largest:.2g}, the best label agrees on {self.agreeing} of {self.images}"


def run_module(module: Any) -> Runner:
    """UINT8 pixels ``[N, 224, 224, 3]`` to FP32 logits, through PyTorch."""

    def run(pixels: Any) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(pixels)).numpy()

    return run


def run_graph(graph: bytes) -> Runner:
    """The same through ONNX Runtime."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run([OUTPUT], {INPUT: pixels})[0]


def run_script(script: bytes) -> Runner:
    """The same through TorchScript, loaded from its bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return run_module(torch.jit.load(io.BytesIO(script), map_location="cpu"))


def samples(images: Any = None, seed: int = 0) -> Any:
    """The images to compare on, UINT8 ``[N, 224, 224, 3]``: those given, else noise of several kinds."""
    if images is not None:
        return images
    generator = np.random.default_rng(seed)
    # Flat, coarse and fine: a network sees more than one scale.
    cells = [generator.integers(0, 256, (2, side, side, 3), dtype=np.uint8) for side in (1, 7, 28, SIDE)]
    return np.concatenate([cell.repeat(SIDE // cell.shape[1], 1).repeat(SIDE // cell.shape[1], 2) for cell in cells])


def compare(expected: Runner, found: Runner, images: Any, precision: str = "fp32") -> Difference:
    """Runs both on the images, in batches of 1 and 3.

    Raises:
        GraphError: the shapes differ, or the logits by more than TOLERANCE allows.
    """
    largest, agreeing, squares, variance, classes = 0.0, 0, 0.0, 0.0, 0
    for batch in _batches(images):
        ours, theirs = expected(batch), found(batch)
        if theirs.shape != ours.shape or ours.ndim != 2 or len(ours) != len(batch):
            raise GraphError(
                f"the artifact answers {list(theirs.shape)} to {len(batch)} images, its module {list(ours.shape)}"
            )
        classes = ours.shape[1]
        delta = theirs.astype(np.float64) - ours
        largest = max(largest, float(np.abs(delta).max()))
        squares += float((delta**2).mean(axis=1).sum())
        variance += float(ours.var(axis=1).sum())
        agreeing += int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    relative = float(np.sqrt(squares / variance)) if variance else float(squares > 0)
    if not relative <= TOLERANCE[precision]:  # nor if it is not a number
        raise GraphError(
            f"the {precision} artifact's logits differ too much from the module's: {relative:.2g} of their standard "
            f"deviation, and {TOLERANCE[precision]:g} is allowed"
        )
    return Difference(largest, relative, agreeing, len(images), classes)


def _batches(images: Any) -> Iterator[Any]:
    start, turn = 0, 0
    while start < len(images):
        size = BATCHES[turn % len(BATCHES)]
        yield np.ascontiguousarray(images[start : start + size])
        start, turn = start + size, turn + 1
