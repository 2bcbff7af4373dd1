"""A recipe: which files are read, and how they become pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from triton_vision.stages.decode import read_frame
from triton_vision.stages.limits import Limits, Quick
from triton_vision.stages.resize import resize_crop


@dataclass(frozen=True)
class Recipe:
    """What a network was trained to see; the defaults are torchvision's for its ImageNet weights.

    Attributes:
        resize: pixels of the shorter side after resizing; at least ``crop``.
        crop: pixels of the centre crop's sides.
        resample: Pillow's antialiased filter.
        orient: whether EXIF's orientation is applied.
        fast: whether large JPEGs may be decoded at a fraction of their size: faster, and not the same pixels.
        limits: what is decoded at all.
    """

    resize: int = 256
    crop: int = 224
    resample: Image.Resampling = Image.Resampling.BILINEAR
    orient: bool = True
    fast: bool = False
    limits: Limits = field(default_factory=Limits)


TORCHVISION = Recipe()


def read_pixels(data: bytes, recipe: Recipe = TORCHVISION, quick: Quick | None = None) -> NDArray[Any]:
    """One encoded file to its pixels, RGB, uint8 ``[crop, crop, 3]``.

    The array is the caller's own, and read-only.

    Args:
        quick: what may be decoded here; None decodes whatever the recipe's limits admit.

    Raises:
        ImageRefused: with one of the contract's reasons; nothing else is raised for any input without ``quick``.
        TakesLong: it is within the limits, and not quick.
    """
    short = recipe.resize if recipe.fast else 0
    frame = read_frame(data, recipe.limits, orient=recipe.orient, short=short, quick=quick)
    return resize_crop(frame, recipe.resize, recipe.crop, recipe.resample)
