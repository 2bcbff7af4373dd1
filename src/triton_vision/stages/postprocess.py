"""The stage from logits to labels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_vision.labels import read_labels
from triton_vision.stages.config import StageConfig
from triton_vision.stages.errors import ConfigError, InvalidRequest, StageError, shown
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
        try:
            labels = read_labels(config.folder / file)
        except ValueError as error:
            raise ConfigError(f"parameters labels: {file}, beside config.pbtxt, {error}") from None
        self.classes = logits.dims[0] if logits.dims[0] > 0 else len(labels)
        if len(labels) != self.classes:
            raise ConfigError(f"parameters labels: {file} has {len(labels)} lines, and LOGITS {self.classes} classes")
        self.labels = np.array([label.encode() for label in labels], np.object_)

    def parse(self, parameters: Parameters) -> int:
        """The request's ``top_k``; by default 5, or all classes where there are fewer."""
        value = parameters.get("top_k", min(5, self.classes))
        if type(value) is not int or not 1 <= value <= self.classes:  # bool is an int, and no count
            raise InvalidRequest(f"parameter top_k is {shown(value)}, and must be an integer from 1 to {self.classes}")
        return value

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Softmax over all classes: ``[rows, classes]`` of logits to as many probabilities."""
        with np.errstate(invalid="ignore"):  # the scores tell of infinities
            shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores: NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
        return scores

    def respond(
        self, outputs: tuple[NDArray[Any], ...], status: NDArray[Any], options: int
    ) -> tuple[NDArray[Any], ...]:
        (scores,) = outputs
        ids = top_k(scores, options)
        best = scores[np.arange(len(ids))[:, np.newaxis], ids]
        labels = self.labels[ids]
        refused = [row for row, text in enumerate(status) if text]
        if refused:
            labels[refused], ids[refused], best[refused] = b"", -1, 0.0
        # A softmax over anything but finite logits holds a NaN, and with it all its scores are.
        if not np.isfinite(best).all():
            row = np.isfinite(best).all(axis=1).argmin()
            raise StageError(f"input LOGITS: row {row} holds NaN or infinity; the model that made it is broken")
        return labels, ids.astype(np.int32), best


@cache
def _descending(classes: int) -> NDArray[np.int64]:
    return np.arange(classes - 1, -1, -1, dtype=np.int64)


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The columns of each row's ``k`` highest scores, best first, of equals the lower one first.

    Args:
        scores: ``[rows, classes]``, none negative.
    """
    classes = scores.shape[1]
    # The bits of floats that are not negative sort as the floats do (IEEE 754). With the column beneath them all keys
    # differ, so that the few best can be selected without sorting the rest.
    bits = np.ascontiguousarray(scores, np.float32).view(np.int32).astype(np.int64)
    keys = (bits << 32) | _descending(classes)
    if k < classes:
        keys = np.partition(keys, classes - k, axis=1)[:, classes - k :]
    best = np.sort(keys, axis=1)[:, ::-1]
    return classes - 1 - (best & 0xFFFFFFFF)
