"""Lines that nobody reads hold nothing up, and what comes again and again is held back."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from triton_vision.server import logs, outlet
from triton_vision.server.logs import LogReader, Throttle
from triton_vision.server.outlet import WAITING, Outlet


def test_lines_come_in_order() -> None:
    stream = io.StringIO()
    one = Outlet(stream)
    for number in range(5):
        one.put(f"{number}\n")
    one.flush(10)
    assert stream.getvalue() == "0\n1\n2\n3\n4\n"


def test_a_pipe_that_nobody_reads_holds_nothing_up_and_the_dropped_are_counted() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, os.fdopen(read) as reader:
        one = Outlet(stream)
        line = "x" * 99 + "\n"
        count = 20 * WAITING
        for _ in range(count):
            one.put(line)  # would never come back if it blocked
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.extend(reader), daemon=True)
        thread.start()
        wait_until(lambda: bool(got) and got[-1].startswith("warning: "))
        dropped = int(got[-1].split()[1])
        assert got[-1] == f"warning: {dropped} lines were dropped, since nobody read them\n"
        assert got[:-1] == [line] * (count - dropped)
        one.put("again\n")
        wait_until(lambda: got[-1] == "again\n")
        stream.close()
        thread.join(10)


def test_what_a_terminal_would_obey_is_escaped_there_and_nowhere_else(tmp_path: Path) -> None:
    line = "ValueError:\tcafé \x1b]0;owned\x07\x9b2J\n"
    leader, follower = pty.openpty()
    for name in (os.ttyname(follower), str(tmp_path / "log")):
        with open(name, "w", encoding="utf-8") as stream:
            one = Outlet(stream)
            one.put(line)
            one.flush(10)
    assert os.read(leader, 1000).decode().split() == ["ValueError:", "café", "\\x1b]0;owned\\x07\\x9b2J"]
    assert (tmp_path / "log").read_text(encoding="utf-8") == line
    os.close(leader)
    os.close(follower)


def test_a_hanging_outlet_does_not_keep_the_program_from_ending() -> None:
    code = (
        f"import sys; from {outlet.__name__} import Outlet; one = Outlet(sys.stderr)\n"
        "for _ in range(5000): one.put('x' * 999 + '\\n')\n"
        "one.flush(0.2); sys.exit(7)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 7
        assert process.stderr is not None
        process.stderr.close()


def test_nobody_at_the_other_end() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        one = Outlet(stream)
        for _ in range(3):
            one.put("x\n")
        one.flush(10)
    Outlet(None).put("x\n")


def test_lines_are_written_again_when_a_full_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    errors = [errno.ENOSPC, errno.EDQUOT, errno.EIO]

    def fail(descriptor: int, data: bytes) -> int:
        if errors:
            raise OSError(errors.pop(), "no")
        return write(descriptor, data)

    with open(tmp_path / "log", "w") as stream:
        one = Outlet(stream)
        monkeypatch.setattr(os, "write", fail)
        for number in range(4):
            one.put(f"{number}\n")
        one.flush(10)
    assert (tmp_path / "log").read_text() == "3\n"


STAMP = "E1130 04:53:53.{:06} 2854 file.cc:241] "


def test_what_comes_again_and_again_is_held_back() -> None:
    now = 100.0
    throttle = Throttle(lambda: now)
    entry = ['"it failed: Traceback', "  line 1", "ValueError"]
    passed: list[str] = []
    for number in range(50):
        for line in (STAMP.format(number) + entry[0], *entry[1:]):
            passed += throttle.take(line + "\n")
    assert len(passed) == 3 * logs.REPEATS
    assert throttle.take(STAMP.format(1) + "another\n") == [STAMP.format(1) + "another\n"]
    assert throttle.take("plain\n") == ["plain\n"]
    now += logs.WINDOW_S
    first = STAMP.format(2) + entry[0] + "\n"
    assert throttle.take(first) == ["warning: 45 more like the next entry were left out in 60 s\n", first]


def test_what_nobody_can_act_on_is_left_out() -> None:
    passed: list[str] = []
    words = "skipping model configuration auto-complete for 'core': not supported for pytorch backend"
    LogReader(io.StringIO(STAMP.format(1) + f'"{words}"\n' + STAMP.format(2) + '"a fault"\n'), passed.append).join(10)
    assert passed == [STAMP.format(2) + '"a fault"\n']


def test_what_was_held_back_still_explains_an_end() -> None:
    text = "".join(STAMP.format(number) + '"no luck"\n' for number in range(20))
    passed: list[str] = []
    reader = LogReader(io.StringIO(text), passed.append)
    reader.join(10)
    assert len(passed) == logs.REPEATS
    assert len(reader.lines()) == 20
    assert reader.last_error() == "no luck"
