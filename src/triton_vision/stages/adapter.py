"""Between Triton's Python backend and a stage: ``model.py`` is ``TritonPythonModel = adapt(MyStage)``.

The adapter reads and stacks the requests of one ``execute``, splits the results into exactly one response for each of
them whatever happens, carries STATUS in and out where the configuration declares it, counts, and turns what a stage
raises into the error of the request it belongs to. A batch neighbour never notices.
"""

from __future__ import annotations

import importlib
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from triton_vision import run
from triton_vision.cpu import threads_of, visible_cores
from triton_vision.run import Debt
from triton_vision.stages.call import Call, read_masks, read_parameters, size_of
from triton_vision.stages.config import StageConfig
from triton_vision.stages.errors import (
    ConfigError,
    ImageRefused,
    InvalidRequest,
    Overloaded,
    RequestDropped,
    StageError,
)
from triton_vision.stages.gate import find_gate
from triton_vision.stages.kit import STATUS, Array, Batch, ItemStage, Stage, declared, gather, is_status
from triton_vision.stages.lane import SHORT, SHORT_S, Lane, kind_of
from triton_vision.stages.limits import MIB
from triton_vision.stages.memory import keep_small_blocks
from triton_vision.stages.meter import Key, Meter, RefusalLog

MOST_THREADS = 1024
# Bytes of a request's inputs, and seconds of work on requests that have been set aside, which may wait.
MOST_REQUEST_BYTES, MOST_ASIDE_S = 128 * MIB, 4.0
# Seconds that such work has to notice that the model is unloaded.
CLOSE_S = 1.0
# CPU seconds for each item, beside a stage's own limit, before a process that makes no headway is ended.
SPARE_S = 0.5


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
            self._most_bytes = config.integer("max_request_bytes", MOST_REQUEST_BYTES)
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
        self._gate = find_gate(config.name, config.instance)
        shared = run.folder()
        debt = Debt(run.debt_path(shared, config.name) if shared is not None else None)
        self._lane = Lane(f"{config.name}-aside", MOST_ASIDE_S, debt)
        self._closing = False

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
                self._run(batch)
                if batch.asides and not self._lane.open():
                    self._do_at_once(batch)
                processed = time.perf_counter()
                for call in live:
                    try:
                        if any(row in batch.asides for row in call.rows):
                            self._set_aside(call, batch, known)
                        else:
                            self._finish(call, batch, known, refused)
                    except BaseException as error:  # noqa: BLE001 - belongs to this request alone
                        self._blame([call], error)
            except BaseException as error:  # noqa: BLE001 - every request still gets its response
                self._blame(live, error)
            self._lane.settle()
        # Triton takes None for a request that is answered through its sender.
        responses = [None if call.sender is not None else self._response(call) for call in calls]
        if self._gate is not None:
            self._gate.passed()
        self._count(
            [call for call in live if call.sender is None], refused, (began, read, processed, time.perf_counter())
        )
        return responses

    def finalize(self) -> None:
        """Ends what has been set aside, hands over what has been counted and tears the stage down.

        Triton takes no answers any more. A keeper sees to it that none is owed (``run.Debt``).
        """
        self._closing = True
        self.stage.interrupt()
        self._lane.close(CLOSE_S)
        self._meter.close()
        self.stage.teardown()

    # -- one execute --------------------------------------------------------------------------------------------

    def _read(self, call: Call, began: float) -> None:
        request = call.request
        parameters = read_parameters(request.parameters())
        call.masks = read_masks(parameters)
        call.options = self.stage.parse(parameters)
        timeout_us = request.timeout()
        if timeout_us > 0:
            call.until = began + timeout_us * 1e-6
        tensor_of = self.utils.get_input_tensor_by_name
        for tensor in self._inputs:
            call.inputs.append(tensor_of(request, tensor.name).as_numpy())
        call.bytes = sum(size_of(array) for array in call.inputs)
        if call.bytes > self._most_bytes:
            raise InvalidRequest(
                f"the request holds {call.bytes} bytes, and at most {self._most_bytes} are accepted: send fewer or "
                "smaller images in one request"
            )
        counts = {len(array) for array in call.inputs}
        if self._takes_status:
            given = tensor_of(request, STATUS).as_numpy()
            call.status = given.reshape(len(given))
            counts.add(len(given))
            # Nobody but a stage of the chain makes it, and what comes in goes out again.
            if not all(map(is_status, call.status)):
                raise InvalidRequest("input STATUS: each must be empty or a stage's 'reason: detail'")
        if len(counts) != 1:
            raise InvalidRequest(f"the inputs hold different numbers of items: {sorted(counts)}")
        call.rows = range(counts.pop())
        if self._gate is not None:
            self._gate.admit(len(call.rows), timeout_us * 1e-6)

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
            if ask and call.is_cancelled():
                raise RequestDropped("its caller cancelled the request", cancelled=True)
            if self._closing:
                raise RequestDropped("the model is being unloaded", cancelled=False)

        return Batch(inputs, status, check)

    def _do_asides(self, batch: Batch) -> None:
        assert isinstance(self.stage, ItemStage)  # no other sets anything aside
        self.stage.run_asides(batch)

    def _do_at_once(self, batch: Batch) -> None:
        """The keeper is about to replace this process, which is to owe nobody an answer: what is short is done now."""
        late = {row: aside for row, aside in batch.asides.items() if kind_of(aside.seconds, sure=aside.sure) != SHORT}
        batch.asides = {row: aside for row, aside in batch.asides.items() if row not in late}
        self._do_asides(batch)
        late |= batch.asides  # what turned out to take longer
        batch.asides = {}
        for row, aside in late.items():
            batch.note(row, Overloaded(aside.seconds))

    def _set_aside(self, call: Call, batch: Batch, known: list[bool] | None) -> None:
        """Has a request answered later; it must not wait for the others of its batch, nor they for it."""
        rows, check = call.rows, batch.check
        part = batch.part(rows, lambda row, ask: check(rows.start + row, ask))
        known = known and known[rows.start : rows.stop]

        def put() -> None:
            asides = part.asides.values()
            self._lane.put(sum(aside.seconds for aside in asides), job, sure=all(aside.sure for aside in asides))

        def job(late: bool) -> None:
            began, refused = time.perf_counter(), dict[str, int]()
            try:
                if late:
                    raise Overloaded(SHORT_S)
                self._do_asides(part)
                if part.asides:
                    put()
                    return
                self._finish(call, part, known, refused)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the request is answered
                self._blame([call], error)
            done = time.perf_counter()
            if self._closing:
                return  # who sends now waits for ever
            call.sender.send(self._response(call), self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._count([call], refused, (began, began, done, time.perf_counter()))

        call.rows = range(len(rows))
        call.set_aside()
        try:
            put()
        except BaseException:
            call.sender = None  # it is answered at once
            raise

    def _run(self, batch: Batch) -> None:
        """Runs the stage; where it has a limit on CPU time, the kernel ends the process that is far beyond it.

        That is the last resort: it also ends a decoder that never returns and lets no other thread run. Whoever keeps
        the server loads the stage anew.
        """
        if not self.stage.limit_s:
            self.stage.run(batch)
            return
        signal.setitimer(signal.ITIMER_PROF, self.stage.limit_s + SPARE_S * len(batch.status))
        try:
            self.stage.run(batch)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

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
                    self._log.note(call.request_id(), index, told)
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
        elif isinstance(error, Overloaded):
            told = (str(error), "UNAVAILABLE")
        elif isinstance(error, StageError):
            told = (str(error), "INTERNAL")
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
            ("triton_vision_input_bytes_total", ()): sum(call.bytes for call in calls),
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
