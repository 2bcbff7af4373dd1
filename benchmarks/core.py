"""The ensemble with a real network, beside the same engine called in process in batches; they take turns.

``.venv/bin/triton-vision prepare``, then ``.venv/bin/python benchmarks/core.py``. ResNet-50 counts even with random
weights: they take as long as any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import images
import numpy as np

from triton_vision.cpu import visible_cores
from triton_vision.server import TritonServer
from triton_vision.stages import read_pixels

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmark"


def in_process(graph: Path, pixels: Any, seconds: float) -> float:
    """Images per second of the engine alone, with the core's settings, in batches of ``len(pixels)``; a process calls
    this, so that its threads end with it."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": visible_cores(),
    }
    request = openvino.compile_model(graph, "CPU", settings).create_infer_request()
    request.infer([pixels])
    began, done = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        request.infer([pixels], share_inputs=True, share_outputs=True)
        done += len(pixels)
    return done / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, default=HERE.parent / "model_repository")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--core", default="resnet50_trt")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--engine-only", action="store_true", help="one measurement of the engine, for this script itself"
    )
    args = parser.parse_args()
    args.repository = args.repository.resolve()
    images.make(BUILD / "images", 200, 0)
    if args.engine_only:
        pixels = np.stack([read_pixels(data) for data in images.load(BUILD / "images", "small")[: args.batch]])
        graph = args.repository / args.core / "1" / "model.onnx"
        print(json.dumps({"rate": in_process(graph, pixels, args.seconds)}))
        return
    engine = [sys.executable, __file__, *sys.argv[1:], "--repository", str(args.repository), "--engine-only"]
    shares: list[float] = []
    with TritonServer(args.repository) as server:
        load = [sys.executable, "load.py", "grpc", server.grpc_address, "--images", str(BUILD / "images")]
        load += ["--model", args.model, "--tolerance", "-1", "--callers", str(args.callers)]
        load += ["--seconds", str(args.seconds), "--warm", "4"]
        for _ in range(args.rounds):
            alone, served = (
                json.loads(subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout)
                for command in (engine, load)
            )
            shares.append(served["rate"] / alone["rate"])
            print(
                f"engine in process, batches of {args.batch}: {alone['rate']:.1f} images/s; {args.model} with "
                f"{args.callers} callers: {served['rate']:.1f} (P50 {served['p50']:.0f} ms); {shares[-1]:.2f} of it",
                flush=True,
            )
    print(f"median: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
