"""What every contestant computes, and how its answers are checked.

The network is replaced by a stand-in that returns at once: the logits are the pixels at a thousand fixed places. So
the answer depends on every stage before it, and a wrong crop, a wrong image or made-up labels are noticed.
numpy and Pillow only: this file is imported in every contestant's environment.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

CLASSES, TOP = 1000, 5
RESIZE, CROP = 256, 224
# Fixed places in [CROP, CROP, 3], flattened: the stand-in network's weights, so to say.
PLACES = np.sort(np.random.default_rng(7).choice(CROP * CROP * 3, CLASSES, replace=False))
SCALE = np.float32(1 / 16)
LABELS = [f"class {number}" for number in range(CLASSES)]


def box(width: int, height: int) -> tuple[float, float, float, float]:
    """The part of an image that the recipe's centre crop shows (torchvision's Resize(256), CenterCrop(224))."""
    new_width = RESIZE if width <= height else int(RESIZE * width / height)
    new_height = int(RESIZE * height / width) if width <= height else RESIZE
    left, top = round((new_width - CROP) / 2), round((new_height - CROP) / 2)
    x, y = width / new_width, height / new_height
    return left * x, top * y, min((left + CROP) * x, width), min((top + CROP) * y, height)


def stand_in(pixels: Any) -> Any:
    """uint8 ``[rows, 224, 224, 3]`` to float32 ``[rows, 1000]`` logits."""
    return pixels.reshape(len(pixels), -1)[:, PLACES] * SCALE


def answer(logits: Any) -> tuple[list[str], list[int], list[float]]:
    """One image's labels, class ids and softmax scores, best first."""
    scores = np.exp(logits - logits.max())
    scores /= scores.sum()
    ids = np.argsort(-scores, kind="stable")[:TOP]
    return [LABELS[number] for number in ids], ids.tolist(), scores[ids].tolist()


def expected(data: bytes) -> Any:
    """The pixels at PLACES by Pillow alone, the whole image resized and then cropped: int ``[1000]``."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size
    new_width = RESIZE if width <= height else int(RESIZE * width / height)
    new_height = int(RESIZE * height / width) if width <= height else RESIZE
    left, top = round((new_width - CROP) / 2), round((new_height - CROP) / 2)
    whole = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
    pixels = np.asarray(whole.crop((left, top, left + CROP, top + CROP)))
    return pixels.reshape(-1)[PLACES].astype(int)


def is_right(ids: Any, truth: Any, tolerance: int) -> bool:
    """Whether five ids are the five brightest places, as far as pixels within ``tolerance`` of 255 can tell."""
    fifth = np.partition(truth, -TOP)[-TOP]
    return len(set(ids)) == TOP and all(truth[number] >= fifth - 2 * tolerance for number in ids)
