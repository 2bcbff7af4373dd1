"""What tests share: one real Triton for the session, small images made on the spot, and a wait with an end."""

from __future__ import annotations

import fcntl
import io
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from triton_vision.server import TritonServer, process
from triton_vision.server.security import Security

# A shell that runs this in the background ignores Ctrl-C for it, and nohup SIGHUP: so would every program under test.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Triton waits for its models' processes in whole seconds. What tests end by themselves has no work in flight, and that
# `serve` ends its server in order is tested with the command.
process.EXIT_TIMEOUT_S = 0

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"
COMMAND = [sys.executable, "-m", "triton_vision.cli.main"]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model repository: EfficientNet-Lite0 with its real weights, ResNet-50 with random ones.

    The exports are kept between runs, outside the checkout's own repository, and made again when they are stale.
    """
    kept = ROOT / "build" / "test-repository"
    kept.mkdir(parents=True, exist_ok=True)
    copy = tmp_path_factory.mktemp("models") / "repository"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # among the workers
        shutil.copytree(
            ROOT / "model_repository",
            kept,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("model.onnx*", "model.pt*", "model.plan*", "__pycache__"),
        )
        subprocess.run([*COMMAND, "prepare", "--repository", str(kept), "--weights", "random"], check=True)
        shutil.copytree(kept, copy)
    return copy


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    """A real Triton on ``repository``, on free ports, whose shared memory is open."""
    with TritonServer(repository, security=Security(shm_open=True)) as running:
        yield running


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Polls until the condition holds; fails when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def jpeg(seed: int, size: tuple[int, int] = (320, 240), **options: object) -> bytes:
    """A JPEG of smooth random colours, another one for each seed."""
    return encoded(noise(seed, size), "JPEG", quality=90, **options)


def noise(seed: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """An RGB image of smooth random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The image as a file of that format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
