"""What artifacts are made from: a network of the suite with some weights, or a file that somebody brings along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_vision.export import own
from triton_vision.export.graph import FromPixels, around_script
from triton_vision.export.networks import Network, PrepareError
from triton_vision.export.weights import Weights, sha256


@dataclass(frozen=True)
class Normalisation:
    """Per channel (RGB), on pixel values from 0 to 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """A network, ready to be exported.

    Attributes:
        origin: which weights these are.
        classes: how many logits.
        module: makes the module from UINT8 pixels to logits, in FP16 if told so; None for an ONNX file.
        graph: an ONNX file's graph with the contract's tensors; empty for a module.
        note: what its owner should know; empty for nothing.
    """

    origin: Weights
    classes: int
    module: Callable[[bool], Any] | None
    graph: bytes = b""
    note: str = ""


def open_source(network: Network, weights: str | None, normalisation: Normalisation) -> Source:
    """Finds out what ``weights`` (see ``prepare``) is, and loads it.

    Raises:
        PrepareError, WeightsError: it is nothing that artifacts can be made from.
    """
    path = Path(weights) if weights not in (None, "random") else None
    if path is not None and not path.is_file():
        raise PrepareError(f"there is no weights file {path}")
    kind = own.kind_of(path) if path is not None else "state_dict"
    if path is None or kind == "state_dict":
        return _of_network(network, weights, normalisation)
    if kind == "onnx":
        graph, classes, digest, note = own.load_graph(path, normalisation.mean, normalisation.std)
        origin = Weights("file", path.name, digest)
        return Source(origin, classes, None, own.named_classes(graph, classes), note)
    origin = Weights("file", path.name, sha256(path))
    script, pixels, classes = own.load_script(path)

    def module(half: bool) -> Any:
        if half:
            raise PrepareError(f"{path.name} is TorchScript, whose precision is its own; FP16 needs a state dict")
        return script if pixels else around_script(script, normalisation.mean, normalisation.std)

    return Source(origin, classes, module)


def _of_network(network: Network, weights: str | None, normalisation: Normalisation) -> Source:
    built, origin = network.build(weights)

    def module(half: bool) -> Any:
        # FP16 changes the network that it is given.
        net = network.build(weights)[0] if half else built
        return FromPixels(net, normalisation.mean, normalisation.std, half=half).eval()

    classes = network.classes if network.count is None else network.count(built)

    return Source(origin, classes, module)
