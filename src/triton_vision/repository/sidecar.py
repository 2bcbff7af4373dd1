"""What is known of an artifact: the JSON sidecar beside it, and whether the two and the configuration fit together.

``triton-vision prepare`` writes the sidecar. Backends check little by themselves: LibTorch loads a file whose outputs
have other names or sizes than the configuration declares, and answers wrongly later.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from triton_vision.repository.model import Model, variants

SUFFIX = ".json"
UNKNOWN = "unknown"
CHUNK = 1 << 20


def read(artifact: Path) -> dict[str, Any]:
    """The sidecar's content; empty if there is none, or none that can be read."""
    try:
        content = json.loads(artifact.with_name(artifact.name + SUFFIX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal; read once for as long as the file does not change."""
    state = path.stat()
    return _sha256(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def _sha256(path: Path, state: tuple[int, ...]) -> str:  # noqa: ARG001 - part of the cache's key
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def problem(model: Model) -> str:
    """Why one of the model's artifacts must not be served, in one sentence; empty if nothing speaks against it.

    An artifact without a sidecar is its owner's business.
    """
    for version in model.served_versions():
        for name in model.wanted_artifacts():
            path = model.artifact(version, name)
            stated = read(path)
            if "sha256" not in stated:
                continue
            shown = f"{version.name}/{name}"
            if not path.is_file():
                return f"{shown} is not a file"
            if stated["sha256"] != sha256(path):
                return (
                    f"{shown} is not the file that {shown}{SUFFIX} describes (swapped, corrupted or half-written): "
                    "make it again, or remove the sidecar if the file is right"
                )
            differs = _differs(model, stated.get("tensors"))
            if differs:
                return f"{shown} does not fit {model.config_file}: {differs}"
    return ""


def disagreement(model: Model) -> str:
    """That the artifacts of the model's variants were made from different weights; empty if they were not."""
    made: dict[str, str] = {}
    for version in model.served_versions():
        folders = [version] if model.beside is None else [version, model.beside / version.name]
        for file in (file for folder in folders for file in sorted(folder.glob(f"*{SUFFIX}"))):
            source = read(file.with_suffix("")).get("weights_sha256")
            if source:
                made.setdefault(str(source), f"{version.name}/{file.stem}")
    if len(made) < 2:
        return ""
    return f"{' and '.join(made.values())} were made from different weights: make one of them again"


def weights(model: Model) -> str:
    """The kind of weights that the sidecars of the model's artifacts state.

    ``unknown`` without a valid one, where the model has variants or names its artifacts in a parameter, as the suite's
    do; empty for other models.
    """
    named = set(model.wanted_artifacts() if variants(model.path) else model.extra_artifacts()) - {"model.py"}
    kinds = set()
    for version in model.served_versions():
        for name in model.wanted_artifacts():
            path = model.artifact(version, name)
            stated = read(path)
            if "sha256" in stated and isinstance(stated.get("weights"), str) and stated["sha256"] == sha256(path):
                kinds.add(stated["weights"])
            elif name in named:
                kinds.add(UNKNOWN)
    return next((kind for kind in ("random", UNKNOWN) if kind in kinds), next(iter(kinds), ""))


def _differs(model: Model, tensors: Any) -> str:
    """What the configuration declares otherwise than the artifact has it; empty if nothing."""
    if model.config is None or not isinstance(tensors, dict):
        return ""
    for field in ("input", "output"):
        declared = {
            entry.name: f"{model_config_pb2.DataType.Name(entry.data_type).removeprefix('TYPE_')} {list(entry.dims)}"
            for entry in getattr(model.config, field)
        }
        listed = tensors.get(field)
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        made = {str(entry.get("name")): f"{entry.get('datatype')} {entry.get('dims')}" for entry in entries}
        if declared != made:
            return f"its {field}s are {_listed(made)}, the configuration declares {_listed(declared)}"
    return ""


def _listed(tensors: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(tensors.items())) or "none"
