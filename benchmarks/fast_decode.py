"""How far ``decode: fast`` is from ``decode: exact``: pixels, and the labels of EfficientNet-Lite0 with real weights.

``.venv/bin/triton-vision prepare efficientnet_lite0``, then ``.venv/bin/python benchmarks/fast_decode.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import images
import numpy as np
from PIL import Image

from triton_vision.stages import Recipe, read_pixels

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    import openvino

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=60, help="12-megapixel images, each another part of a sample photo"
    )
    args = parser.parse_args()
    graph = ROOT / "model_repository" / "efficientnet_lite0" / "1" / "model.onnx"
    engine = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    folder = ROOT / "build" / "benchmark" / "fast"
    images.make(folder, 0, args.count)
    for name in ("BILINEAR", "BICUBIC"):
        resample = Image.Resampling[name]
        mean, highest, same, same_five = [], [], 0, 0
        for data in images.load(folder, "large"):
            exact, fast = (read_pixels(data, Recipe(resample=resample, fast=fast)) for fast in (False, True))
            apart = np.abs(exact.astype(int) - fast)
            mean.append(apart.mean())
            highest.append(apart.max())
            logits = np.concatenate([engine(pixels[np.newaxis])[0] for pixels in (exact, fast)])
            order = np.argsort(-logits, axis=1)
            same += order[0, 0] == order[1, 0]
            same_five += set(order[0, :5]) == set(order[1, :5])
        print(
            f"{name.lower()}: pixels differ by {np.mean(mean):.2f} of 255 on average, {np.max(highest)} at most; "
            f"top-1 agrees on {same} of {args.count}, the five best on {same_five}"
        )


if __name__ == "__main__":
    main()
