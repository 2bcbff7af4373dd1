"""Between Triton's Python backend and a stage: ``model.py`` is ``TritonPythonModel = adapt(MyStage)``.

The adapter reads and stacks the requests of one ``execute``, splits the results into exactly one response for each of
them whatever happens, carries STATUS in and out where the configuration declares it, counts, and turns what a stage
raises into the error of the request it belongs to. A batch neighbour never notices.
"""

from __future__ import annotations

import importlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from triton_vision.cpu import threads_of, visible_cores
from triton_vision.stages.config import StageConfig
from triton_vision.stages.errors import ConfigError, ImageRefused, InvalidRequest, RequestDropped
from triton_vision.stages.kit import STATUS, Array, Batch, ItemStage, Parameters, Stage, declared, gather
from triton_vision.stages.memory import keep_small_blocks
from triton_vision.stages.meter import Key, Meter, RefusalLog

NO_ROWS = range(0)
MOST_THREADS = 1024


class Call:
    """One request of an ``execute``, its rows in the batch, and what became of it."""

    __slots__ = ("error", "inputs", "masks", "options", "outputs", "request", "rows", "status", "until")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.rows = NO_ROWS
        self.inputs: list[Array] = []
        self.status: Array | None = None
        self.masks = False
        self.options: Any = None
        # When its timeout passes, on the clock of time.perf_counter; 0: never.
        self.until = 0.0
        self.outputs: tuple[Array, ...] = ()
        self.error: tuple[str, str] | None = None  # message, and the name of Triton's error code


class Adapter:
    """What Triton's Python backend calls: ``initialize``, ``execute``, ``finalize``."""

    stage_class: ClassVar[type[Stage]]

    def __init__(self, utils: Any = None) -> None:
        # Triton's module exists inside its stub alone; tests hand in a stand-in.
        self.utils = importlib.import_module("triton_python_backend_utils") if utils is None else utils

    # -- Triton's verbs -----------------------------------------------------------------------------------------

    def initialize(self, args: Mapping[str, str]) -> None:
        """Sets the stage up and warms it; what is wrong with the configuration is said with the model's name."""
        keep_small_blocks()
        config = StageConfig(args)
        stage = self.stage_class()
        stage.config = config
        try:
            stage.threads = config.integer(
                "threads", threads_of(visible_cores(), config.instances), maximum=MOST_THREADS
            )
            if STATUS in config.outputs:
                config.require("output", STATUS, {"TYPE_STRING": (1,)})
            if STATUS in config.inputs:
                config.require("input", STATUS, {"TYPE_STRING": (1,)})
            stage.setup(config)
            if isinstance(stage, ItemStage):
                stage.check_outputs()
            config.check_all_read()
        except ConfigError as error:
            raise ConfigError(f"{config.name}: {error}") from None
        self.stage = stage
        self.config = config
        self._inputs = [tensor for tensor in config.inputs.values() if tensor.name != STATUS]
        self._outputs = [tensor for tensor in config.outputs.values() if tensor.name != STATUS]
        self._takes_status = STATUS in config.inputs
        self._gives_status = STATUS in config.outputs
        self._warm_up()
        self._meter = Meter(self.utils, config.name)
        self._log = RefusalLog(self.utils, config.name)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers every request, each with its own result or its own error."""
        began = time.perf_counter()
        calls = [Call(request) for request in requests]
        live = []
        for call in calls:
            try:
                self._read(call, began)
                live.append(call)
            except BaseException as error:  # noqa: BLE001 - belongs to this request alone
                self._blame([call], error)
        read = processed = time.perf_counter()
        refused: dict[str, int] = {}
        if live:
            try:
                batch = self._stack(live)
                known = [bool(text) for text in batch.status] if self._takes_status else None
                self.stage.run(batch)
                processed = time.perf_counter()
                for call in live:
                    try:
                        self._finish(call, batch, known, refused)
                    except BaseException as error:  # noqa: BLE001 - belongs to this request alone
                        self._blame([call], error)
            except BaseException as error:  # noqa: BLE001 - every request still gets its response
                self._blame(live, error)
        responses = [self._response(call) for call in calls]
        self._count(live, refused, (began, read, processed, time.perf_counter()))
        return responses

    def finalize(self) -> None:
        """Hands over what has been counted and tears the stage down."""
        self._meter.close()
        self.stage.teardown()

    # -- one execute --------------------------------------------------------------------------------------------

    def _read(self, call: Call, began: float) -> None:
        request = call.request
        parameters = _parameters(request.parameters())
        call.masks = _masks(parameters)
        call.options = self.stage.parse(parameters)
        timeout_us = request.timeout()
        if timeout_us > 0:
            call.until = began + timeout_us * 1e-6
        tensor_of = self.utils.get_input_tensor_by_name
        for tensor in self._inputs:
            call.inputs.append(tensor_of(request, tensor.name).as_numpy())
        counts = {len(array) for array in call.inputs}
        if self._takes_status:
            given = tensor_of(request, STATUS).as_numpy()
            call.status = given.reshape(len(given))
            counts.add(len(given))
        if len(counts) != 1:
            raise InvalidRequest(f"the inputs hold different numbers of items: {sorted(counts)}")
        call.rows = range(counts.pop())

    def _stack(self, calls: list[Call]) -> Batch:
        start = 0
        owners: list[Call] = []
        for call in calls:
            count = len(call.rows)
            call.rows = range(start, start + count)
            start += count
            owners += [call] * count
        first = calls[0].inputs
        inputs = (
            first
            if len(calls) == 1
            else [np.concatenate([call.inputs[index] for call in calls]) for index in range(len(first))]
        )
        status = np.empty(start, np.object_)
        status[:] = b""
        for call in calls:
            if call.status is not None:
                status[call.rows.start : call.rows.stop] = call.status

        def check(row: int, ask: bool) -> None:
            call = owners[row]
            if call.until and time.perf_counter() > call.until:
                raise RequestDropped("Request timeout expired while its images were worked on", cancelled=False)
            if ask and call.request.is_cancelled():
                raise RequestDropped("its caller cancelled the request", cancelled=True)

        return Batch(inputs, status, check)

    def _finish(self, call: Call, batch: Batch, known: list[bool] | None, refused: dict[str, int]) -> None:
        rows = call.rows
        if batch.failures:
            for row in rows:
                if row in batch.failures:
                    raise batch.failures[row]
        call.status = status = batch.status[rows.start : rows.stop]
        first = ""
        for index, text in enumerate(status):
            if text:
                told = text.decode(errors="replace")
                if known is None or not known[rows.start + index]:
                    reason = told.partition(":")[0]
                    refused[reason] = refused.get(reason, 0) + 1
                    self._log.note(call.request.request_id(), index, told)
                first = first or f"image {index}: {told}"
        if first and not (call.masks and self._gives_status):
            raise InvalidRequest(first)
        outputs = gather(self._outputs, batch.outputs, rows)
        call.outputs = self.stage.respond(outputs, status, call.options)

    def _blame(self, calls: list[Call], error: BaseException) -> None:
        """Notes an error; one that no stage raises on purpose is logged in full and told in general."""
        if isinstance(error, (InvalidRequest, ImageRefused)):
            told = (str(error), "INVALID_ARG")
        elif isinstance(error, RequestDropped):
            told = (str(error), "CANCELLED" if error.cancelled else "UNAVAILABLE")
        else:
            trace = "".join(traceback.format_exception(error))
            self.utils.Logger.log_error(f"{self.config.name}: {trace}")
            kind = type(error).__name__
            told = (f"{self.config.name} failed on this request ({kind}); the server's log says more", "INTERNAL")
        for call in calls:
            call.error = told

    def _response(self, call: Call) -> Any:
        utils = self.utils
        if call.error is None:
            try:
                tensors = []
                for tensor, value in zip(self._outputs, call.outputs, strict=True):
                    shape = (len(call.rows), *tensor.dims)
                    tensors.append(utils.Tensor(tensor.name, declared(tensor, value, shape)))
                if self._gives_status:
                    assert call.status is not None
                    tensors.append(utils.Tensor(STATUS, call.status.reshape(-1, 1)))
                return utils.InferenceResponse(output_tensors=tensors)
            except Exception as error:  # noqa: BLE001 - a response that cannot be built is still an answer
                self._blame([call], error)
        assert call.error is not None
        message, code = call.error
        return utils.InferenceResponse(
            output_tensors=[], error=utils.TritonError(message, getattr(utils.TritonError, code))
        )

    # -- around it ----------------------------------------------------------------------------------------------

    def _count(self, calls: list[Call], refused: dict[str, int], times: tuple[float, float, float, float]) -> None:
        answered = (call.status for call in calls if call.error is None and call.status is not None)
        served = sum(not text for status in answered for text in status)
        began, read, processed, ended = times
        counts: dict[Key, float] = {
            ("triton_vision_images_total", ()): served,
            ("triton_vision_input_bytes_total", ()): sum(_bytes(array) for call in calls for array in call.inputs),
            ("triton_vision_seconds_total", (("step", "read"),)): read - began,
            ("triton_vision_seconds_total", (("step", "process"),)): processed - read,
            ("triton_vision_seconds_total", (("step", "respond"),)): ended - processed,
        }
        for reason, count in refused.items():
            counts["triton_vision_refusals_total", (("reason", reason),)] = count
        self._meter.add(counts)

    def _warm_up(self) -> None:
        """Runs the stage's example, so that the first caller does not pay for what is loaded on first use."""
        example = self.stage.example()
        if example is None:
            return
        try:
            inputs = []
            for tensor, value in zip(self._inputs, example, strict=True):
                array: Array = np.empty((1, *tensor.dims), tensor.dtype)
                array[0] = value
                inputs.append(array)
            batch = Batch(inputs, np.array([b""], np.object_))
            self.stage.run(batch)
            if not batch.failures and not batch.status[0]:
                outputs = gather(self._outputs, batch.outputs, range(1))
                self.stage.respond(outputs, batch.status, self.stage.parse({}))
            for error in batch.failures.values():
                raise error
        except Exception as error:  # noqa: BLE001 - an example that fails says nothing about real requests
            self.utils.Logger.log_warn(f"{self.config.name}: the warm-up's example failed: {error!r}")


def adapt(stage_class: type[Stage]) -> type[Adapter]:
    """The class that a ``model.py`` names ``TritonPythonModel``."""
    return type("TritonPythonModel", (Adapter,), {"stage_class": stage_class})


def _parameters(text: str) -> Parameters:
    if not text or text == "{}":
        return {}
    try:
        parameters = json.loads(text)
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidRequest("the request's parameters are no JSON object")
    return parameters


def _masks(parameters: Parameters) -> bool:
    value = parameters.get("on_bad_image", "fail")
    if value not in ("fail", "mask"):
        raise InvalidRequest(f"parameter on_bad_image is {value!r}, and must be 'fail' or 'mask'")
    return bool(value == "mask")


def _bytes(array: Array) -> int:
    """The size of what a tensor carries: of a STRING its contents."""
    if array.dtype != np.object_:
        return array.nbytes
    return sum(len(item) for item in array.ravel() if isinstance(item, bytes))
