"""The stage from an encoded image to pixels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triton_vision.stages.config import StageConfig
from triton_vision.stages.decode import DECODERS, Limits, decode
from triton_vision.stages.errors import ConfigError
from triton_vision.stages.kit import ItemStage
from triton_vision.stages.resize import FILTERS, resize_crop

# ImageNet's channel statistics on [0, 1], as torchvision's ImageNet weights expect them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Preprocess(ItemStage):
    """``IMAGE`` (STRING ``[1]``) to ``PIXELS``: UINT8 ``[crop, crop, 3]`` RGB, or FP32 ``[3, crop, crop]`` normalised.

    The parameters are those of the table in ``docs/stages.md``.
    """

    def setup(self, config: StageConfig) -> None:
        config.require("input", "IMAGE", {"TYPE_STRING": (1,)})
        self.resize = config.integer("resize", 256)
        self.crop = config.integer("crop", 224)
        if self.resize < self.crop:
            raise ConfigError(f"parameters resize: {self.resize} must be at least crop, {self.crop}")
        pixels = config.require(
            "output",
            "PIXELS",
            {"TYPE_UINT8": (self.crop, self.crop, 3), "TYPE_FP32": (3, self.crop, self.crop)},
        )
        self.filter = FILTERS[config.choice("filter", "bilinear", tuple(FILTERS))]
        self.orient = config.choice("orientation", "exif", ("exif", "ignore")) == "exif"
        self.limits = Limits(
            formats=config.words("formats", tuple(DECODERS), tuple(DECODERS)),
            max_bytes=config.integer("max_bytes", Limits.max_bytes),
            max_pixels=config.integer("max_pixels", Limits.max_pixels),
        )
        # Pillow's own check knows frames and tiles that ours on the header does not; this process serves one stage.
        Image.MAX_IMAGE_PIXELS = self.limits.max_pixels
        # Pillow warns of oddities in files that it then serves: no news for an operator.
        warnings.filterwarnings("ignore", module="PIL")
        self.normalises = pixels.triton_type == "TYPE_FP32"
        if self.normalises:
            mean = np.array(config.numbers("mean", IMAGENET_MEAN, 3))
            std = np.array(config.numbers("std", IMAGENET_STD, 3))
            if (std <= 0).any():
                raise ConfigError("parameters std: each must be above 0")
            # (x / 255 - mean) / std, as one multiplication and one addition a pixel.
            self.scale = (1.0 / (255.0 * std)).astype(np.float32)
            self.shift = (-mean / std).astype(np.float32)

    def process(self, image: bytes) -> NDArray[Any]:
        """One encoded file to its pixels; raises ImageRefused."""
        upright = decode(image, self.limits, orient=self.orient)
        pixels: NDArray[Any] = np.asarray(resize_crop(upright, self.resize, self.crop, self.filter))
        if self.normalises:
            pixels = (pixels * self.scale + self.shift).transpose(2, 0, 1)
        return pixels
