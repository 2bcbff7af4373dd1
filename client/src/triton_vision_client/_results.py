"""What a call returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from triton_vision_client._errors import BadImageError, VisionClientError


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
        degraded: whether the client's ``fallback`` has answered, because no server did.
    """

    source: Any = field(compare=False)
    predictions: tuple[Prediction, ...] = ()
    error: Optional[BadImageError] = None
    degraded: bool = False

    def __repr__(self) -> str:
        # An image in full would fill a log.
        source = self.source
        named = f"<{type(source).__name__}>"
        if isinstance(source, (str, os.PathLike)):
            named = repr(os.fsdecode(source)[:200])
        elif isinstance(source, (bytes, bytearray, memoryview)):
            named = f"<{type(source).__name__} of {len(source)}>"
        elif isinstance(source, np.ndarray):
            named = f"<ndarray of {source.shape}>"
        more = ", degraded=True" if self.degraded else ""
        return f"Result({named}, predictions={self.predictions!r}, error={self.error!r}{more})"


@dataclass(frozen=True)
class ServerInfo:
    """What a server tells about itself."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class ModelInfo:
    """One version of one model in a server's repository.

    Attributes:
        state: ``READY``, ``LOADING``, ``UNLOADING``, ``UNAVAILABLE`` or, before it was ever loaded, empty.
        reason: why it is in that state, if there is anything to say.
    """

    name: str
    version: str
    state: str
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self.state == "READY"


def degraded(sources: Sequence[Any], answers: Sequence[Any], error: VisionClientError) -> list[Result]:
    """The fallback's answers, in place of an error, as results.

    Raises:
        TypeError: an answer is not a sequence of Predictions.
    """
    results = []
    for source, answer in zip(sources, answers):
        if not isinstance(answer, (list, tuple)) or not all(isinstance(entry, Prediction) for entry in answer):
            raise TypeError(
                f"the fallback must return a list of Predictions, and has returned {repr(answer)[:100]}"
            ) from error
        results.append(Result(source, tuple(answer), degraded=True))
    return results
