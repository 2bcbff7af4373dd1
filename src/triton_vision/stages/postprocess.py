"""The stage from logits to labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_vision.stages.config import StageConfig
from triton_vision.stages.errors import ConfigError, InvalidRequest
from triton_vision.stages.kit import BatchStage, Parameters


class Postprocess(BatchStage):
    """``LOGITS`` (FP32 ``[classes]``) to ``LABELS``, ``CLASS_IDS``, ``SCORES``: the top k, best first.

    SCORES is a softmax over all classes. Of equal scores the lower class id comes first. A refused item has empty
    labels, ids -1 and scores 0.
    """

    def setup(self, config: StageConfig) -> None:
        logits = config.require("input", "LOGITS", {"TYPE_FP32": (-1,)})
        wanted = {"LABELS": "TYPE_STRING", "CLASS_IDS": "TYPE_INT32", "SCORES": "TYPE_FP32"}
        for name, kind in wanted.items():
            config.require("output", name, {kind: (-1,)})
        order = tuple(name for name in config.outputs if name != "STATUS")
        if order != tuple(wanted):
            raise ConfigError(f"output: {', '.join(order)} must be in the order {', '.join(wanted)}")
        file = config.text("labels", "labels.txt")
        path = config.folder / file
        try:
            labels = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"parameters labels: {file} cannot be read as UTF-8 text in the model's directory"
            ) from None
        self.classes = logits.dims[0] if logits.dims[0] > 0 else len(labels)
        if len(labels) != self.classes:
            raise ConfigError(f"parameters labels: {file} has {len(labels)} lines, and LOGITS {self.classes} classes")
        self.labels = np.array([label.encode() for label in labels], np.object_)

    def parse(self, parameters: Parameters) -> int:
        """The request's ``top_k``; by default 5, or all classes where there are fewer."""
        value = parameters.get("top_k", min(5, self.classes))
        if type(value) is not int or not 1 <= value <= self.classes:  # bool is an int, and no count
            raise InvalidRequest(f"parameter top_k is {value!r}, and must be an integer from 1 to {self.classes}")
        return value

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Softmax over all classes: ``[rows, classes]`` of logits to as many probabilities."""
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores: NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
        return scores

    def respond(
        self, outputs: tuple[NDArray[Any], ...], status: NDArray[Any], options: int
    ) -> tuple[NDArray[Any], ...]:
        (scores,) = outputs
        refused = status != b""
        if not np.isfinite(scores[~refused]).all():
            raise ArithmeticError("the core's logits are not finite numbers")
        ids = top_k(scores, options)
        best = np.take_along_axis(scores, ids, axis=1)
        labels = self.labels[ids]
        labels[refused], ids[refused], best[refused] = b"", -1, 0.0
        return labels, ids.astype(np.int32), best


def top_k(scores: NDArray[Any], k: int) -> NDArray[np.intp]:
    """The columns of each row's ``k`` highest scores, best first, of equals the lower one first."""
    # A stable sort of the negated scores keeps equal ones in the order of their ids.
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]
