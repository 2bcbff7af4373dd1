"""An image's answer as text: a table's row, a JSON object, or CSV rows."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
from typing import TYPE_CHECKING, Protocol

from triton_vision.cli.find import Found, Unreadable
from triton_vision.terminal import columns_of, printable

if TYPE_CHECKING:
    from triton_vision_client import Result

# A table's first column is at most so wide; a longer name moves the rest of its own row.
WIDEST = 60
CSV_HEADER = ("source", "rank", "label", "class_id", "score", "reason", "detail")
# What a spreadsheet may take for a formula where a cell begins with it, full-width forms included.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001


class Rows(Protocol):
    """A format."""

    header: bytes

    def expect(self, source: Found) -> None:
        """Hears of an image that has been sent, and so will get a row."""

    def of(self, result: Result) -> bytes:
        """All rows of an image, with their line ends."""


class TableRows:
    """The name, then label and score of each class.

    How long the longest of all names is cannot be known while they are still being found, so the first column is as
    wide as the longest that has been sent: with fewer than a hundred images that is the longest of all, and with
    more it can only get wider.
    """

    header = b""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._width = 0

    def expect(self, source: Found) -> None:
        if self._width < WIDEST:
            self._width = min(WIDEST, max(self._width, columns_of(printable(path_of(source)))))

    def of(self, result: Result) -> bytes:
        if result.error is not None:
            answer = printable(f"REFUSED  {result.error}")
        else:
            answer = "   ".join(f"{printable(entry.label)} {entry.score:.3f}" for entry in result.predictions)
        name = printable(path_of(result.source))
        padding = " " * max(0, self._width - columns_of(name))
        return f"{name}{padding}  {answer}\n".encode(self._encoding, "backslashreplace")


class JsonRows:
    """An object a line: ``source`` and ``predictions``, or ``error``. A name that is no UTF-8 has ``source_base64``."""

    header = b""

    def expect(self, source: Found) -> None:
        pass

    def of(self, result: Result) -> bytes:
        path = path_of(result.source)
        row: dict[str, object] = {"source": _unicode(path)}
        if row["source"] != path:
            row["source_base64"] = base64.b64encode(os.fsencode(path)).decode()
        if result.error is not None:
            row["error"] = {"reason": result.error.reason, "detail": result.error.detail}
        else:
            row["predictions"] = [
                {"label": entry.label, "class_id": entry.class_id, "score": entry.score} for entry in result.predictions
            ]
        text = json.dumps(row, ensure_ascii=False)
        if not text.isprintable():
            # Control characters above ASCII's, which a terminal obeys, and what some take for the end of a line.
            text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
        return f"{text}\n".encode()


class CsvRows:
    """A row for each prediction, best first, or one for a refusal.

    No cell begins like a formula: a path is given ``./`` in front, which names the same file, other text a quote.
    """

    header = (",".join(CSV_HEADER) + "\n").encode()

    def __init__(self, for_terminal: bool) -> None:
        self._for_terminal = for_terminal

    def expect(self, source: Found) -> None:
        pass

    def of(self, result: Result) -> bytes:
        source = _harmless(_unicode(path_of(result.source)), "./")
        if result.error is not None:
            rows: list[tuple[object, ...]] = [
                (source, "", "", "", "", result.error.reason, _harmless(result.error.detail, "'"))
            ]
        else:
            rows = [
                (source, rank, _harmless(entry.label, "'"), entry.class_id, entry.score, "", "")
                for rank, entry in enumerate(result.predictions, 1)
            ]
        if self._for_terminal:
            rows = [tuple(printable(str(cell)) for cell in row) for row in rows]
        return "".join(map(_line, rows)).encode()


def _line(row: tuple[object, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(row)  # only a cell with one of these is quoted for it
    return text.getvalue()[:-2] + "\n"


def path_of(source: Found) -> str:
    """The name of what was found."""
    return source.path if isinstance(source, Unreadable) else source


def _unicode(path: str) -> str:
    """The path as text that can be encoded: bytes that are no UTF-8 become U+FFFD."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _harmless(text: str, prefix: str) -> str:
    return prefix + text if text.startswith(FORMULA) else text
