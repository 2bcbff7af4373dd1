"""The stage from an encoded image to pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triton_vision.stages.config import StageConfig
from triton_vision.stages.decode import DECODERS, Limits
from triton_vision.stages.errors import ConfigError
from triton_vision.stages.kit import ItemStage
from triton_vision.stages.quiet import silence_decoders
from triton_vision.stages.recipe import Recipe, read_pixels
from triton_vision.stages.resize import FILTERS

# ImageNet's channel statistics on [0, 1], as torchvision's ImageNet weights expect them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Preprocess(ItemStage):
    """``IMAGE`` (STRING ``[1]``) to ``PIXELS``: UINT8 ``[crop, crop, 3]`` RGB, or FP32 ``[3, crop, crop]`` normalised.

    The parameters are those of the table in ``docs/stages.md``.
    """

    def setup(self, config: StageConfig) -> None:
        config.require("input", "IMAGE", {"TYPE_STRING": (1,)})
        resize, crop = config.integer("resize", 256), config.integer("crop", 224)
        if resize < crop:
            raise ConfigError(f"parameters resize: {resize} must be at least crop, {crop}")
        pixels = config.require(
            "output",
            "PIXELS",
            {"TYPE_UINT8": (crop, crop, 3), "TYPE_FP32": (3, crop, crop)},
        )
        self.recipe = Recipe(
            resize=resize,
            crop=crop,
            resample=FILTERS[config.choice("filter", "bilinear", tuple(FILTERS))],
            orient=config.choice("orientation", "exif", ("exif", "ignore")) == "exif",
            fast=config.choice("decode", "exact", ("exact", "fast")) == "fast",
            limits=Limits(
                formats=config.words("formats", tuple(DECODERS), tuple(DECODERS)),
                max_bytes=config.integer("max_bytes", Limits.max_bytes),
                max_pixels=config.integer("max_pixels", Limits.max_pixels),
            ),
        )
        # Pillow's own check knows frames and tiles that ours on the header does not; this process serves one stage.
        Image.MAX_IMAGE_PIXELS = self.recipe.limits.max_pixels
        silence_decoders()
        self.normalises = pixels.triton_type == "TYPE_FP32"
        if self.normalises:
            mean = np.array(config.numbers("mean", IMAGENET_MEAN, 3))
            std = np.array(config.numbers("std", IMAGENET_STD, 3))
            if (std <= 0).any():
                raise ConfigError("parameters std: each must be above 0")
            # (x / 255 - mean) / std, as one multiplication and one addition a pixel.
            with np.errstate(over="ignore", divide="ignore"):
                self.scale = (1.0 / (255.0 * std)).astype(np.float32)
                self.shift = (-mean / std).astype(np.float32)
            if not (np.isfinite(self.scale).all() and np.isfinite(self.shift).all()):
                raise ConfigError("parameters mean, std: their quotients are beyond FP32")

    def example(self) -> tuple[bytes]:
        """A JPEG, the likeliest format, in a size that leaves something to resize."""
        noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG")
        return (file.getvalue(),)

    def process(self, image: bytes) -> NDArray[Any]:
        """One encoded file to its pixels; raises ImageRefused."""
        pixels = read_pixels(image, self.recipe)
        if self.normalises:
            pixels = (pixels * self.scale + self.shift).transpose(2, 0, 1)
        return pixels
