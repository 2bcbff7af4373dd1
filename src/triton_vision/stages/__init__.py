"""The stage kit, and the stages that the suite's own models are made of.

A new stage is a directory with a ``config.pbtxt`` and a ``model.py`` of a few lines; ``docs/stages.md`` shows one.
"""

from triton_vision.stages.adapter import adapt
from triton_vision.stages.config import StageConfig
from triton_vision.stages.core import EmbeddedCore
from triton_vision.stages.errors import (
    REASONS,
    ConfigError,
    ImageRefused,
    InvalidRequest,
    Overloaded,
    RequestDropped,
    StageError,
)
from triton_vision.stages.kit import Aside, BatchStage, ItemStage
from triton_vision.stages.postprocess import Postprocess
from triton_vision.stages.preprocess import Preprocess
from triton_vision.stages.recipe import Recipe, read_pixels

__all__ = [
    "REASONS",
    "Aside",
    "BatchStage",
    "ConfigError",
    "EmbeddedCore",
    "ImageRefused",
    "InvalidRequest",
    "ItemStage",
    "Overloaded",
    "Postprocess",
    "Preprocess",
    "Recipe",
    "RequestDropped",
    "StageConfig",
    "StageError",
    "adapt",
    "read_pixels",
]
