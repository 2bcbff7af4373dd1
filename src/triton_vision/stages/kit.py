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

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_vision.stages.config import StageConfig, Tensor
from triton_vision.stages.errors import WORD, ConfigError, ImageRefused, RequestDropped

Array = NDArray[Any]
Parameters = Mapping[str, Any]
STATUS = "STATUS"
# Asking whether a request has been cancelled costs 70 us: worth it between items that take this many seconds.
SLOW_ITEM_S = 0.02
# A batch that takes longer than this many seconds lets others pass before its last items are done.
LONG_BATCH_S = 0.4
# A status has at most so many characters, none of them a control character.
STATUS_LENGTH = 500
_MORE = re.compile(r"[\x00-\x1f\x7f]+")


class Aside(Exception):
    """Raised by an ItemStage's ``process`` for an item that takes long, so that nothing else waits for it.

    Args:
        seconds: that it takes, estimated.
        work: makes the item's output later, on a thread of its own, one after the other. It is handed a function to
            call now and then, which raises RequestDropped where nobody waits for the answer any more. It may raise
            Aside again, for an item that turns out to take longer.
        sure: whether ``seconds`` is more than a guess. What is sure to be short never waits for what is not, nor that
            for what is long.
    """

    def __init__(self, seconds: float, work: Callable[[Callable[[], None]], Any], *, sure: bool = True) -> None:
        self.seconds = seconds
        self.work = work
        self.sure = sure
        super().__init__()


@dataclass
class Batch:
    """The items of one ``execute``, stacked.

    Attributes:
        inputs: in the configuration's order, each ``[rows, *dims]``.
        status: bytes, ``[rows]``; not empty where an item is refused.
        failures: row -> what went wrong with it, of which its request will be told.
        check: row, whether to ask for cancellation -> raises RequestDropped where nobody waits for its answer.
        outputs: what ``run`` made, for each output a list of rows or an array of them.
        asides: row -> what is still to be done for it.
    """

    inputs: Sequence[Array]
    status: Array
    check: Callable[[int, bool], None] = lambda row, ask: None  # noqa: ARG005
    failures: dict[int, BaseException] = field(default_factory=dict)
    outputs: Sequence[Any] = ()
    asides: dict[int, Aside] = field(default_factory=dict)

    def part(self, rows: range, check: Callable[[int, bool], None]) -> Batch:
        """Those rows, which keep nothing of the others alive; what has been made of them, and what is to be done."""
        return Batch(
            [],
            self.status[rows.start : rows.stop].copy(),
            check,
            {row - rows.start: error for row, error in self.failures.items() if row in rows},
            [made[rows.start : rows.stop] for made in self.outputs],
            {row - rows.start: aside for row, aside in self.asides.items() if row in rows},
        )

    def note(self, row: int, error: BaseException) -> None:
        """Notes what was raised for an item: a refusal is its status, anything else its request's failure."""
        if isinstance(error, ImageRefused):
            self.status[row] = _MORE.sub(" ", str(error))[:STATUS_LENGTH].encode(errors="replace")
        else:
            self.failures[row] = error


class Stage:
    """Base of ItemStage and BatchStage; an author derives from one of those.

    Attributes:
        config: the model's configuration.
        threads: the parameter ``threads``.
        limit_s: CPU seconds that one item may take at the very most; 0 sets no limit.
    """

    config: StageConfig
    threads: int
    limit_s = 0.0

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

    def interrupt(self) -> None:
        """Ends what has been set aside and is under way; called before ``teardown``, from another thread."""

    def teardown(self) -> None:
        """Releases what ``setup`` acquired."""

    def run(self, batch: Batch) -> None:
        """Processes one batch: fills in its outputs, and its status and failures where something is wrong."""
        raise NotImplementedError


class ItemStage(Stage):
    """A stage that works on one item at a time; the items of a batch may run on several threads.

    ``process`` takes one item's inputs in the configuration's order (a STRING ``[1]`` as bytes, anything else as an
    array of the declared dims) and returns its output, or a tuple of its outputs in the configuration's order.
    Raising ImageRefused refuses the item alone, raising Aside does it later. Output dims must be fixed.
    """

    process: Any
    # Whether ``process`` may be called from several threads, whatever ``threads`` says: then a batch that takes long
    # gives way to others.
    concurrent = False
    _pool: ThreadPoolExecutor | None = None

    def run(self, batch: Batch) -> None:
        batch.outputs = [[None] * len(batch.status) for tensor in self._made]
        slow = False
        started = time.perf_counter()

        def one(row: int) -> None:
            nonlocal slow
            try:
                batch.check(row, slow)
                began = time.perf_counter()
                items = [_item(array[row]) for array in batch.inputs]
                if self.concurrent and began - started > LONG_BATCH_S:
                    raise Aside(SLOW_ITEM_S, lambda check: self.process(*items))  # noqa: ARG005
                result = self.process(*items)
                slow = time.perf_counter() - began > SLOW_ITEM_S
                self._keep(batch, row, result)
            except Aside as aside:
                batch.asides[row] = aside
            except BaseException as error:  # noqa: BLE001 - one item's failure must stay its own, even a Rust panic
                batch.note(row, error)

        todo = [row for row, text in enumerate(batch.status) if not text]
        if self.threads == 1 or len(todo) < 2:
            for row in todo:
                one(row)
        else:
            list(self._threads().map(one, todo))

    def run_asides(self, batch: Batch) -> None:
        """Does what has been set aside; what takes longer than expected is set aside again."""
        asides, batch.asides = batch.asides, {}
        for row, aside in asides.items():
            try:
                batch.check(row, True)
                self._keep(batch, row, aside.work(partial(batch.check, row, True)))
            except Aside as longer:
                batch.asides[row] = longer
            except BaseException as error:  # noqa: BLE001 - one item's failure must stay its own
                batch.note(row, error)

    @cached_property
    def _made(self) -> list[Tensor]:
        return [tensor for tensor in self.config.outputs.values() if tensor.name != STATUS]

    def _keep(self, batch: Batch, row: int, result: Any) -> None:
        made = result if isinstance(result, tuple) else (result,)
        for rows, tensor, value in zip(batch.outputs, self._made, made, strict=True):
            rows[row] = declared(tensor, value, tensor.dims)

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
    stacked output, or a tuple of them. Rows of refused items hold zeros. ``refuse`` refuses one row. Where ``process``
    raises, it is called again with one row after the other, so that the error stays with the rows that cause it.
    """

    process: Any
    _batch: Batch
    _first = 0

    def refuse(self, row: int, reason: str, detail: str) -> None:
        """Refuses one row of what ``process`` is working on: a reason of one word, and a detail for a person."""
        self._batch.note(self._first + row, ImageRefused(reason, detail))

    def run(self, batch: Batch) -> None:
        self._batch, self._first = batch, 0
        count = len(batch.status)
        for row in range(count):
            try:
                batch.check(row, False)
            except RequestDropped as dropped:
                batch.note(row, dropped)
        if len(batch.failures) == count:
            return
        try:
            batch.outputs = self._made(batch.inputs, count)
        except BaseException as error:  # noqa: BLE001 - belongs to some row, which is found below
            if count == 1:
                batch.note(0, error)
            self._one_by_one(batch)

    def _made(self, inputs: Sequence[Array], count: int) -> tuple[Array, ...]:
        result = self.process(*inputs)
        made = result if isinstance(result, tuple) else (result,)
        for array in made:
            if not isinstance(array, np.ndarray) or array.ndim < 1 or len(array) != count:
                raise ValueError(f"process made {np.shape(array)} of {count} rows")
        return made

    def _one_by_one(self, batch: Batch) -> None:
        parts: dict[int, tuple[Array, ...]] = {}
        for row, text in enumerate(batch.status):
            if text or row in batch.failures:
                continue
            self._first = row
            try:
                parts[row] = self._made([array[row : row + 1] for array in batch.inputs], 1)
            except BaseException as error:  # noqa: BLE001 - this row's alone
                batch.note(row, error)
        tensors = [tensor for tensor in self.config.outputs.values() if tensor.name != STATUS]
        # A row that made nothing holds zeros in the shape of one that did, or else as declared.
        nothing = tuple(_nothing(tensor, (1, *(max(0, size) for size in tensor.dims))) for tensor in tensors)
        if parts:
            nothing = tuple(np.zeros_like(array) for array in next(iter(parts.values())))
        rows = [parts.get(row, nothing) for row in range(len(batch.status))]
        batch.outputs = tuple(np.concatenate(made) for made in zip(*rows, strict=True))


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
    array = _nothing(tensor, (len(rows), *tensor.dims))
    for index, row in enumerate(rows):
        if made[row] is not None:
            array[index] = made[row]
    return array


def declared(tensor: Tensor, value: Any, shape: tuple[int, ...]) -> Array:
    """The value as the output's type, contiguous; -1 in ``shape`` is any size, and a bare number fits a shape of ones.

    Fractions are rounded, halves to the even number, where whole numbers are declared.

    Raises:
        ValueError: another shape, no numbers where numbers are declared, or numbers that the type cannot hold.
    """
    # The usual case first: this runs for every item and again for every response.
    if isinstance(value, np.ndarray) and value.dtype == tensor.dtype != np.object_ and value.shape == shape:
        return np.ascontiguousarray(value)
    if value is None:
        raise ValueError(f"output {tensor.name}: process returned nothing")
    given = np.asarray(value, np.object_) if tensor.triton_type == "TYPE_STRING" else np.asarray(value)
    if given.ndim == 0 and all(size == 1 for size in shape):
        given = given.reshape(shape)
    if given.ndim != len(shape) or any(size not in (-1, got) for size, got in zip(shape, given.shape, strict=True)):
        raise ValueError(f"output {tensor.name}: its shape is {list(given.shape)}, and must be {list(shape)}")
    if tensor.triton_type == "TYPE_STRING":
        if not all(isinstance(item, (bytes, str)) for item in given.ravel()):
            raise ValueError(f"output {tensor.name}: its items must be bytes or str")
        if any(isinstance(item, str) for item in given.ravel()):
            given = given.copy()
            given[...] = np.vectorize(_encoded, otypes=[np.object_])(given)
        return given
    if given.dtype != tensor.dtype:
        if given.dtype.kind == "f" and tensor.dtype.kind in "iu":
            given = np.rint(given)
        _check_cast(tensor, given)
    return np.ascontiguousarray(given, tensor.dtype)


def _encoded(item: bytes | str) -> bytes:
    return item.encode(errors="replace") if isinstance(item, str) else item


def _check_cast(tensor: Tensor, given: Array) -> None:
    if given.dtype.kind not in "biuf":
        raise ValueError(f"output {tensor.name}: {given.dtype} does not fit {tensor.triton_type}")
    if tensor.dtype.kind in "iu" and given.dtype.kind in "iuf" and given.size:
        bounds = np.iinfo(tensor.dtype)
        # A NaN is not within them either.
        if not (given.min() >= bounds.min and given.max() <= bounds.max):
            raise ValueError(f"output {tensor.name}: {given.min()} to {given.max()} is beyond {tensor.triton_type}")


def _nothing(tensor: Tensor, shape: tuple[int, ...]) -> Array:
    """Zeros, or empty strings."""
    return np.full(shape, b"", np.object_) if tensor.triton_type == "TYPE_STRING" else np.zeros(shape, tensor.dtype)


def is_status(text: Any) -> bool:
    """Whether it is what a stage may have made: nothing, or a short text without control characters."""
    if not text:
        return True
    try:
        told = text.decode()
    except (AttributeError, UnicodeDecodeError):
        return False
    reason, colon, _ = told.partition(": ")
    return len(told) <= STATUS_LENGTH and bool(WORD.fullmatch(reason) and colon) and _MORE.search(told) is None


def _item(value: Any) -> Any:
    """An item as a stage wants it: the one bytes object of a STRING ``[1]``, else the array."""
    return value[0] if isinstance(value, np.ndarray) and value.dtype == np.object_ and value.shape == (1,) else value
