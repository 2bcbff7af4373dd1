"""An artifact and its sidecar on disk: replaced atomically, described truthfully."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from triton_vision.export.weights import sha256

SIDECAR = ".json"
# What a sidecar must say to count.
KEYS = {"sha256", "weights", "weights_source", "weights_sha256", "tools"}


def write(path: Path, content: bytes, description: dict[str, Any]) -> None:
    """Replaces ``path`` and its sidecar ``path.json``.

    A kill at any moment leaves the old artifact or the new one, whole, and a sidecar whose ``sha256`` tells whether
    it speaks of that artifact.
    """
    description = {"artifact": path.name, **description}
    path.with_name(path.name + SIDECAR).unlink(missing_ok=True)
    # The sidecar goes last: until it is there, the artifact counts as unknown and is made again.
    replace(path, content)
    replace(path.with_name(path.name + SIDECAR), (json.dumps(description, indent=2) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """The sidecar's content, if artifact and sidecar are there and belong together; else nothing."""
    try:
        description = json.loads(path.with_name(path.name + SIDECAR).read_text(encoding="utf-8"))
        if isinstance(description, dict) and description.keys() >= KEYS and description["sha256"] == sha256(path):
            return description
    except (OSError, ValueError):
        pass
    return {}


def remove_stale(path: Path) -> None:
    """Removes the half-written files that killed processes left beside ``path``."""
    for stale in path.parent.glob(f".{path.name}*.tmp"):
        if not Path("/proc", stale.name.split(".")[-2]).exists():
            stale.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Replaces a file by ``content``: a kill leaves the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
