"""An artifact and its sidecar on disk: replaced atomically, described truthfully."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
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
    partial = _written(path, content)  # the large part first: a full disk costs nothing that is there
    try:
        # The sidecar goes first: until the artifact has followed, the two are seen not to belong together, and what is
        # there is known to be somebody's.
        replace(path.with_name(path.name + SIDECAR), (json.dumps(description, indent=2) + "\n").encode())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """The sidecar's content, if artifact and sidecar are there and belong together; else nothing."""
    description = claimed(path)
    try:
        return description if description.keys() >= KEYS and description["sha256"] == sha256(path) else {}
    except OSError:
        return {}


def claimed(path: Path) -> dict[str, Any]:
    """The sidecar's content, whether or not the artifact is the one that it speaks of."""
    try:
        description = json.loads(path.with_name(path.name + SIDECAR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) else {}


@contextlib.contextmanager
def lock(repository: Path) -> Iterator[None]:
    """Held while a repository's artifacts are made: of two at work on one, the second waits for the first."""
    name = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:16]
    with Path(tempfile.gettempdir(), f"triton-vision-{os.getuid()}-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_stale(path: Path) -> None:
    """Removes the half-written files that killed processes left beside ``path``."""
    for stale in path.parent.glob(f".{path.name}*.tmp"):
        if not Path("/proc", stale.name.split(".")[-2]).exists():
            stale.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Replaces a file by ``content``: a kill leaves the old one or the new one, whole."""
    os.replace(_written(path, content), path)


def _written(path: Path, content: bytes) -> Path:
    """The content in a file beside ``path``, on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial
