"""Orientation, resize and centre crop in one step: torchvision's evaluation recipe, at the cost of the crop alone."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import PIL
from cykooz_resizer import rust_lib
from numpy.typing import NDArray
from PIL import Image

# Pillow's antialiased filters that fall to 0 at their edge, with how far they reach in pixels (Resample.c). The box
# filter does not: a crop of its result cannot be had from a part of the image.
FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
REACH = {
    Image.Resampling.BILINEAR: 1.0,
    Image.Resampling.HAMMING: 1.0,
    Image.Resampling.BICUBIC: 2.0,
    Image.Resampling.LANCZOS: 3.0,
}
# Without the kernels: up to this ratio of the sides the whole is resized and then cropped, beyond it the crop alone.
WHOLE = 4
# EXIF orientation -> what makes the image upright (EXIF 2.3, tag 0x0112); 1 and anything undefined leave it alone.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Those that swap width and height; those whose upright left, and whose upright top, is the stored right or bottom.
TURNED = frozenset((5, 6, 7, 8))
MIRRORED_X = frozenset((2, 3, 7, 8))
MIRRORED_Y = frozenset((3, 4, 6, 7))

# cykooz-resizer has Pillow's bilinear filter as SIMD kernels. It reads rows through Pillow's C structure, whose
# layout its release 4.0.1 knows for these major versions; under any other one Pillow itself does the work. So it does
# for the other filters: they were measured further than 1 of 255 from Pillow's.
PILLOW = int(PIL.__version__.partition(".")[0])
KERNEL_USABLE = PILLOW in (11, 12, 13)
KERNEL_FILTER = Image.Resampling.BILINEAR
# Their numbers in cykooz_resizer: ResizeAlgorithm.convolution, FilterType.bilinear.
CONVOLUTION, BILINEAR = 2, 2
# Where a side shrinks by p/q with a small q, weighted sums often lie just between two values. The kernels' 16-bit
# weights then round many of them the other way, in whole columns, and two passes can add up to 2: Pillow does the
# second one. (At 480x320, 5/4, every other photo was off by 2 somewhere. Found with photos, noise, and r(x) + r(y).)
MOST_TIED = 64
# An image between the two passes that is kept for the next call has at most so many pixels.
KEPT_PIXELS = 512 * 1024

Box = tuple[float, float, float, float]
# A part of the upright, resized image: left, top, width, height.
Window = tuple[int, int, int, int]


@dataclass(frozen=True)
class Frame:
    """A decoded image as it is stored, and how to hold it.

    Attributes:
        pixels: an RGB image, or uint8 ``[height, width, 4]`` whose fourth channel means nothing.
        size: width and height of the file's image. ``pixels`` may hold it scaled down.
        orientation: EXIF's; 1 is upright.
    """

    pixels: Image.Image | NDArray[Any]
    size: tuple[int, int]
    orientation: int = 1

    def image(self, mode: str) -> Image.Image:
        """As an image of Pillow's; an array is mapped, not copied, as ``mode`` (RGBX or RGBA)."""
        if isinstance(self.pixels, Image.Image):
            return self.pixels
        height, width = self.pixels.shape[:2]
        return Image.frombuffer(mode, (width, height), self.pixels, "raw", mode, 0, 1)

    def upright(self) -> Image.Image:
        """The whole image, RGB, upright, a copy of its own."""
        # copy() of a mapped image is not enough: convert() alone makes RGB of RGBX.
        image = self.image("RGBX").convert("RGB")
        return image.transpose(UPRIGHT[self.orientation]) if self.orientation in UPRIGHT else image


class _Scratch(threading.local):
    """A resizer locks itself for the length of a call, so each thread has its own, and images to write into."""

    def __init__(self) -> None:
        self.resizer = rust_lib.RustResizer()
        self.images: dict[str, tuple[Image.Image, Any]] = {}

    def image(self, name: str, size: tuple[int, int]) -> tuple[Image.Image, Any]:
        """The image of that name, made anew where its size has changed, and what the kernels know it by."""
        kept = self.images.get(name)
        if kept is None or kept[0].size != size:
            kept = self.images[name] = _new(size)
        return kept


def _new(size: tuple[int, int]) -> tuple[Image.Image, Any]:
    image = Image.new("RGB", size, None)
    return image, rust_lib.PilImageWrapper(image)


_scratch = _Scratch()


def resized_size(width: int, height: int, short: int) -> tuple[int, int]:
    """Width and height once the shorter side is ``short``; the longer one truncated, as torchvision's Resize does."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def crop_origin(width: int, height: int, crop: int) -> tuple[int, int]:
    """Left and top of the centre crop, as torchvision's CenterCrop rounds them."""
    return round((width - crop) / 2.0), round((height - crop) / 2.0)


def resize_crop(frame: Frame, resize: int, crop: int, resample: Image.Resampling) -> NDArray[Any]:
    """The centre ``crop`` x ``crop`` pixels of the upright image with its shorter side resized to ``resize`` pixels.

    Equal to turning, resizing and cropping the whole (torchvision's Resize and CenterCrop on a PIL image) to within
    1 of 255 but for a rare pixel (docs/stages.md has the measurements): the same antialiasing filter is evaluated at
    the same places, but for the pixels of the crop only, so time and memory do not grow with the aspect ratio.

    Args:
        resize: at least ``crop``.

    Returns:
        RGB, uint8 ``[crop, crop, 3]``.
    """
    orientation = frame.orientation if frame.orientation in UPRIGHT else 1
    width, height = frame.size[::-1] if orientation in TURNED else frame.size
    new_width, new_height = resized_size(width, height, resize)
    left, top = crop_origin(new_width, new_height, crop)
    stored = frame.pixels.size if isinstance(frame.pixels, Image.Image) else frame.pixels.shape[1::-1]
    if (new_width, new_height) == (width, height) and stored == frame.size:
        return np.asarray(frame.upright().crop((left, top, left + crop, top + crop)))
    # Pillow holds a box in 32-bit floats, which is enough to turn a rounding: where it does a pass, that pass covers a
    # whole side and has no fraction, unless that side is too long.
    short = max(new_width, new_height) <= WHOLE * resize
    window = (left, top, crop, crop)
    if resample is KERNEL_FILTER and KERNEL_USABLE:
        # Photographs are JPEGs. What is stored without loss may be a drawing, whose lines make ties at any ratio; next
        # to decoding that, Pillow's pass is cheap.
        lossless = isinstance(frame.pixels, Image.Image)
        by_pillow = lossless or _has_ties(frame.size, stored, orientation, resize)
        if by_pillow and short:
            columns_last = not vertical_first(width, height, new_width, new_height)
            window = (left, 0, crop, new_height) if columns_last else (0, top, new_width, crop)
        plan = _plan(frame.size, stored, orientation, resize, window, REACH[resample])
        small = _by_kernel(frame, plan, by_pillow)
    else:
        if short:
            window = (0, 0, new_width, new_height)
        small = _by_pillow(frame, _plan(frame.size, stored, orientation, resize, window, REACH[resample]), resample)
    if orientation != 1:
        small = small.transpose(UPRIGHT[orientation])
    if small.size != (crop, crop):
        x, y = left - window[0], top - window[1]
        small = small.crop((x, y, x + crop, y + crop))
    return np.frombuffer(small.tobytes("raw", "RGB"), np.uint8).reshape(crop, crop, 3)


def vertical_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Whether Pillow resizes the columns before the rows.

    It rounds to 8 bits between its two passes, so for filters that overshoot their order is part of the result.
    Found by comparing Pillow's result with those of both orders, over some thousand shapes (a test repeats it).
    """
    if PILLOW >= 13:
        return height - new_height > max(0, 2 * (width - new_width))
    return new_height < height and height > 100 * width  # Image.resize of Pillow 11 and 12


def _stored_box(size: tuple[int, int], stored: tuple[int, int], orientation: int, resize: int, window: Window) -> Box:
    """Where the window lies in the stored pixels, not yet upright: left, top, right, bottom."""
    turned = orientation in TURNED
    width, height = size[::-1] if turned else size
    new_width, new_height = resized_size(width, height, resize)
    left, top, across, down = window
    # Pixel i of the resized image lies over [i, i + 1) * old / new of the original.
    x0, x1 = left * width / new_width, (left + across) * width / new_width
    y0, y1 = top * height / new_height, (top + down) * height / new_height
    if turned:
        x0, x1, y0, y1 = y0, y1, x0, x1
    if orientation in MIRRORED_X:
        x0, x1 = size[0] - x1, size[0] - x0
    if orientation in MIRRORED_Y:
        y0, y1 = size[1] - y1, size[1] - y0
    # DCT scaling keeps the grid: its last block may be cut, so the ratio is one of eighths, not of the sides.
    x_scale, y_scale = (_eighths(part, whole) for part, whole in zip(stored, size, strict=True))
    # Rounding must not push the box a hair over the edge, which is refused.
    return (
        max(0.0, x0 * x_scale),
        max(0.0, y0 * y_scale),
        min(x1 * x_scale, float(stored[0])),
        min(y1 * y_scale, float(stored[1])),
    )


def _eighths(part: int, whole: int) -> float:
    return 1.0 if part == whole else round(8 * part / whole) / 8


@dataclass(frozen=True)
class _Plan:
    """Two passes over the stored pixels: the sizes they make, and the part that each of them reads."""

    between: tuple[int, int]
    target: tuple[int, int]
    first: Box
    second: Box
    first_options: Any
    second_options: Any


@lru_cache(maxsize=256)
def _plan(
    size: tuple[int, int], stored: tuple[int, int], orientation: int, resize: int, window: Window, reach: float
) -> _Plan:
    """Plans the window's pixels, not yet upright.

    A single call of either resizer would choose the order of its passes by the shape of the window.
    """
    turned = orientation in TURNED
    whole = size[::-1] if turned else size
    columns_first = vertical_first(*whole, *resized_size(*whole, resize)) != turned
    x0, y0, x1, y1 = _stored_box(size, stored, orientation, resize, window)
    width, height = window[:1:-1] if turned else window[2:]
    if columns_first:
        low, high = _read_range(x0, x1, stored[0], width, reach)
        between = (high - low, height)
        first = (float(low), y0, float(high), y1)
        second = (x0 - low, 0.0, x1 - low, float(height))
    else:
        low, high = _read_range(y0, y1, stored[1], height, reach)
        between = (width, high - low)
        first = (x0, float(low), x1, float(high))
        second = (0.0, y0 - low, float(width), y1 - low)
    return _Plan(between, (width, height), first, second, _options(first, stored), _options(second, between))


@lru_cache(maxsize=256)
def _has_ties(size: tuple[int, int], stored: tuple[int, int], orientation: int, resize: int) -> bool:
    """Whether a side's ratio, in lowest terms, has a denominator of at most MOST_TIED."""
    turned = orientation in TURNED
    # A side that has been scaled in the decoder counts as it is stored.
    old = stored[::-1] if turned else stored
    new = resized_size(*(size[::-1] if turned else size), resize)
    return min(after // math.gcd(after, before) for after, before in zip(new, old, strict=True)) <= MOST_TIED


def _read_range(start: float, stop: float, size: int, count: int, reach: float) -> tuple[int, int]:
    """The rows, or columns, that the second pass reads: its filter reaches beyond the crop."""
    beyond = reach * max(1.0, (stop - start) / count) + 1.0
    return max(0, math.floor(start - beyond)), min(size, math.ceil(stop + beyond))


def _options(box: Box, size: tuple[int, int]) -> Any:
    """The box as the kernels want it: start and length, whose sum must not round beyond the image."""
    x0, y0, x1, y1 = box
    width, height = x1 - x0, y1 - y0
    while x0 + width > size[0]:
        width = math.nextafter(width, 0.0)
    while y0 + height > size[1]:
        height = math.nextafter(height, 0.0)
    options = rust_lib.RustResizeOptions().set_resize_alg(CONVOLUTION, BILINEAR, 2).set_use_alpha(False)
    return options.set_crop_box(x0, y0, width, height)


def _by_kernel(frame: Frame, plan: _Plan, second_by_pillow: bool) -> Image.Image:
    scratch = _scratch
    # A tall sliver's is large: not kept.
    keeps = plan.between[0] * plan.between[1] <= KEPT_PIXELS
    image, middle = scratch.image("middle", plan.between) if keeps else _new(plan.between)
    # RGBA by name alone: its fourth channel is not looked at.
    scratch.resizer.resize_pil(rust_lib.PilImageWrapper(frame.image("RGBA")), middle, plan.first_options)
    if second_by_pillow:
        return image.resize(plan.target, KERNEL_FILTER, box=plan.second)
    target, wrapped = scratch.image("target", plan.target)
    scratch.resizer.resize_pil(middle, wrapped, plan.second_options)
    return target


def _by_pillow(frame: Frame, plan: _Plan, resample: Image.Resampling) -> Image.Image:
    middle = frame.image("RGBX").resize(plan.between, resample, box=plan.first)
    return middle.resize(plan.target, resample, box=plan.second).convert("RGB")
