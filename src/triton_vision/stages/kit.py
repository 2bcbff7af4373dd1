"""The stage kit: an author writes what happens to one item or one batch, the kit does the rest of ``model.py``.

A stage is a class with a few verbs, called in this order::

    setup(config)                   once, when Triton loads the model
    parse(parameters) -> options    once for each request
    process(...)                    for each item (ItemStage) or each batch (BatchStage)
    respond(outputs, options)       once for each request
    teardown()                      once, when Triton unloads the model

The kit reads and stacks the requests of one ``execute``, splits the results into exactly one response for each of
them whatever happens, carries STATUS in and out where the configuration declares it, and turns what a stage raises
into the error of the request it belongs to. A batch neighbour never notices.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from triton_vision.stages.config import StageConfig, Tensor
from triton_vision.stages.cpu import visible_cores
from triton_vision.stages.errors import ConfigError, ImageRefused, InvalidRequest

Array = NDArray[Any]
Parameters = Mapping[str, Any]
STATUS = "STATUS"


@dataclass
class Span:
    """One request's rows in the batch of an ``execute``, and what became of it."""

    request: Any
    rows: slice = field(default_factory=lambda: slice(0, 0))
    inputs: list[Array] = field(default_factory=list)
    status: Array | None = None
    masks: bool = False
    options: Any = None
    outputs: tuple[Array, ...] = ()
    error: tuple[str, bool] | None = None  # message, and whether it is the caller's fault

    @property
    def count(self) -> int:
        """How many items the request holds."""
        return int(self.rows.stop - self.rows.start)


class Stage:
    """Base of ItemStage and BatchStage; an author derives from one of those.

    Attributes:
        config: the model's configuration.
        threads: the parameter ``threads``; by default the cores visible to the process.
    """

    config: StageConfig
    threads: int

    def setup(self, config: StageConfig) -> None:
        """Reads parameters and checks tensors; raises ConfigError for a field that is wrong."""

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

    def run(self, inputs: Sequence[Array], status: Array, failures: dict[int, Exception]) -> tuple[Array, ...]:
        """Processes one stacked batch; ``status`` and ``failures`` (row -> exception) are filled in."""
        raise NotImplementedError


class ItemStage(Stage):
    """A stage that works on one item at a time; the items of a batch run on several threads.

    ``process`` takes one item's inputs in the configuration's order (a STRING ``[1]`` as bytes, anything else as an
    array of the declared dims) and returns its output, or a tuple of its outputs in the configuration's order.
    Raising ImageRefused refuses the item alone. Output dims must be fixed.
    """

    process: Any
    _pool: ThreadPoolExecutor | None = None

    def run(self, inputs: Sequence[Array], status: Array, failures: dict[int, Exception]) -> tuple[Array, ...]:
        count = len(status)
        outputs = tuple(_empty(tensor, count) for tensor in self.config.outputs.values() if tensor.name != STATUS)

        def one(row: int) -> None:
            try:
                result = self.process(*(_item(array[row]) for array in inputs))
                made = result if isinstance(result, tuple) else (result,)
                for target, value in zip(outputs, made, strict=True):
                    target[row] = value
            except ImageRefused as refusal:
                status[row] = str(refusal).encode()
            except Exception as error:  # noqa: BLE001 - one item's failure must stay its own
                failures[row] = error

        rows = [row for row in range(count) if not status[row]]
        if self.threads == 1 or len(rows) < 2:
            for row in rows:
                one(row)
        else:
            list(self._threads().map(one, rows))
        return outputs

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

    def run(self, inputs: Sequence[Array], status: Array, failures: dict[int, Exception]) -> tuple[Array, ...]:
        try:
            result = self.process(*inputs)
        except Exception as error:  # noqa: BLE001 - every request of the batch is told
            failures.update(dict.fromkeys(range(len(status)), error))
            return ()
        return result if isinstance(result, tuple) else (result,)


def _empty(tensor: Tensor, count: int) -> Array:
    if any(size < 0 for size in tensor.dims):
        raise ConfigError(
            f"output {tensor.name}: dims {list(tensor.dims)} must be fixed for a stage that works on items"
        )
    return np.zeros((count, *tensor.dims), tensor.dtype)


def _item(value: Any) -> Any:
    """An item as a stage wants it: the one bytes object of a STRING ``[1]``, else the array."""
    return value[0] if isinstance(value, np.ndarray) and value.dtype == np.object_ and value.shape == (1,) else value


class Adapter:
    """What Triton's Python backend calls: ``initialize``, ``execute``, ``finalize``.

    ``model.py`` is ``TritonPythonModel = adapt(MyStage)``.
    """

    stage_class: ClassVar[type[Stage]]

    def __init__(self, utils: Any = None) -> None:
        # Triton's module exists inside its stub alone; tests hand in a stand-in.
        self.utils = importlib.import_module("triton_python_backend_utils") if utils is None else utils

    # -- Triton's verbs -----------------------------------------------------------------------------------------

    def initialize(self, args: Mapping[str, str]) -> None:
        """Sets the stage up; what is wrong with the configuration is said with the model's name."""
        config = StageConfig(args)
        stage = self.stage_class()
        stage.config = config
        try:
            stage.threads = config.integer("threads", visible_cores())
            for name in (STATUS,):
                if name in config.outputs:
                    config.require("output", name, {"TYPE_STRING": (1,)})
                if name in config.inputs:
                    config.require("input", name, {"TYPE_STRING": (1,)})
            stage.setup(config)
            if isinstance(stage, ItemStage):
                for tensor in config.outputs.values():
                    _empty(tensor, 0)
            config.check_all_read()
        except ConfigError as error:
            raise ConfigError(f"{config.name}: {error}") from None
        self.stage = stage
        self.config = config
        self._inputs = [tensor for tensor in config.inputs.values() if tensor.name != STATUS]
        self._outputs = [tensor for tensor in config.outputs.values() if tensor.name != STATUS]
        self._takes_status = STATUS in config.inputs
        self._gives_status = STATUS in config.outputs

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers every request, each with its own result or its own error."""
        spans = [Span(request) for request in requests]
        for span in spans:
            self._attempt(self._read, span)
        live = [span for span in spans if span.error is None]
        if live:
            try:
                self._process(live)
            except Exception as error:  # noqa: BLE001 - every request still gets its response
                self._blame(live, error)
        return [self._response(span) for span in spans]

    def finalize(self) -> None:
        """Tears the stage down."""
        self.stage.teardown()

    # -- one execute --------------------------------------------------------------------------------------------

    def _attempt(self, step: Any, span: Span) -> None:
        try:
            step(span)
        except Exception as error:  # noqa: BLE001 - belongs to this request alone
            self._blame([span], error)

    def _read(self, span: Span) -> None:
        request = span.request
        parameters = json.loads(request.parameters() or "{}")
        span.masks = _masks(parameters)
        span.options = self.stage.parse(parameters)
        for tensor in self._inputs:
            span.inputs.append(self.utils.get_input_tensor_by_name(request, tensor.name).as_numpy())
        counts = {len(array) for array in span.inputs}
        if self._takes_status:
            given = self.utils.get_input_tensor_by_name(request, STATUS).as_numpy()
            span.status = given.reshape(len(given))
            counts.add(len(given))
        if len(counts) != 1:
            raise InvalidRequest(f"the inputs hold different numbers of items: {sorted(counts)}")
        span.rows = slice(0, counts.pop())

    def _process(self, spans: list[Span]) -> None:
        start = 0
        for span in spans:
            span.rows = slice(start, start + span.count)
            start = span.rows.stop
        stacked = [_stack([span.inputs[index] for span in spans]) for index in range(len(self._inputs))]
        status = np.full(start, b"", np.object_)
        for span in spans:
            if span.status is not None:
                status[span.rows] = span.status
        failures: dict[int, Exception] = {}
        outputs = self.stage.run(stacked, status, failures)
        for span in spans:
            self._attempt(lambda span: self._finish(span, outputs, status, failures), span)

    def _finish(self, span: Span, outputs: tuple[Array, ...], status: Array, failures: Mapping[int, Exception]) -> None:
        rows = range(span.rows.start, span.rows.stop)
        for row in rows:
            if row in failures:
                raise failures[row]
        span.status = status[span.rows]
        if not (span.masks and self._gives_status):
            for index, text in enumerate(span.status):
                if text:
                    raise InvalidRequest(f"image {index}: {text.decode()}")
        span.outputs = self.stage.respond(tuple(output[span.rows] for output in outputs), span.status, span.options)

    def _blame(self, spans: list[Span], error: Exception) -> None:
        """Notes an error; one that no stage raises on purpose is logged in full and told in general."""
        if isinstance(error, (InvalidRequest, ImageRefused)):
            told = (str(error), True)
        else:
            trace = "".join(traceback.format_exception(error))
            self.utils.Logger.log_error(f"{self.config.name}: {trace}")
            told = (
                f"{self.config.name} failed on this request ({type(error).__name__}); the server's log says more",
                False,
            )
        for span in spans:
            span.error = told

    def _response(self, span: Span) -> Any:
        utils = self.utils
        if span.error is None:
            try:
                tensors = [
                    utils.Tensor(tensor.name, np.ascontiguousarray(value, tensor.dtype))
                    for tensor, value in zip(self._outputs, span.outputs, strict=True)
                ]
                if self._gives_status:
                    assert span.status is not None
                    tensors.append(utils.Tensor(STATUS, span.status.reshape(-1, 1)))
                return utils.InferenceResponse(output_tensors=tensors)
            except Exception as error:  # noqa: BLE001 - a response that cannot be built is still an answer
                self._blame([span], error)
        assert span.error is not None
        message, callers_fault = span.error
        code = utils.TritonError.INVALID_ARG if callers_fault else utils.TritonError.INTERNAL
        return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(message, code))


def adapt(stage_class: type[Stage]) -> type[Adapter]:
    """The class that a ``model.py`` names ``TritonPythonModel``."""
    return type("TritonPythonModel", (Adapter,), {"stage_class": stage_class})


def _masks(parameters: Parameters) -> bool:
    value = parameters.get("on_bad_image", "fail")
    if value not in ("fail", "mask"):
        raise InvalidRequest(f"parameter on_bad_image is {value!r}, and must be 'fail' or 'mask'")
    return bool(value == "mask")


def _stack(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
