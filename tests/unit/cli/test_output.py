"""Where rows go: whole rows, a file that is complete or not there, pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from triton_vision.cli.find import find
from triton_vision.cli.output import Output, OutputError, complain


def output(path: Path) -> Output:
    return Output(str(path), contextlib.nullcontext)


def test_a_file_has_its_name_once_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("from before")
    one = output(file)
    one.write(b"a,b\n")
    assert file.read_text() == "from before"
    assert (tmp_path / "rows.csv.part").read_text() == "a,b\n"
    with pytest.raises(OutputError, match="is being written by another run"):
        output(file)
    one.finish()
    one.close()
    assert file.read_text() == "a,b\n"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_what_is_not_finished_keeps_its_rows_and_leaves_the_old_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("from before")
    one = output(file)
    one.write(b"a,b\n")
    one.close()
    assert (tmp_path / "rows.csv.part").read_text() == "a,b\n"
    nothing = output(file)
    nothing.close()
    assert os.listdir(tmp_path) == ["rows.csv"]
    assert file.read_text() == "from before"


def test_a_link_stays_one_and_what_is_no_file_is_written_directly(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    one = output(tmp_path / "link")
    one.write(b"row\n")
    one.finish()
    one.close()
    assert (tmp_path / "target").read_text() == "row\n"
    assert (tmp_path / "link").is_symlink()
    null = Output(os.devnull, contextlib.nullcontext)
    null.write(b"row\n")
    null.finish()
    null.close()
    assert null.part is None


def test_what_an_earlier_run_has_left_is_its_own_too(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("of yesterday")
    one = output(rows)
    assert list(find([str(tmp_path)], one.own_files)) == []
    one.close()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        output(tmp_path / "nonesuch" / "rows.csv")
    with pytest.raises(OutputError, match="Is a directory"):
        output(tmp_path)
    full = Output("/dev/full", contextlib.nullcontext)
    with pytest.raises(OutputError, match="No space left on device"):
        full.write(b"row\n")
    full.close()


def test_a_long_row_is_whole_though_the_pipe_is_short_and_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    one = output(pipe)
    os.set_blocking(reader, True)
    os.set_blocking(one._fd, False)
    row = os.urandom(300_000)
    got = bytearray()

    def read() -> None:
        while chunk := os.read(reader, 5000):
            got.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    one.write(row)
    one.close()
    thread.join(10)
    assert not thread.is_alive(), "the pipe is still open"
    os.close(reader)
    assert bytes(got) == row


def test_a_complaint_is_one_line_that_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain(ValueError("no \x1b[31mred\r\n\u202e, and no byte \udcff"))
    assert capsys.readouterr().err == "error: no \\x1b[31mred\\r\\n\\u202e, and no byte \\xff\n"
