"""The benchmark's images, made from the sample photos: nothing is downloaded, no two are alike, nothing is cached."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
SMALL, LARGE = (500, 375), (4000, 3000)


def make(folder: Path, small: int, large: int) -> None:
    """Writes ``small-NNN.jpg`` (500x375, about 65 kB) and ``large-NNN.jpg`` (12 megapixels) where they are missing.

    Each is another part of one of the photos, with a little noise of its own so that its bytes are as many as a
    camera's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    photos = [Image.open(path).convert("RGB") for path in sorted(SAMPLES.glob("*.jpg"))]
    for kind, size, count, target in (("small", SMALL, small, 65_000), ("large", LARGE, large, 3_500_000)):
        for number in range(count):
            path = folder / f"{kind}-{number:03}.jpg"
            if not path.exists():
                path.write_bytes(_one(photos[number % len(photos)], size, number, target))


def _one(photo: Image.Image, size: tuple[int, int], seed: int, target: int) -> bytes:
    generator = np.random.default_rng(seed)
    share = generator.uniform(0.7, 1.0)
    width = min(photo.width, photo.height * size[0] / size[1]) * share
    height = width * size[1] / size[0]
    left, top = generator.uniform(0, photo.width - width), generator.uniform(0, photo.height - height)
    part = photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    # Noise of 3 levels, as a sensor has; the quality is the highest that stays within the size.
    noisy = np.asarray(part, np.float32) + generator.normal(0, 3, (size[1], size[0], 1)).astype(np.float32)
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    low, high, best = 30, 96, b""
    while low <= high:
        quality = (low + high) // 2
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= target:
            low, best = quality + 1, buffer.getvalue()
        else:
            high = quality - 1
    return best or buffer.getvalue()


def load(folder: Path, kind: str) -> list[bytes]:
    """The files of one kind, in order."""
    return [path.read_bytes() for path in sorted(folder.glob(f"{kind}-*.jpg"))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--large", type=int, default=6)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.small, arguments.large)
