"""Instances at work: their logits beside the CPU module's, their rate and their latency."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_check.engines import CLASSES, CheckError, Engine, Network

# What is allowed: the root mean square of the logits' differences, as a share of their standard deviation over the
# classes. FP32 differs by the order of additions alone; TF32, which TensorRT takes for FP32 products, has FP16's ten
# bits.
TOLERANCE = {"FP32": 1e-4, "TF32": 2e-2, "FP16": 2e-2}
IMAGES = 16
WARM_UP = 5


@dataclass(frozen=True)
class Parity:
    """How an engine's logits differ from the CPU module's.

    Attributes:
        relative: root mean square of the differences, as a share of the logits' standard deviation over the classes.
        largest: of the absolute differences.
        same_best: images with the same best class, of ``images``.
    """

    engine: str
    relative: float
    largest: float
    same_best: int
    images: int
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; one that is not a number is not."""
        return self.relative <= self.allowed

    def __str__(self) -> str:
        verb = "agrees with" if self.holds else "DIFFERS from"
        return (
            f"{self.engine}: {verb} the CPU module: {self.relative:.2g} of the logits' standard deviation "
            f"({self.allowed:g} allowed), at most {self.largest:.2g}; best label the same for {self.same_best} of "
            f"{self.images}"
        )


@dataclass(frozen=True)
class Rate:
    """One measurement; a latency is a whole batch's, from host memory to host memory."""

    engine: str
    batch: int
    instances: int
    images_per_second: float
    p50_ms: float
    p99_ms: float
    batches: int


class Lane:
    """One instance at work: a stream, a pinned buffer for the pixels and one for the logits.

    Args:
        device: ``cuda`` or ``cpu``.
        network: an instance of an engine.
        pixels: the batch that it works on, UINT8 ``[N, 224, 224, 3]``.
    """

    def __init__(self, device: str, network: Network, pixels: Any) -> None:
        import torch

        self._device, self._network = device, network
        pinned = device == "cuda"
        self._stream = torch.cuda.Stream() if pinned else None
        self._given = torch.from_numpy(pixels).clone()
        self._answer = torch.empty(len(pixels), CLASSES)
        if pinned:
            self._given, self._answer = self._given.pin_memory(), self._answer.pin_memory()

    def step(self) -> None:
        """One batch: pixels to the device, through the network, logits back."""
        import torch

        on_stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        with torch.inference_mode(), on_stream:
            logits = self._network(self._given.to(self._device, non_blocking=True))
            self._answer.copy_(logits, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    @property
    def logits(self) -> Any:
        """The last batch's, FP32 ``[N, 1000]``."""
        return self._answer.numpy()


def make_images() -> Any:
    """Seeded noise at several scales, UINT8 ``[IMAGES, 224, 224, 3]``."""
    import numpy as np

    generator = np.random.default_rng(0)
    sides = (1, 7, 28, 224)
    cells = [generator.integers(0, 256, (IMAGES // len(sides), side, side, 3), dtype=np.uint8) for side in sides]
    return np.concatenate(
        [cell.repeat(224 // side, 1).repeat(224 // side, 2) for cell, side in zip(cells, sides, strict=True)]
    )


def compare(engine: Engine, found: Any, expected: Any) -> Parity:
    """An engine's logits beside the CPU module's, both ``[N, 1000]``."""
    import numpy as np

    difference = found.astype(np.float64) - expected
    relative = float(np.sqrt((difference**2).mean() / expected.var(axis=1).mean()))
    same = int((found.argmax(axis=1) == expected.argmax(axis=1)).sum())
    allowed = TOLERANCE[engine.precision]
    return Parity(str(engine), relative, float(np.abs(difference).max()), same, len(found), allowed)


def check_parity(engine: Engine, device: str, images: Any, expected: Any) -> Parity:
    """All images, one by one and in one batch: the worse of the two."""
    import numpy as np

    network = engine.open()
    rows = []
    for image in images:
        lane = Lane(device, network, image[np.newaxis])
        lane.step()
        rows.append(lane.logits)
    whole = Lane(device, network, images)
    whole.step()
    parities = [compare(engine, found, expected) for found in (np.concatenate(rows), whole.logits)]
    return max(parities, key=lambda parity: (not parity.holds, parity.relative))


def measure(
    engine: Engine, networks: Sequence[Network], device: str, batch: int, seconds: float, images: Any, expected: Any
) -> Rate:
    """Lets the instances work for some seconds, each with a batch under way.

    Raises:
        CheckError: an instance fails, or its last answer under load is not the module's.
    """
    rows = [(offset + step) % len(images) for offset in range(len(networks)) for step in range(batch)]
    orders = [rows[number * batch : (number + 1) * batch] for number in range(len(networks))]
    lanes = [Lane(device, network, images[order]) for network, order in zip(networks, orders, strict=True)]
    latencies: list[list[float]] = [[] for _ in lanes]
    failures: list[Exception] = []
    ready = threading.Barrier(len(lanes) + 1)
    ends = float("inf")

    def work(number: int) -> None:
        try:
            for _ in range(WARM_UP):
                lanes[number].step()
            ready.wait()
            ended = 0.0
            while ended < ends:
                began = time.perf_counter()
                lanes[number].step()
                ended = time.perf_counter()
                latencies[number].append(ended - began)
        except Exception as error:  # noqa: BLE001 - raised again by the main thread
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(lanes))]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait()
    ends = time.perf_counter() + seconds
    for thread in threads:
        thread.join()
    real = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise CheckError(f"batch {batch}, {len(lanes)} instances: {type(real[0]).__name__}: {real[0]}"[:300])
    for lane, order in zip(lanes, orders, strict=True):
        parity = compare(engine, lane.logits, expected[order])
        if not parity.holds:
            raise CheckError(
                f"batch {batch}, {len(lanes)} instances: the logits differ by {parity.relative:.2g} under load"
            )
    every = sorted(latency for lane in latencies for latency in lane)
    # By each one's own time: the last batch ends after the others'.
    rate = sum(batch * len(lane) / sum(lane) for lane in latencies)
    p50, p99 = (1000 * percentile(every, share) for share in (50, 99))
    return Rate(str(engine), batch, len(lanes), rate, p50, p99, len(every))


def percentile(ordered: Sequence[float], share: int) -> float:
    """The value that ``share`` percent of an ascending sequence do not exceed (nearest rank)."""
    return ordered[max(0, -(-share * len(ordered) // 100) - 1)]
