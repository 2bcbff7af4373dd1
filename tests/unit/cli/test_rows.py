"""Tables, JSON and CSV of names and labels that mean harm."""

from __future__ import annotations

import base64
import csv
import io
import json
import os

import pytest
from triton_vision_client import BadImageError, Prediction, Result

from triton_vision.cli.find import Unreadable
from triton_vision.cli.rows import WIDEST, CsvRows, JsonRows, TableRows

BEST = (Prediction("tabby, tabby cat", 281, 0.75), Prediction('a "quoted" one', 5, 0.25))
NASTY = [
    "plain.jpg",
    "tab\tand, comma.jpg",
    'quote".jpg',
    "line\nend.jpg",
    "carriage\rreturn.jpg",
    "\x1b[31mred\x9b0m.jpg",
    "=HYPERLINK(1).jpg",
    "größe 写真.jpg",
    os.fsdecode(b"caf\xe9.jpg"),
    "line\u2028separator\x85.jpg",
]


def refusal(source: object) -> Result:
    return Result(source, error=BadImageError("unreadable", "it is\nnot there"))


@pytest.mark.parametrize("name", NASTY)
def test_a_table_has_one_line_for_each(name: str) -> None:
    rows = TableRows("utf-8")
    for result in (Result(name, BEST), refusal(Unreadable(name, "gone"))):
        text = rows.of(result).decode()
        assert text.endswith("\n")
        assert text[:-1].isprintable()
        assert len(text.splitlines()) == 1
    assert "tabby, tabby cat 0.750   a " in rows.of(Result(name, BEST)).decode()


def test_two_names_that_are_no_utf8_differ_in_a_table() -> None:
    texts = {TableRows("utf-8").of(Result(os.fsdecode(name), BEST)) for name in (b"\xe9.jpg", b"\xe8.jpg")}
    assert len(texts) == 2
    assert TableRows("ascii").of(Result("größe.jpg", BEST)).startswith(b"gr\\xf6\\xdfe.jpg  tabby")


def test_the_first_column_is_as_wide_as_the_longest_name_that_was_sent() -> None:
    rows = TableRows("utf-8")
    for name in ("a.jpg", "写真.jpg", "longer.jpg"):
        rows.expect(name)
    lines = [rows.of(Result(name, BEST)).decode() for name in ("a.jpg", "写真.jpg", "longer.jpg")]
    assert lines[0].index("tabby") == 12
    assert lines[1].index("tabby") == 10  # two characters there are two columns wide
    assert lines[2].index("tabby") == 12
    rows.expect("x" * 500)
    assert rows.of(Result("a.jpg", BEST)).decode().index("tabby") == WIDEST + 2


@pytest.mark.parametrize("name", NASTY)
def test_json_is_one_line_and_exact(name: str) -> None:
    text = JsonRows().of(Result(name, BEST)).decode()
    assert text[:-1].isprintable()
    assert len(text.splitlines()) == 1
    row = json.loads(text)
    exact = base64.b64decode(row["source_base64"]) if "source_base64" in row else row["source"].encode()
    assert exact == os.fsencode(name)
    assert row["predictions"][0] == {"label": "tabby, tabby cat", "class_id": 281, "score": 0.75}
    assert set(row) - {"source_base64"} == {"source", "predictions"}
    refused = json.loads(JsonRows().of(refusal(name)))
    assert refused["error"] == {"reason": "unreadable", "detail": "it is\nnot there"}


@pytest.mark.parametrize("name", NASTY)
def test_csv_comes_back_and_holds_no_formula(name: str) -> None:
    rows = CsvRows(for_terminal=False)
    text = (rows.header + rows.of(Result(name, BEST)) + rows.of(refusal(name))).decode()
    first, second, refused = csv.DictReader(io.StringIO(text, newline=""))
    expected = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    assert os.path.normpath(first["source"]) == expected
    assert first["source"] == second["source"] == refused["source"]
    assert not first["source"].startswith("=")
    assert (first["rank"], first["label"], first["class_id"], first["score"]) == (
        "1",
        "tabby, tabby cat",
        "281",
        "0.75",
    )
    assert second["label"] == 'a "quoted" one'
    assert (refused["rank"], refused["score"], refused["reason"]) == ("", "", "unreadable")
    assert refused["detail"] == "it is\nnot there"
    on_screen = CsvRows(for_terminal=True).of(Result(name, BEST)).decode()
    assert all(line.isprintable() for line in on_screen.split("\n"))


def test_a_label_that_looks_like_a_formula() -> None:
    text = CsvRows(for_terminal=False).of(Result("a.jpg", (Prediction("@SUM(1)", 1, 1.0),))).decode()
    assert text == "a.jpg,1,'@SUM(1),1,1.0,,\n"
