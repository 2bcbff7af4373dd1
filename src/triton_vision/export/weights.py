"""Weights: which they are, where they come from, and the download of those that can be had."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torchvision's ResNet-50 IMAGENET1K_V1, as PyTorch publishes it.
CHECKPOINT = "resnet50-0676ba61.pth"
CHECKPOINT_URL = f"https://download.pytorch.org/models/{CHECKPOINT}"
CHECKPOINT_BYTES = 102_530_333
CHECKPOINT_SHA256 = "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a"
CONNECT_TIMEOUT_S = 8.0
CHUNK = 1 << 20
# What training scripts wrap a state dict in, and put in front of its names: DataParallel, torch.compile, Lightning.
NESTED = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")


class WeightsError(Exception):
    """Weights cannot be had or read; its text is one plain sentence."""


@dataclass(frozen=True)
class Weights:
    """Where a network's numbers come from.

    Attributes:
        kind: ``imagenet1k_v1``, ``package``, ``file`` or ``random``.
        source: the same for a person.
        sha256: of the file; empty for random ones.
    """

    kind: str
    source: str
    sha256: str


IMAGENET1K_V1 = Weights("imagenet1k_v1", "torchvision's IMAGENET1K_V1", CHECKPOINT_SHA256)


def cache_folder() -> Path:
    """``$TRITON_VISION_CACHE``, else ``triton-vision`` in the user's cache folder."""
    named = os.environ.get("TRITON_VISION_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "triton-vision")


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def imagenet_checkpoint(url: str = CHECKPOINT_URL, expected: str = CHECKPOINT_SHA256) -> tuple[Path, Weights]:
    """The checkpoint's path: from the cache, from torch's own cache, or downloaded.

    Raises:
        WeightsError: it cannot be downloaded, or is not the file it should be.
    """
    path = cache_folder() / CHECKPOINT
    torch_home = os.environ.get("TORCH_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch"
    )
    for candidate in (path, Path(torch_home, "hub", "checkpoints", CHECKPOINT)):
        if candidate.is_file() and sha256(candidate) == expected:
            return candidate, IMAGENET1K_V1
    download(url, path, expected)
    return path, IMAGENET1K_V1


def download(url: str, path: Path, expected: str, timeout: float = CONNECT_TIMEOUT_S) -> None:
    """Downloads ``url`` to ``path``, resuming what an earlier try left, and keeps it only if its SHA-256 is right.

    Args:
        timeout: seconds without a byte after which the download counts as failed.

    Raises:
        WeightsError: with the reason in one sentence. What has arrived is kept for the next try, unless it is wrong.
    """
    part = path.with_suffix(path.suffix + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            # Of two downloads of one file, the second finds what the first has brought.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file() and sha256(path) == expected:
                return
            _reach(url, timeout)
            _fetch(url, part, timeout)
            if sha256(part) != expected:
                part.unlink()
                raise WeightsError(f"{url} is not the file it should be (its SHA-256 differs); it was not kept")
            os.replace(part, path)
    # URLError, timeouts and refused connections are OSErrors.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise WeightsError(f"{url} cannot be downloaded ({reason})") from None


def _reach(url: str, timeout: float) -> None:
    """Connects once within ``timeout`` seconds in all, which resolver and connect by themselves do not promise."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if urllib.request.getproxies():
        return  # the proxy connects
    outcome: list[OSError] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout).close()
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise TimeoutError(f"no connection to {host} within {timeout:g} s")
    if outcome:
        raise outcome[0]


def _fetch(url: str, part: Path, timeout: float) -> None:
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to fetch: the digest decides
            return
        raise
    with answer:
        begins = (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        resumed = have > 0 and answer.status == 206 and begins
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else 0
        show = Progress(part.name.removesuffix(".part"), total, have)
        with part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                show(have)
        show.end()
    if total and have < total:
        raise OSError(f"the connection ended after {have} of {total} bytes; the next try goes on from there")


class Progress:
    """A bar on a terminal, a line every few seconds elsewhere; on stderr."""

    EVERY_S = 5.0

    def __init__(self, name: str, total: int, start: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._bar = sys.stderr.isatty()
        self._shown = clock()
        if start:
            print(f"  {name}: going on from {start / 1e6:.0f} MB", file=sys.stderr)

    def __call__(self, have: int) -> None:
        now = self._clock()
        if now - self._shown < (0.1 if self._bar else self.EVERY_S):
            return
        self._shown = now
        share = have / self._total if self._total else 0.0
        text = f"  {self._name}: {have / 1e6:.0f} of {self._total / 1e6:.0f} MB"
        if self._bar:
            filled = int(30 * share)
            text = f"\r{text} [{'#' * filled}{'.' * (30 - filled)}]"
        print(text, end="" if self._bar else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the bar's line."""
        if self._bar:
            print(file=sys.stderr)


def load_checkpoint(path: Path) -> tuple[dict[str, Any], str]:
    """A state dict and its file's SHA-256, read without running code from the file.

    Accepts a bare state dict or one under a usual name (NESTED), with or without a usual prefix on every name.

    Raises:
        WeightsError: there is no such file, or it is no state dict.
    """
    import torch

    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for a broken file
        raise WeightsError(
            f"{path.name} cannot be read as a PyTorch state dict ({type(error).__name__}); "
            "save one with torch.save(model.state_dict(), …)"
        ) from None
    for name in NESTED:
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
            break
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(key, str) for key in loaded):
        raise WeightsError(f"{path.name} holds no state dict")
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in loaded):
            loaded = {key.removeprefix(prefix): value for key, value in loaded.items()}
    return loaded, sha256(path)
