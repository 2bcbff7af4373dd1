"""A model repository of its own for a network with other classes: the chains around it, with its count and labels."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from triton_vision.export.networks import PrepareError
from triton_vision.labels import read_labels as labelled

LABELS = "labels.txt"
ARTIFACTS = ("*.onnx", "*.onnx.json", "*.pt", "*.pt.json", "*.plan", "*.plan.json", "*.cache", "*.tmp", "__pycache__")
# A tensor of logits in a configuration; the dims that it declares.
LOGITS = re.compile(r'(name:\s*"(?:OUTPUT__0|LOGITS)"[^{}]*?dims:\s*\[\s*)(-?\d+)(\s*\])')


def declared_classes(model: Path) -> int:
    """How many classes a core's config.pbtxt declares.

    Raises:
        PrepareError: it declares no ``OUTPUT__0`` with one dimension.
    """
    file = model / "config.pbtxt"
    match = LOGITS.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    if match is None:
        raise PrepareError(f"{file} declares no OUTPUT__0 with one dimension")
    return int(match[2])


def read_labels(path: Path, classes: int) -> list[str]:
    """A label file's lines, one for each class.

    Raises:
        PrepareError: it cannot be read, or has another number of lines.
    """
    try:
        labels = labelled(path)
    except ValueError as error:
        raise PrepareError(f"{path} {error}") from None
    if len(labels) != classes or not all(labels):
        empty = next((number for number, label in enumerate(labels, 1) if not label), 0)
        what = f"an empty line ({empty})" if empty else f"{len(labels)} lines"
        raise PrepareError(f"{path.name} has {what}; the network has {classes} classes, and each needs a line")
    return labels


def check_target(repository: Path, core: str, target: Path) -> None:
    """Raises PrepareError unless a repository for ``core`` may be made at ``target``, or is there already."""
    if target.exists() and not target.is_dir():
        raise PrepareError(f"{target} is a file; --into names a directory")
    # What begins with a dot is a copy that was cut short.
    full = target.exists() and any(not entry.name.startswith(".") for entry in target.iterdir())
    if full and not (target / core / "config.pbtxt").is_file():
        raise PrepareError(f"{target} is not empty and holds no {core}: name another directory")
    if repository.resolve() == target.resolve():
        raise PrepareError("--into must name another directory than the repository")
    if repository.resolve() in target.resolve().parents:
        raise PrepareError(f"{target} lies in the repository, which takes every directory in it for a model")


def fork(repository: Path, core: str, target: Path, classes: int, labels: list[str], replaced: Sequence[str]) -> None:
    """Makes, or brings up to date, a repository with the ensembles over ``core`` and what they chain, fitted to it.

    Artifacts are not copied. Files that are there already, such as a configuration changed by hand, stay, but for the
    number of classes and the labels. If the labels change, the core's artifacts that are to be ``replaced`` are removed
    first: whatever happens next, no network is served with the labels of another.
    """
    if _labels(target) not in (None, labels):
        for name in replaced:
            (target / core / "1" / name).unlink(missing_ok=True)
    for name in _chained(repository, core):
        if not (target / name).is_dir():
            half = target / f".{name}.half"
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(repository / name, half, ignore=shutil.ignore_patterns(*ARTIFACTS))
            half.rename(target / name)
        (target / name / "1").mkdir(exist_ok=True)
        for file in (target / name).glob("**/*.pbtxt"):
            text = file.read_text(encoding="utf-8")
            fitted = LOGITS.sub(rf"\g<1>{classes}\g<3>", text)
            if fitted != text:
                file.write_text(fitted, encoding="utf-8")
        if (target / name / LABELS).is_file():
            (target / name / LABELS).write_text("\n".join(labels) + "\n", encoding="utf-8")


def _labels(repository: Path) -> list[str] | None:
    """The labels that a repository has; None without any."""
    for file in repository.glob(f"*/{LABELS}"):
        return labelled(file)
    return None


def _chained(repository: Path, core: str) -> list[str]:
    """The core, the ensembles that chain it, and everything that those chain."""
    names = [core]
    for config in sorted(repository.glob("*/config.pbtxt")):
        steps = re.findall(r'model_name:\s*"([^"]+)"', config.read_text(encoding="utf-8"))
        if core in steps:
            names += [config.parent.name, *steps]
    return list(dict.fromkeys(names))
