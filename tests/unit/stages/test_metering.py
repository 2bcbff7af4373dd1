"""What a stage counts, logs and drops."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.conftest import jpeg
from tests.unit.stages.test_kit import PREPROCESS, images
from triton_vision.stages import ImageRefused, ItemStage, Preprocess, adapt
from triton_vision.stages.meter import RefusalLog
from triton_vision.stages.testing import Request, StageRunner, Utils

NUMBERS = """
name: "numbers" backend: "python" max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }]
"""


def numbers(*values: float, **options: Any) -> Request:
    return Request({"IN": np.array(values, np.float32).reshape(-1, 1)}, **options)


def test_counters_by_model_reason_and_step() -> None:
    runner = StageRunner(Preprocess, PREPROCESS)
    good = jpeg(1)
    runner.execute([images(good, good), images(b"", b"junk", good, on_bad_image="mask"), images(b"")])
    counted = runner.close()
    assert counted["triton_vision_images_total", "pre"] == 3
    assert counted["triton_vision_refusals_total", "pre", "empty"] == 2
    assert counted["triton_vision_refusals_total", "pre", "unsupported_format"] == 1
    assert counted["triton_vision_input_bytes_total", "pre"] == 3 * len(good) + 4
    steps = {key[2] for key in counted if key[0] == "triton_vision_seconds_total"}
    assert steps == {"read", "process", "respond"}
    assert counted["triton_vision_seconds_total", "pre", "process"] > 0


def test_an_inherited_status_is_not_counted_as_this_stage_s_refusal() -> None:
    status = ', { name: "STATUS" data_type: TYPE_STRING dims: [ 1 ] } ]'
    config = NUMBERS.replace(" }]\noutput", f" }}{status}\noutput").replace(
        "dims: [ 1 ] }]\n", f"dims: [ 1 ] }}{status}\n"
    )

    class Same(ItemStage):
        def process(self, number: Any) -> Any:
            return number

    runner = StageRunner(Same, config)
    given = np.array([b"", b"empty: x"], np.object_).reshape(-1, 1)
    answer = runner.infer({"IN": np.zeros((2, 1), np.float32), "STATUS": given}, {"on_bad_image": "mask"})
    assert answer.outputs["STATUS"].ravel().tolist() == [b"", b"empty: x"]
    counted = runner.close()
    assert counted["triton_vision_images_total", "numbers"] == 1
    assert not any(key[0] == "triton_vision_refusals_total" for key in counted)


def test_refusals_are_logged_once_a_second_with_how_many_went_unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("triton_vision.stages.meter.time.monotonic", lambda: clock[0])
    utils = Utils()
    log = RefusalLog(utils, "pre")
    for _ in range(5):
        log.note("id7", 3, "empty: the file has no bytes")
    clock[0] += 1.5
    log.note("", 0, "corrupt: x")
    assert utils.Logger.lines == [
        ("warning", "pre: refused image 3 of request 'id7': empty: the file has no bytes"),
        ("warning", "pre: refused image 0: corrupt: x (4 more since the last such line)"),
    ]


class Slow(ItemStage):
    def setup(self, config: Any) -> None:  # noqa: ARG002
        self.done: list[float] = []

    def example(self) -> None:
        return None

    def process(self, number: Any) -> Any:
        time.sleep(0.03)
        self.done.append(float(number[0]))
        return number


def test_work_is_dropped_once_its_request_s_timeout_has_passed() -> None:
    runner = StageRunner(Slow, NUMBERS + 'parameters { key: "threads" value: { string_value: "1" } }')
    late, patient = runner.execute([numbers(1, 2, 3, 4, timeout_us=45_000), numbers(5)])
    assert (late.code, "timeout expired" in late.error) == ("UNAVAILABLE", True)
    assert patient.outputs["OUT"].tolist() == [[5]]
    assert runner.adapter.stage.done == [1, 2, 5]  # type: ignore[attr-defined]


def test_a_cancelled_request_is_noticed_between_slow_items() -> None:
    runner = StageRunner(Slow, NUMBERS + 'parameters { key: "threads" value: { string_value: "1" } }')
    gone, other = runner.execute([numbers(1, 2, 3, cancelled=True), numbers(4)])
    assert gone.code == "CANCELLED"
    assert other.outputs["OUT"].tolist() == [[4]]
    assert runner.adapter.stage.done == [1, 4]  # type: ignore[attr-defined]


def test_quick_items_are_never_asked_about() -> None:
    class Quick(ItemStage):
        def process(self, number: Any) -> Any:
            return number

    answer = StageRunner(Quick, NUMBERS).execute([numbers(1, 2, 3, cancelled=True)])[0]
    assert answer.error == ""


def test_a_stage_is_warmed_up_with_its_example() -> None:
    seen = []

    class Warm(ItemStage):
        def process(self, number: Any) -> Any:
            seen.append(number.tolist())
            return number

    runner = StageRunner(Warm, NUMBERS)
    assert seen == [[0.0]]
    assert runner.close() == {}, "the warm-up is not counted"


def test_an_example_that_fails_is_a_warning() -> None:
    class Picky(ItemStage):
        def process(self, number: Any) -> Any:
            if number[0] == 0:
                raise ZeroDivisionError
            return 1 / number

    runner = StageRunner(Picky, NUMBERS)
    assert runner.utils.Logger.lines[0][0] == "warning"
    assert runner.infer({"IN": np.array([[4]], np.float32)}).outputs["OUT"].tolist() == [[0.25]]


def test_a_refused_example_is_none_of_its_business() -> None:
    class Never(ItemStage):
        def process(self, number: Any) -> Any:
            raise ImageRefused("never", f"not even {number}")

    assert StageRunner(Never, NUMBERS).utils.Logger.lines == []


def test_adapt_makes_what_model_py_names() -> None:
    assert adapt(Slow).__name__ == "TritonPythonModel"
