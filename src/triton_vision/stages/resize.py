"""Resize and centre crop in one step: torchvision's evaluation recipe, at the cost of the crop alone."""

from __future__ import annotations

from PIL import Image

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def resized_size(width: int, height: int, short: int) -> tuple[int, int]:
    """Width and height once the shorter side is ``short``; the longer one truncated, as torchvision's Resize does."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def resize_crop(image: Image.Image, resize: int, crop: int, resample: Image.Resampling) -> Image.Image:
    """The centre ``crop`` x ``crop`` pixels of ``image`` with its shorter side resized to ``resize`` pixels.

    Equal to resizing the whole and cropping (torchvision's Resize and CenterCrop on a PIL image) to within 1 of 255:
    Pillow evaluates the same antialiasing filter at the same places, but for the pixels of the crop only, so time
    and memory do not grow with an image's aspect ratio.

    Args:
        image: any mode that Pillow can resize.
        resize: at least ``crop``.
    """
    width, height = image.size
    new_width, new_height = resized_size(width, height, resize)
    left = round((new_width - crop) / 2.0)
    top = round((new_height - crop) / 2.0)
    if (new_width, new_height) == (width, height):
        return image.crop((left, top, left + crop, top + crop))
    # Pixel i of the resized image lies over [i, i + 1) * old / new of the original. Rounding must not push the box
    # a hair over the edge, which Pillow refuses.
    x_scale, y_scale = width / new_width, height / new_height
    box = (
        left * x_scale,
        top * y_scale,
        min((left + crop) * x_scale, float(width)),
        min((top + crop) * y_scale, float(height)),
    )
    return image.resize((crop, crop), resample, box=box)
