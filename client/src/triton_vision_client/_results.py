"""What a call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from triton_vision_client._errors import BadImageError


@dataclass(frozen=True)
class Prediction:
    """One class: its label, its id, and its share (0 to 1) of a softmax over all classes."""

    label: str
    class_id: int
    score: float


@dataclass(frozen=True)
class Result:
    """One image's answer.

    Attributes:
        source: the image as the caller gave it.
        predictions: the best classes, best first; empty if the image was refused.
        error: why it was refused, or None.
    """

    source: Any
    predictions: tuple[Prediction, ...] = ()
    error: Optional[BadImageError] = None
