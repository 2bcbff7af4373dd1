"""The kit: one response for each request, whatever the stage does; configurations checked at load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import encoded, jpeg, noise
from triton_vision.cpu import visible_cores
from triton_vision.stages import (
    BatchStage,
    ConfigError,
    ImageRefused,
    InvalidRequest,
    ItemStage,
    Preprocess,
)
from triton_vision.stages.testing import Request, StageRunner

PREPROCESS = """
name: "pre" backend: "python" max_batch_size: 8
input [{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "PIXELS" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] },
        { name: "STATUS" data_type: TYPE_STRING dims: [ 1 ] }]
"""
NUMBERS = """
name: "numbers" backend: "python" max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }%s]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }%s]
"""
STATUS = ', { name: "STATUS" data_type: TYPE_STRING dims: [ 1 ] }'
WITH_STATUS = NUMBERS % (STATUS, STATUS)


def images(*contents: bytes, **parameters: Any) -> Request:
    return Request({"IMAGE": np.array(contents, np.object_).reshape(-1, 1)}, parameters)


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def numbers(*values: float, status: list[bytes] | None = None, **parameters: Any) -> Request:
    tensors: dict[str, Any] = {"IN": np.array(values, np.float32).reshape(-1, 1)}
    if status is not None:
        tensors["STATUS"] = np.array(status, np.object_).reshape(-1, 1)
    return Request(tensors, parameters)


class Inverse(ItemStage):
    """1/x; refuses 0, chokes on negative numbers."""

    def process(self, number: Any) -> Any:
        if number[0] == 0:
            raise ImageRefused("zero", "cannot be inverted")
        if number[0] < 0:
            raise RuntimeError("/a/secret/path")
        return 1 / number


def test_requests_are_stacked_and_split() -> None:
    adapter = StageRunner(Inverse, NUMBERS % ("", ""))
    responses = adapter.execute([numbers(1, 2), numbers(4), numbers(5, 8, 10)])
    assert [response.outputs["OUT"].ravel().tolist() for response in responses] == [
        [1, 0.5],
        [0.25],
        pytest.approx([0.2, 0.125, 0.1]),
    ]
    assert responses[0].outputs["OUT"].dtype == np.float32


def test_a_refused_item_fails_its_own_request_only() -> None:
    adapter = StageRunner(Inverse, WITH_STATUS)
    good, bad, more = adapter.execute(
        [numbers(1, status=[b""]), numbers(2, 0, status=[b"", b""]), numbers(4, status=[b""])]
    )
    assert good.error == ""
    assert more.outputs["OUT"].tolist() == [[0.25]]
    assert (bad.code, bad.error) == ("INVALID_ARG", "image 1: zero: cannot be inverted")


def test_masked_items_keep_their_status_and_are_not_processed() -> None:
    adapter = StageRunner(Inverse, WITH_STATUS)
    (response,) = adapter.execute([numbers(2, 0, -1, status=[b"", b"", b"empty: upstream"], on_bad_image="mask")])
    assert response.outputs["STATUS"].ravel().tolist() == [b"", b"zero: cannot be inverted", b"empty: upstream"]
    assert response.outputs["OUT"].ravel().tolist() == [0.5, 0, 0]


def test_without_a_status_output_nothing_can_be_masked() -> None:
    adapter = StageRunner(Inverse, NUMBERS % ("", ""))
    (response,) = adapter.execute([numbers(0, on_bad_image="mask")])
    assert response.code == "INVALID_ARG"


def test_an_unexpected_exception_is_internal_logged_and_told_without_details() -> None:
    adapter = StageRunner(Inverse, WITH_STATUS)
    good, bad = adapter.execute([numbers(2, status=[b""]), numbers(1, -1, status=[b"", b""])])
    assert good.error == ""
    assert bad.code == "INTERNAL"
    assert "RuntimeError" in bad.error
    assert "secret" not in bad.error
    assert "/a/secret/path" in adapter.utils.Logger.lines[0][1]


class Doubled(BatchStage):
    def process(self, numbers: Any) -> Any:
        if (numbers < 0).any():
            raise ValueError("negative")
        return numbers * 2

    def parse(self, parameters: Any) -> Any:
        if parameters.get("bad"):
            raise InvalidRequest("parameter bad is bad")
        return None


def test_a_batch_stage_answers_every_request_whatever_happens() -> None:
    adapter = StageRunner(Doubled, NUMBERS % ("", ""))
    one, two, three = adapter.execute([numbers(1, 2), numbers(3, bad=1), numbers(4)])
    assert one.outputs["OUT"].tolist() == [[2], [4]]
    assert two.code == "INVALID_ARG"
    assert three.outputs["OUT"].tolist() == [[8]]
    good, bad = adapter.execute([numbers(1), numbers(-1)])
    assert (good.outputs["OUT"].tolist(), bad.code) == ([[2]], "INTERNAL")


class Picky(BatchStage):
    """Refuses 0 by name, 1 by raising, 2 with a panic."""

    def process(self, numbers: Any) -> Any:
        for row, number in enumerate(numbers[:, 0]):
            if number == 0:
                self.refuse(row, "zero", "not liked")
            if number == 1:
                raise ImageRefused("one", "\ud800 neither")
            if number == 2:
                raise SystemExit
        return numbers * 10


def test_a_batch_stage_refuses_rows_of_their_own() -> None:
    runner = StageRunner(Picky, WITH_STATUS)
    masked, plain, two, good = runner.execute(
        [
            numbers(5, 0, 1, status=[b""] * 3, on_bad_image="mask"),
            numbers(3, 1, status=[b""] * 2),
            numbers(2, status=[b""]),
            numbers(7, status=[b""]),
        ]
    )
    assert masked.outputs["STATUS"].ravel().tolist() == [b"", b"zero: not liked", b"one: ? neither"]
    assert masked.outputs["OUT"][0].tolist() == [50]
    assert (plain.code, plain.error) == ("INVALID_ARG", "image 1: one: ? neither")
    assert two.code == "INTERNAL"
    assert good.outputs["OUT"].tolist() == [[70]]


def test_an_expired_request_of_a_batch_stage_is_dropped() -> None:
    late = Request({"IN": np.ones((1, 1), np.float32)}, timeout_us=1)
    answers = StageRunner(Doubled, NUMBERS % ("", "")).execute([late, numbers(4)])
    assert [answer.code for answer in answers] == ["UNAVAILABLE", ""]


@pytest.mark.parametrize("made", [lambda x: x[:-1], lambda x: np.zeros((len(x), 5)), lambda x: np.zeros(len(x)), len])
def test_a_batch_stage_of_another_shape_is_a_defect(made: Any) -> None:
    class Other(BatchStage):
        def process(self, numbers: Any) -> Any:
            return made(numbers)

    runner = StageRunner(Other, NUMBERS % ("", ""))
    assert [answer.code for answer in runner.execute([numbers(1, 2), numbers(3)])] == ["INTERNAL", "INTERNAL"]


@pytest.mark.parametrize(
    "value", [None, np.zeros(3), "text", 1j, np.array([b"x"]), -1, 256, np.nan, np.array([[1]])], ids=repr
)
def test_an_item_that_does_not_fit_its_output_is_a_defect(value: Any) -> None:
    class Item(ItemStage):
        def process(self, number: Any) -> Any:
            return value if number[0] else 7.9

    config = (NUMBERS % ("", "")).replace('"OUT" data_type: TYPE_FP32', '"OUT" data_type: TYPE_UINT8')
    bad, good = StageRunner(Item, config).execute([numbers(1), numbers(0)])
    assert bad.code == "INTERNAL"
    assert good.outputs["OUT"].tolist() == [[8]]


def test_masked_rows_of_strings_are_empty() -> None:
    class Words(ItemStage):
        def process(self, number: Any) -> Any:
            if number[0] == 0:
                raise ImageRefused("zero", "none")
            return "wörd"

    config = WITH_STATUS.replace('"OUT" data_type: TYPE_FP32', '"OUT" data_type: TYPE_STRING')
    (answer,) = StageRunner(Words, config).execute([numbers(0, 1, status=[b"", b""], on_bad_image="mask")])
    assert answer.outputs["OUT"].tolist() == [[b""], ["wörd".encode()]]


@pytest.mark.parametrize("text", ["[]", "null", "3", "{"])
def test_parameters_that_are_no_object(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = numbers(1)
    monkeypatch.setattr(request, "parameters", lambda: text)
    assert StageRunner(Inverse, NUMBERS % ("", "")).execute([request])[0].code == "INVALID_ARG"


class WrongShape(BatchStage):
    def process(self, numbers: Any) -> Any:
        return numbers[:0]

    def respond(self, outputs: Any, status: Any, options: Any) -> Any:  # noqa: ARG002
        return outputs + outputs


def test_a_response_that_cannot_be_built_is_still_an_answer() -> None:
    (response,) = StageRunner(WrongShape, NUMBERS % ("", "")).execute([numbers(1)])
    assert response.code == "INTERNAL"


@pytest.mark.parametrize("value", ["skip", "", 1, None, True])
def test_a_wrong_on_bad_image(value: object) -> None:
    (response,) = StageRunner(Preprocess, PREPROCESS).execute([images(jpeg(1), on_bad_image=value)])
    assert response.code == "INVALID_ARG"
    assert "on_bad_image" in response.error


def test_preprocess_uint8_and_fp32_agree() -> None:
    wide = PREPROCESS.replace("TYPE_UINT8 dims: [ 224, 224, 3 ]", "TYPE_FP32 dims: [ 3, 224, 224 ]")
    request = images(jpeg(1), jpeg(2))
    pixels = StageRunner(Preprocess, PREPROCESS).execute([request])[0].outputs["PIXELS"]
    normalised = StageRunner(Preprocess, wide).execute([request])[0].outputs["PIXELS"]
    expected = (pixels / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert normalised.dtype == np.float32
    np.testing.assert_allclose(normalised, expected.transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (parameter("resize", "100"), "parameters resize: 100 must be at least crop"),
        (parameter("resize", "many"), "parameters resize: 'many' is not a whole number"),
        (parameter("crop", "0"), "parameters crop: '0' is not at least 1"),
        (parameter("filter", "best"), "parameters filter: 'best' is not one of"),
        (parameter("formats", "JPEG, HEIC"), "parameters formats"),
        (parameter("max_bytes", "-1"), "parameters max_bytes"),
        (parameter("orientation", "up"), "parameters orientation"),
        (parameter("threads", "0"), "parameters threads"),
        (parameter("threads", "1000000"), "parameters threads: '1000000' is not at most 1024"),
        (parameter("resize", "2_56"), "parameters resize: '2_56' is not a whole number"),
        (parameter("resize", "٢٥٦"), "parameters resize"),
        (parameter("cropp", "224"), "parameters cropp: there is no such parameter"),
    ],
)
def test_wrong_parameters_are_named_at_load(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^pre: {words}"):
        StageRunner(Preprocess, PREPROCESS + change)


@pytest.mark.parametrize(("key", "text"), [("mean", "1e300, 0, 0"), ("std", "1e-320, 1, 1"), ("std", "0, 1, 1")])
def test_means_and_deviations_that_make_no_numbers(key: str, text: str) -> None:
    wide = PREPROCESS.replace("TYPE_UINT8 dims: [ 224, 224, 3 ]", "TYPE_FP32 dims: [ 3, 224, 224 ]")
    with pytest.raises(ConfigError, match=f"parameters .*{key}"):
        StageRunner(Preprocess, wide + parameter(key, text))


def test_libtiff_s_remarks_stay_out_of_the_log() -> None:
    code = (
        "import sys; from triton_vision.stages import read_pixels, ImageRefused\n"
        "from triton_vision.stages.quiet import silence_decoders\n"
        "silence_decoders()\n"
        "data = bytearray(sys.stdin.buffer.read()); data[8:400] = b'junk' * 98\n"
        "try: read_pixels(bytes(data))\n"
        "except ImageRefused as refusal: print(refusal.reason)\n"
    )
    data = encoded(noise(1), "TIFF", compression="tiff_lzw")
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.strip() in (b"corrupt", b"truncated")
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_batch_size: 8", "max_batch_size: 0", "max_batch_size"),
        ("[ 224, 224, 3 ]", "[ 3, 224, 224 ]", "output PIXELS is TYPE_UINT8"),
        ("TYPE_UINT8", "TYPE_INT8", "output PIXELS is TYPE_INT8"),
        ('"IMAGE" data_type: TYPE_STRING', '"IMAGE" data_type: TYPE_UINT8', "input IMAGE"),
        ('"IMAGE"', '"IMG"', "input IMAGE"),
        ('"STATUS" data_type: TYPE_STRING dims: [ 1 ]', '"STATUS" data_type: TYPE_STRING dims: [ 2 ]', "output STATUS"),
    ],
)
def test_wrong_tensors_are_named_at_load(old: str, new: str, words: str) -> None:
    assert old in PREPROCESS
    with pytest.raises(ConfigError, match=words):
        StageRunner(Preprocess, PREPROCESS.replace(old, new))


# -- postprocess ------------------------------------------------------------------------------------------------


class Shifted(ItemStage):
    def process(self, number: Any) -> Any:
        return number + 0.6


class Wordy(ItemStage):
    def process(self, number: Any) -> Any:
        raise ImageRefused("too blurry", f"by {number}")


def test_fractions_are_rounded_where_whole_numbers_are_declared() -> None:
    whole = (NUMBERS % ("", "")).replace('"OUT" data_type: TYPE_FP32', '"OUT" data_type: TYPE_INT32')
    (answer,) = StageRunner(Shifted, whole).execute([numbers(1, -3)])
    assert answer.outputs["OUT"].tolist() == [[2], [-2]]


def test_a_reason_that_is_no_single_word_is_its_author_s_mistake() -> None:
    runner = StageRunner(Wordy, WITH_STATUS)
    (answer,) = runner.execute([numbers(1, status=[b""], on_bad_image="mask")])
    assert answer.code == "INTERNAL"
    assert "'too blurry' must be one word" in runner.adapter.utils.Logger.lines[0][1]


def test_cores_of_a_container(tmp_path: Path) -> None:
    cores = visible_cores(tmp_path)  # no cgroup files: the affinity mask alone
    (tmp_path / "own").write_text("0::/user.slice/app.service\n1:cpu,cpuacct:/docker/x\n")
    group = tmp_path / "user.slice" / "app.service"
    group.mkdir(parents=True)
    for folder in (group, group.parent):  # its own, and one around it, as systemd sets them
        (folder / "cpu.max").write_text("50000 100000\n")
        assert visible_cores(tmp_path, tmp_path / "own") == 1
        (folder / "cpu.max").unlink()
    legacy = tmp_path / "cpu" / "docker" / "x"
    legacy.mkdir(parents=True)
    (legacy / "cpu.cfs_quota_us").write_text("-1\n")
    (legacy / "cpu.cfs_period_us").write_text("100000\n")
    assert visible_cores(tmp_path, tmp_path / "own") == cores
    (legacy / "cpu.cfs_quota_us").write_text("100000\n")
    assert visible_cores(tmp_path, tmp_path / "own") == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert visible_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert visible_cores(tmp_path) == cores
