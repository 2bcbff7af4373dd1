"""``python -m triton_vision.export.evaluate``: the module that a core was made from, on pixels that Pillow alone makes.

The reference of ``triton-vision bench accuracy``: it runs none of the code that serves. Paths come in on stdin, a
JSON string a line; out goes a JSON object a line, first ``{"source", "sha256"}`` of the weights, then for each image
``{"ids", "scores"}`` (the best five) or ``{"refused"}``. ``{"fatal"}`` says in one sentence why there is no more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO

import numpy as np
from PIL import Image, ImageOps

TOP = 5
BATCH = 16
# Beyond this many pixels the resized whole, of which the crop is all that is wanted, is not made.
MOST_RESIZED = 32_000_000


# UINT8 pixels ``[N, crop, crop, 3]`` to FP32 logits ``[N, classes]``.
Runner = Callable[[Any], Any]


class EvaluateError(Exception):
    """The module cannot be asked; the text is one plain sentence."""


@dataclass(frozen=True)
class Recipe:
    """How a file becomes pixels; the names and values of the preprocessing's parameters, ``formats`` upper case."""

    resize: int
    crop: int
    filter: str
    orientation: str
    formats: tuple[str, ...]
    max_pixels: int


def read_pixels(path: str, recipe: Recipe) -> Any:
    """One file to UINT8 ``[crop, crop, 3]``, by torchvision's evaluation recipe on Pillow.

    Raises:
        Exception: whatever Pillow raises for a file that it cannot read; ValueError for one that is too large.
    """
    # An MPO is opened by the JPEG decoder, which finds out by itself.
    decoders = ["JPEG" if name == "MPO" else name for name in recipe.formats]
    with Image.open(path, formats=decoders) as opened:
        if opened.width * opened.height > recipe.max_pixels:
            raise ValueError(f"{opened.width}x{opened.height} pixels are too many")
        opened.load()
        upright = ImageOps.exif_transpose(opened) if recipe.orientation == "exif" else opened
        if upright.mode.startswith("I"):  # 16-bit grey: the upper byte
            upright = Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
        image = upright.convert("RGB")
    return np.asarray(resize_and_crop(image, recipe))


def resize_and_crop(image: Image.Image, recipe: Recipe) -> Image.Image:
    """The shorter side to ``resize``, the longer one truncated, then the centre."""
    width, height = image.size
    short = min(width, height)
    new = (int(recipe.resize * width / short), int(recipe.resize * height / short))
    left, top = (round((side - recipe.crop) / 2.0) for side in new)
    resample = Image.Resampling[recipe.filter.upper()]
    if new[0] * new[1] <= MOST_RESIZED:
        return image.resize(new, resample).crop((left, top, left + recipe.crop, top + recipe.crop))
    # A sliver: the same filter at the same places, but for the crop's pixels only.
    x, y = width / new[0], height / new[1]
    box = (left * x, top * y, min(width, (left + recipe.crop) * x), min(height, (top + recipe.crop) * y))
    return image.resize((recipe.crop, recipe.crop), resample, box=box)


def evaluate(run: Runner, paths: Iterable[str], recipe: Recipe, batch: int = BATCH) -> Iterator[dict[str, Any]]:
    """The answers, in the order of the paths; at most two batches of pixels are in memory.

    Raises:
        EvaluateError: the logits are not finite.
    """
    for files in _decoded(paths, recipe, batch):
        answers: list[dict[str, Any]] = []
        good = []
        for file in files:
            error = file.exception()
            if error is None:
                good.append(file.result())
            answers.append({"refused": f"{type(error).__name__}: {error}"} if error is not None else {})
        best = iter(_best(run(np.stack(good))) if good else ())
        yield from (answer or next(best) for answer in answers)


def _decoded(paths: Iterable[str], recipe: Recipe, batch: int) -> Iterator[list[Future[Any]]]:
    """The batches' pixels; while one is worked on, the next is being decoded."""
    source = iter(paths)
    ahead: deque[list[Future[Any]]] = deque()
    with ThreadPoolExecutor() as pool:
        while group := [pool.submit(read_pixels, path, recipe) for path in islice(source, batch)]:
            ahead.append(group)
            if len(ahead) == 2:
                yield ahead.popleft()
        yield from ahead


def _best(logits: Any) -> Iterator[dict[str, Any]]:
    if not np.isfinite(logits).all():
        raise EvaluateError("the module's logits are not finite numbers")
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    # Of equal scores the lower class id comes first, as the server has it.
    for row in shifted / shifted.sum(axis=1, keepdims=True):
        ids = np.argsort(-row, kind="stable")[:TOP]
        yield {"ids": ids.tolist(), "scores": row[ids].tolist()}


def build(name: str, weights: str | None, mean: Sequence[float] = (), std: Sequence[float] = ()) -> tuple[Runner, Any]:
    """The network as it is served, from pixels to logits; and where its weights come from.

    Args:
        weights: a state dict's or TorchScript file's path, ``random``, or None for the network's own. An ONNX file,
            of which there is no module, is run as it is by ONNX Runtime.
        mean, std: per channel on [0, 255], instead of the network's own.

    Raises:
        EvaluateError: there is no such network, or its weights cannot be had.
    """
    from triton_vision.export.networks import NETWORKS, PrepareError
    from triton_vision.export.weights import WeightsError

    if name not in NETWORKS:
        raise EvaluateError(f"there is no PyTorch module for {name}; there is for {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    if weights is not None and not network.takes_weights:
        raise EvaluateError(f"{name} has weights of its own: leave --weights out")

    from triton_vision.export import check
    from triton_vision.export.source import Normalisation, open_source

    try:
        normalisation = Normalisation(tuple(mean) or network.mean, tuple(std) or network.std)
        source = open_source(network, weights, normalisation)
    except (PrepareError, WeightsError) as error:
        raise EvaluateError(str(error)) from None
    run = check.run_graph(source.graph) if source.module is None else check.run_module(source.module(False))
    return run, source.origin


def main() -> int:
    """Called by ``triton-vision bench accuracy``."""
    parser = argparse.ArgumentParser(prog="python -m triton_vision.export.evaluate")
    parser.add_argument("network")
    parser.add_argument("--weights")
    parser.add_argument("--mean", type=float, nargs=3, default=())
    parser.add_argument("--std", type=float, nargs=3, default=())
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--filter", default="bilinear")
    parser.add_argument("--orientation", default="exif")
    parser.add_argument("--formats", default="JPEG, MPO, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF")
    parser.add_argument("--max-pixels", type=int, default=100_000_000)
    args = parser.parse_args()
    formats = tuple(name.strip().upper() for name in args.formats.split(","))
    recipe = Recipe(args.resize, args.crop, args.filter, args.orientation, formats, args.max_pixels)
    warnings.simplefilter("ignore")  # Pillow's, of what is odd about a file
    out = _take_stdout()
    try:
        run, origin = build(args.network, args.weights, args.mean, args.std)
        _say(out, {"source": origin.source, "sha256": origin.sha256})
        for answer in evaluate(run, (json.loads(line) for line in sys.stdin), recipe):
            _say(out, answer)
    except EvaluateError as error:
        _say(out, {"fatal": str(error)})
        return 2
    except ImportError as error:
        _say(out, {"fatal": f"the environment of the PyTorch module is incomplete ({error}): run 'make setup'"})
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _take_stdout() -> TextIO:
    """The protocol's stream; whatever a library prints goes to stderr from here on."""
    own = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return own


def _say(out: TextIO, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
