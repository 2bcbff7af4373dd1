"""The stage from an encoded image to pixels."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image

from triton_vision.stages.apart import Apart
from triton_vision.stages.budget import UNIT, MemoryBudget, default_budget
from triton_vision.stages.config import StageConfig
from triton_vision.stages.errors import ConfigError
from triton_vision.stages.kit import Aside, ItemStage
from triton_vision.stages.lane import GUESSED, LONG, SHORT, SHORT_S, kind_of
from triton_vision.stages.limits import DECODERS, Limits, Quick, TakesLong, too_complex
from triton_vision.stages.quiet import silence_decoders
from triton_vision.stages.recipe import Recipe, read_pixels
from triton_vision.stages.resize import FILTERS

# ImageNet's channel statistics on [0, 1], as torchvision's ImageNet weights expect them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
QUICK = Quick()


class Preprocess(ItemStage):
    """``IMAGE`` (STRING ``[1]``) to ``PIXELS``: UINT8 ``[crop, crop, 3]`` RGB, or FP32 ``[3, crop, crop]`` normalised.

    The parameters are those of the table in ``docs/stages.md``.
    """

    concurrent = True

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
        budget = config.integer("memory_budget", default_budget(), minimum=UNIT)
        self.recipe = Recipe(
            resize=resize,
            crop=crop,
            resample=FILTERS[config.choice("filter", "bilinear", tuple(FILTERS))],
            orient=config.choice("orientation", "exif", ("exif", "ignore")) == "exif",
            fast=config.choice("decode", "exact", ("exact", "fast")) == "fast",
            limits=_limits(config, budget),
        )
        # Pillow's own check knows frames and tiles that ours on the header does not; this process serves one stage.
        Image.MAX_IMAGE_PIXELS = self.recipe.limits.max_pixels
        # An image has one core. With more, AVIF's decoder takes more time in all, and memory for each of its threads.
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
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
        # Now, while this process has no threads and no library of it has any.
        work, most = partial(read_pixels, recipe=self.recipe), self.recipe.limits.max_memory
        # One for each kind of job, so that none waits for another.
        self._aparts = [Apart(work, (crop, crop, 3), most) for _ in (SHORT, GUESSED, LONG)]
        self._budget = MemoryBudget(budget, self.recipe.limits.max_memory)
        self._ending = False
        self.limit_s = self.recipe.limits.max_seconds

    def example(self) -> tuple[bytes]:
        """A JPEG, the likeliest format, in a size that leaves something to resize."""
        noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG")
        return (file.getvalue(),)

    def process(self, image: bytes) -> NDArray[Any]:
        """One encoded file to its pixels; raises ImageRefused, and Aside for one that takes long."""
        try:
            return self._output(read_pixels(image, self.recipe, QUICK))
        except TakesLong as long:
            raise self._aside(image, long) from None

    def interrupt(self) -> None:
        """Ends the decoders that are at work."""
        self._ending = True
        for apart in self._aparts:
            apart.close()

    def teardown(self) -> None:
        """Ends the processes that fork decoders."""
        for apart in self._aparts:
            apart.close()
        self._budget.close()

    def _aside(self, image: bytes, long: TakesLong) -> Aside:
        return Aside(long.seconds, partial(self._read_apart, image, long), sure=long.sure)

    def _read_apart(self, image: bytes, long: TakesLong, check: Callable[[], None]) -> NDArray[Any]:
        most = self.recipe.limits.max_seconds
        kind = kind_of(long.seconds, sure=long.sure)
        seconds = most if kind == LONG else min(SHORT_S, most)
        with self._budget.taken(long.bytes, check):
            try:
                return self._output(self._aparts[kind].run(image, seconds))
            except TimeoutError:
                if seconds == most:
                    raise too_complex(f"decoding takes more than {most:g} s", "max_seconds") from None
                raise self._aside(image, TakesLong(most, long.bytes)) from None
            except RuntimeError:
                check()
                if not self._ending:
                    # A copy of this process as it was at the start cannot be had again: it has to start again.
                    os.kill(os.getpid(), signal.SIGKILL)
                raise

    def _output(self, pixels: NDArray[Any]) -> NDArray[Any]:
        return (pixels * self.scale + self.shift).transpose(2, 0, 1) if self.normalises else pixels


def _limits(config: StageConfig, budget: int) -> Limits:
    """The limits that the configuration sets."""
    default = Limits()
    numbers = {
        name: config.integer(name, getattr(default, name))
        for name in (
            "max_bytes", "max_pixels", "max_scans", "max_segments", "max_slow_bytes", "max_slow_pixels",
            "max_pixels_per_byte", "max_memory",
        )
    }  # fmt: skip
    numbers["max_memory"] = min(numbers["max_memory"], budget)
    return Limits(
        formats=config.words("formats", tuple(DECODERS), tuple(DECODERS)),
        max_seconds=config.number("max_seconds", default.max_seconds, minimum=0.1),
        **numbers,
    )
