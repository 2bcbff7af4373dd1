"""The plain loops, no server at all: as many processes as cores, each decoding and resizing one file after the other.

``reference``: simplejpeg and stock Pillow's ``resize(…, box=…)``; run it in an environment without the suite.
``kit``: the suite's own ``read_pixels``. Prints images per second of all processes together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from images import load
from PIL import Image
from workload import CROP, box, expected, stand_in

Pixels = Callable[[bytes], Any]


def reference() -> Pixels:
    """simplejpeg decodes, stock Pillow resizes the part that the crop shows."""
    import simplejpeg

    def pixels(data: bytes) -> Any:
        image = Image.fromarray(simplejpeg.decode_jpeg(data))
        return np.asarray(image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box(*image.size)))

    return pixels


def kit(fast: bool) -> Pixels:
    """The suite's own function; ``fast`` is its parameter ``decode: fast``."""
    from triton_vision.stages import Recipe, read_pixels
    from triton_vision.stages.memory import keep_small_blocks

    keep_small_blocks()
    recipe = Recipe(fast=fast)
    return lambda data: read_pixels(data, recipe)


def work(which: str, folder: Path, kind: str, seconds: float, warm: float, turn: int, results: Any) -> None:
    """One process: counts what it gets done in ``seconds``."""
    pixels = reference() if which == "reference" else kit(fast=which == "kit-fast")
    files = load(folder, kind)
    if which != "kit-fast":
        for data in files[:5]:
            got = np.rint(stand_in(pixels(data)[np.newaxis])[0] * 16).astype(int)
            if np.abs(got - expected(data)).max() > 1:
                raise SystemExit(f"error: {which} makes other pixels than the recipe")
    end = time.monotonic() + warm
    while time.monotonic() < end:
        pixels(files[turn % len(files)])
        turn += 1
    began, done = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        pixels(files[turn % len(files)])
        turn, done = turn + 1, done + 1
    results.put(done / (time.monotonic() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("reference", "kit", "kit-fast"))
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--kind", default="small")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm", type=float, default=1.0)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    results: Any = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(
            target=work, args=(args.which, args.images, args.kind, args.seconds, args.warm, 31 * core, results)
        )
        for core in range(cores)
    ]
    for process in processes:
        process.start()
    rates = []
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
        rates.append(results.get())
    print(json.dumps({"rate": sum(rates)}))


if __name__ == "__main__":
    main()
