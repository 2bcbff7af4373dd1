"""The postprocessing stage: logits to labels, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.stages.test_kit import STATUS
from triton_vision.stages import (
    ConfigError,
    Postprocess,
)
from triton_vision.stages.testing import Request, StageRunner

POSTPROCESS = f"""
name: "post" backend: "python" max_batch_size: 8
input [{{ name: "LOGITS" data_type: TYPE_FP32 dims: [ 4 ] }}{STATUS}]
output [
  {{ name: "LABELS" data_type: TYPE_STRING dims: [ -1 ] }}, {{ name: "CLASS_IDS" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "SCORES" data_type: TYPE_FP32 dims: [ -1 ] }}{STATUS}
]
"""


@pytest.fixture
def post(tmp_path: Path) -> Any:
    (tmp_path / "labels.txt").write_text("ant\nbée\ncat\ndog\n")
    return StageRunner(Postprocess, POSTPROCESS, tmp_path)


def logits(*rows: list[float], status: list[bytes] | None = None, **parameters: Any) -> Request:
    given = np.array(status or [b""] * len(rows), np.object_).reshape(-1, 1)
    return Request({"LOGITS": np.array(rows, np.float32), "STATUS": given}, parameters)


def test_top_k_with_ties_and_different_k_in_one_batch(post: Any) -> None:
    one, two = post.execute([logits([0, 2, 2, 1], top_k=3), logits([1000, 0, 0, -1000])])
    assert one.outputs["CLASS_IDS"].tolist() == [[1, 2, 3]]
    assert one.outputs["LABELS"].tolist() == [["bée".encode(), b"cat", b"dog"]]
    expected = np.exp([2, 2, 1]) / np.exp([0, 2, 2, 1]).sum()
    np.testing.assert_allclose(one.outputs["SCORES"][0], expected, rtol=1e-6)
    assert two.outputs["CLASS_IDS"].tolist() == [[0, 1, 2, 3]]  # the default: all of four classes
    assert two.outputs["SCORES"].tolist() == [[1, 0, 0, 0]]


def test_refused_items_have_empty_answers(post: Any) -> None:
    (response,) = post.execute(
        [logits([1, 2, 3, 4], [np.nan] * 4, status=[b"", b"empty: x"], top_k=2, on_bad_image="mask")]
    )
    assert response.outputs["CLASS_IDS"].tolist() == [[3, 2], [-1, -1]]
    assert response.outputs["LABELS"].tolist() == [[b"dog", b"cat"], [b"", b""]]
    assert response.outputs["SCORES"][1].tolist() == [0, 0]
    assert response.outputs["STATUS"].tolist() == [[b""], [b"empty: x"]]


@pytest.mark.parametrize("row", [[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-np.inf] * 4])
def test_logits_that_are_no_numbers_fail_their_request_only(post: Any, row: list[float]) -> None:
    bad, good = post.execute([logits([1, 2, 3, 4], row, top_k=2), logits([1, 2, 3, -np.inf])])
    # No caller of the ensemble can help it, so it is the server's fault.
    assert (bad.code, bad.error[:29]) == ("INTERNAL", "input LOGITS: row 1 holds NaN")
    assert good.error == ""
    assert good.outputs["SCORES"][0][3] == 0


@pytest.mark.parametrize("value", [0, 5, -1, True, "2", 1.5, None])
def test_a_wrong_top_k(post: Any, value: object) -> None:
    (response,) = post.execute([logits([1, 2, 3, 4], top_k=value)])
    assert response.code == "INVALID_ARG"
    assert "top_k" in response.error


def test_labels_are_checked_at_load(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    with pytest.raises(ConfigError, match=r"labels: labels\.txt, beside config\.pbtxt, does not exist"):
        StageRunner(Postprocess, POSTPROCESS, tmp_path)
    file.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text: see byte 6"):
        StageRunner(Postprocess, POSTPROCESS, tmp_path)
    file.write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="2 lines, and LOGITS 4 classes"):
        StageRunner(Postprocess, POSTPROCESS, tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_label(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("\ufeffant\r\nbée\r\ncat\r\ndog\r\n".encode())
    (answer,) = StageRunner(Postprocess, POSTPROCESS, tmp_path).execute([logits([3, 2, 1, 0])])
    assert answer.outputs["LABELS"].tolist() == [[b"ant", "bée".encode(), b"cat", b"dog"]]
