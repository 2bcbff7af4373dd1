"""``triton-vision prepare``: makes the models' artifacts, in this environment or in the one that has torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from triton_vision.cli.output import say
from triton_vision.cli.paths import add_repository_option, checkout, find_repository
from triton_vision.server import launch

# Enough for the extremes of the activations to settle; more costs memory and time.
MOST_CALIBRATED = 256


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "prepare",
        help="make the models' artifacts",
        description="Makes the artifacts that the models need (model.onnx, model.pt, and model.plan where there are a "
        "GPU and TensorRT), each checked against its PyTorch module, and says from which weights. ResNet-50's ImageNet "
        "weights are downloaded (103 MB); EfficientNet-Lite0's come with the set-up.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="which models; by default all that can be made")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="resnet50_trt's network: a state dict with torchvision's names, a TorchScript or an ONNX file, or "
        "'random' for tests and benchmarks. A TorchScript file is a program, which is run: take it from whom you trust",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "int8"),
        default="fp32",
        help="of model.onnx, and so of the plan made from it (default: %(default)s)",
    )
    parser.add_argument("--calibration", metavar="FOLDER", help="images of the kind that int8 shall be good at")
    parser.add_argument(
        "--into",
        metavar="DIR",
        help="make a repository of its own there, with the chains around the model: for weights with other classes",
    )
    parser.add_argument("--labels", metavar="FILE", help="the label of each class on a line of its own, for --into")
    for name, what in (("mean", "mean"), ("std", "standard deviation")):
        parser.add_argument(
            f"--{name}",
            metavar="R,G,B",
            help=f"the {what} that the network was trained with, on [0, 1]; by default ImageNet's",
        )
    parser.add_argument("--force", action="store_true", help="make artifacts anew that are up to date")
    add_repository_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the export where torch is, then builds the plans where a GPU is; 0, 1 or 2 as ``prepare`` says."""
    repository = find_repository(args.repository)
    if repository is None:
        return _fail("there is no model repository here: name one with --repository")
    for option in ("weights", "labels"):
        named = getattr(args, option)
        if named not in (None, "random") and not Path(named).is_file():
            return _fail(f"there is no {option} file {named}")
    try:
        command = [str(repository.resolve()), *args.models, "--precision", args.precision, *_triples(args)]
    except ValueError as error:
        return _fail(str(error))
    for option in ("weights", "labels", "into"):
        named = getattr(args, option)
        if named is not None:
            command += [f"--{option}", named if named == "random" else str(Path(named).resolve())]
    if args.force:
        command.append("--force")
    python = python_with_torch()
    if python is None:
        return _fail(
            "PyTorch is not installed here: run 'make setup', or name a Python that has it in "
            "TRITON_VISION_EXPORT_PYTHON"
        )
    with tempfile.TemporaryDirectory(prefix="triton-vision-") as folder:
        if args.calibration is not None and args.precision == "int8":
            pixels = Path(folder, "calibration.npy")
            used = _calibration(args.calibration, pixels)
            if not used:
                return _fail(f"there are no images in {args.calibration}")
            command += ["--pixels", str(pixels)]
            say(f"calibrating on {used} images of {args.calibration}")
        # Bound to this process's life: an export must not go on, and write, for somebody who has left.
        bound = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid())]
        code = subprocess.call([*bound, python, "-m", "triton_vision.export", *command])
        if code not in (0, 1, 2, 130):
            return _fail(f"{python} could not export (exit code {code})")
    target = Path(args.into or repository)
    if code == 0 and args.weights not in (None, "random"):
        _tell_recipe(target)
    return code if code == 2 else max(code, _plans(target))


def python_with_torch() -> str | None:
    """The Python to export with: named, this one, or the checkout's export environment."""
    named = os.environ.get("TRITON_VISION_EXPORT_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    root = checkout()
    python = root / ".venv-export" / "bin" / "python" if root else None
    return str(python) if python is not None and python.is_file() else None


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _triples(args: argparse.Namespace) -> list[str]:
    """``--mean`` and ``--std`` as the export's arguments.

    Raises:
        ValueError: one is not three numbers, or a standard deviation not above 0.
    """
    options: list[str] = []
    for name in ("mean", "std"):
        text = getattr(args, name)
        if text is None:
            continue
        try:
            values = [float(part) for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) != 3 or not all(0 <= value <= 1 for value in values) or (name == "std" and 0 in values):
            raise ValueError(f"--{name} {text!r} is not three numbers on [0, 1], such as 0.485,0.456,0.406")
        options += [f"--{name}", *map(str, values)]
    return options


def _calibration(folder: str, target: Path) -> int:
    """Writes the pixels of at most MOST_CALIBRATED images, evenly chosen, as the preprocessing makes them; how many.

    What is not an image is passed over.
    """
    import numpy as np

    from triton_vision.cli.classify import find_files
    from triton_vision.stages.errors import ImageRefused
    from triton_vision.stages.recipe import read_pixels

    try:
        paths = sorted(find_files([folder]))
    except OSError:
        return 0
    pixels = []
    for path in paths[:: max(1, len(paths) // MOST_CALIBRATED)]:
        try:
            pixels.append(read_pixels(Path(path).read_bytes()))
        except (ImageRefused, OSError):
            continue
    if pixels:
        np.save(target, np.stack(pixels[:MOST_CALIBRATED]))
    return len(pixels[:MOST_CALIBRATED])


def _tell_recipe(repository: Path) -> None:
    """Says what images the chains around an own network make, since nothing fails if it was trained on others."""
    from triton_vision.accuracy.chain import chains_over
    from triton_vision.export.networks import NETWORKS

    cores = [name for name, network in NETWORKS.items() if network.takes_weights]
    for chain in (chain for core in cores for chain in chains_over(repository, core)):
        say(
            f"{chain.name}: assumes that the network was trained with: {chain.training()}. Otherwise its answers are "
            f"wrong without an error: change resize, crop and filter in {chain.first}/config.pbtxt, or give --mean and "
            "--std"
        )


def _plans(repository: Path) -> int:
    """Builds the TensorRT plans where a GPU and TensorRT are; 1 if one could not be."""
    from triton_vision.export.plan import builder
    from triton_vision.gpu import visible_gpus
    from triton_vision.server.plans import ensure_plans

    if not visible_gpus() or not builder():
        return 0
    refused = ensure_plans(repository, None, threading.Event(), say)
    for name, why in refused.items():
        say(f"{name}: {why}")
    return 1 if refused else 0
