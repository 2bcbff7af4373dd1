"""The stage kit: an author writes what happens to one item or one batch, the kit does the rest of ``model.py``.

A stage is a class with a few verbs, called in this order::

    setup(config)                   once, when Triton loads the model
    example() -> inputs             once, right after: one item to warm up with
    parse(parameters) -> options    once for each request
    process(...)                    for each item (ItemStage) or each batch (BatchStage)
    respond(outputs, options)       once for each request
    teardown()                      once, when Triton unloads the model

``triton_vision.stages.adapter`` calls them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_vision.stages.config import StageConfig, Tensor
from triton_vision.stages.errors import ConfigError, ImageRefused

Array = NDArray[Any]
Parameters = Mapping[str, Any]
STATUS = "STATUS"
# Asking whether a request has been cancelled costs 70 us: worth it between items that take this many seconds.
SLOW_ITEM_S = 0.02


@dataclass
class Batch:
    """The items of one ``execute``, stacked.

    Attributes:
        inputs: in the configuration's order, each ``[rows, *dims]``.
        status: bytes, ``[rows]``; not empty where an item is refused.
        failures: row -> what went wrong with it, of which its request will be told.
        check: row, whether to ask for cancellation -> raises RequestDropped where nobody waits for its answer.
        outputs: what ``run`` made, for each output a list of rows or an array of them.
    """

    inputs: Sequence[Array]
    status: Array
    check: Callable[[int, bool], None] = lambda row, ask: None  # noqa: ARG005
    failures: dict[int, Exception] = field(default_factory=dict)
    outputs: Sequence[Any] = ()


class Stage:
    """Base of ItemStage and BatchStage; an author derives from one of those.

    Attributes:
        config: the model's configuration.
        threads: the parameter ``threads``.
    """

    config: StageConfig
    threads: int

    def setup(self, config: StageConfig) -> None:
        """Reads parameters and checks tensors; raises ConfigError for a field that is wrong."""

    def example(self) -> Sequence[Any] | None:
        """The inputs of one item, as ``process`` of an ItemStage takes them; None: the stage needs no warm-up.

        By default zeros, where every input has fixed dims and none is a STRING.
        """
        tensors = [tensor for tensor in self.config.inputs.values() if tensor.name != STATUS]
        if any(min(tensor.dims, default=1) < 0 or tensor.triton_type == "TYPE_STRING" for tensor in tensors):
            return None
        return [np.zeros(tensor.dims, tensor.dtype) for tensor in tensors]

    def parse(self, parameters: Parameters) -> Any:  # noqa: ARG002 - a verb with a default
        """Turns a request's parameters into options for ``respond``; raises InvalidRequest for a wrong value.

        Parameters that the stage does not know are to be ignored: forwarded headers arrive among them.
        """
        return None

    def respond(self, outputs: tuple[Array, ...], status: Array, options: Any) -> tuple[Array, ...]:  # noqa: ARG002
        """Makes one request's output tensors, in the configuration's order without STATUS.

        Args:
            outputs: this request's rows of what ``process`` made.
            status: bytes, ``[rows]``; not empty where an item is refused.
            options: what ``parse`` returned.
        """
        return outputs

    def teardown(self) -> None:
        """Releases what ``setup`` acquired."""

    def run(self, batch: Batch) -> None:
        """Processes one batch: fills in its outputs, and its status and failures where something is wrong."""
        raise NotImplementedError


class ItemStage(Stage):
    """A stage that works on one item at a time; the items of a batch may run on several threads.

    ``process`` takes one item's inputs in the configuration's order (a STRING ``[1]`` as bytes, anything else as an
    array of the declared dims) and returns its output, or a tuple of its outputs in the configuration's order.
    Raising ImageRefused refuses the item alone. Output dims must be fixed.
    """

    process: Any
    _pool: ThreadPoolExecutor | None = None

    def run(self, batch: Batch) -> None:
        status = batch.status
        tensors = [tensor for tensor in self.config.outputs.values() if tensor.name != STATUS]
        outputs: list[list[Any]] = [[None] * len(status) for _ in tensors]
        slow = False

        def one(row: int) -> None:
            nonlocal slow
            try:
                batch.check(row, slow)
                began = time.perf_counter()
                result = self.process(*[_item(array[row]) for array in batch.inputs])
                slow = time.perf_counter() - began > SLOW_ITEM_S
                made = result if isinstance(result, tuple) else (result,)
                for rows, tensor, value in zip(outputs, tensors, made, strict=True):
                    rows[row] = _as_declared(tensor, value)
            except ImageRefused as refusal:
                status[row] = str(refusal).encode()
            except Exception as error:  # noqa: BLE001 - one item's failure must stay its own
                batch.failures[row] = error

        todo = [row for row, text in enumerate(status) if not text]
        if self.threads == 1 or len(todo) < 2:
            for row in todo:
                one(row)
        else:
            list(self._threads().map(one, todo))
        batch.outputs = outputs

    def check_outputs(self) -> None:
        """Raises ConfigError for an output whose size is not known beforehand."""
        for tensor in self.config.outputs.values():
            if min(tensor.dims, default=1) < 0:
                raise ConfigError(
                    f"output {tensor.name}: dims {list(tensor.dims)} must be fixed for a stage that works on items"
                )

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=self.config.name)
        return self._pool


class BatchStage(Stage):
    """A stage that works on a whole batch at once.

    ``process`` takes the stacked inputs in the configuration's order, each ``[rows, *dims]``, and returns the
    stacked output, or a tuple of them. Rows of refused items hold zeros.
    """

    process: Any

    def run(self, batch: Batch) -> None:
        try:
            result = self.process(*batch.inputs)
        except Exception as error:  # noqa: BLE001 - every request of the batch is told
            batch.failures.update(dict.fromkeys(range(len(batch.status)), error))
            return
        batch.outputs = result if isinstance(result, tuple) else (result,)


def gather(tensors: Sequence[Tensor], outputs: Sequence[Any], rows: range) -> tuple[Array, ...]:
    """One request's rows of what ``run`` made.

    Args:
        tensors: the declared outputs; an ItemStage makes just these, a BatchStage may make others for ``respond``.
    """
    if not outputs or not isinstance(outputs[0], list):
        return tuple(made[rows.start : rows.stop] for made in outputs)
    return tuple(_stacked(tensor, made, rows) for tensor, made in zip(tensors, outputs, strict=True))


def _stacked(tensor: Tensor, made: list[Any], rows: range) -> Array:
    """``[rows, *dims]``, zeros where an item made none."""
    if len(rows) == 1 and made[rows.start] is not None:
        single: Array = made[rows.start][np.newaxis]
        return single
    array: Array = np.zeros((len(rows), *tensor.dims), tensor.dtype)
    for index, row in enumerate(rows):
        if made[row] is not None:
            array[index] = made[row]
    return array


def _as_declared(tensor: Tensor, value: Any) -> Array:
    """The value in the output's type and dims; raises ValueError where it does not fit."""
    if isinstance(value, np.ndarray) and value.dtype == tensor.dtype and value.shape == tensor.dims:
        return value
    array: Array = np.empty(tensor.dims, tensor.dtype)
    array[...] = value
    return array


def _item(value: Any) -> Any:
    """An item as a stage wants it: the one bytes object of a STRING ``[1]``, else the array."""
    return value[0] if isinstance(value, np.ndarray) and value.dtype == np.object_ and value.shape == (1,) else value
