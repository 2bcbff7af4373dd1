"""``triton-vision prepare``: makes the models' artifacts, in this environment or in the one that has torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from triton_vision.cli.paths import add_repository_option, checkout, find_repository
from triton_vision.server import launch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "prepare",
        help="make the models' artifacts",
        description="Makes the artifacts that the models need (model.onnx), each checked against its PyTorch module, "
        "and says from which weights. ResNet-50's ImageNet weights are downloaded (103 MB); EfficientNet-Lite0's come "
        "with the set-up.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="which models; by default all that can be made")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="ResNet-50's weights: a state dict with torchvision's names, or 'random' for tests and benchmarks",
    )
    parser.add_argument("--force", action="store_true", help="make artifacts anew that are up to date")
    add_repository_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the export where torch is; its exit code is the command's."""
    repository = find_repository(args.repository)
    if repository is None:
        print("error: there is no model repository here: name one with --repository", file=sys.stderr)
        return 2
    if args.weights not in (None, "random") and not Path(args.weights).is_file():
        print(f"error: there is no weights file {args.weights}", file=sys.stderr)
        return 2
    python = _python_with_torch()
    if python is None:
        print(
            "error: PyTorch is not installed here: run 'make setup', or name a Python that has it in "
            "TRITON_VISION_EXPORT_PYTHON",
            file=sys.stderr,
        )
        return 2
    command = [python, "-m", "triton_vision.export", str(repository.resolve()), *args.models]
    if args.weights:
        command += ["--weights", args.weights if args.weights == "random" else str(Path(args.weights).resolve())]
    if args.force:
        command.append("--force")
    # Bound to this process's life: an export must not go on, and write, for somebody who has left.
    return subprocess.call([sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command])


def _python_with_torch() -> str | None:
    """The Python to export with: named, this one, or the checkout's export environment."""
    named = os.environ.get("TRITON_VISION_EXPORT_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    root = checkout()
    python = root / ".venv-export" / "bin" / "python" if root else None
    return str(python) if python is not None and python.is_file() else None
