"""The live line: what it says, where it appears, and the signals that end a run."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

import pytest

from triton_vision.cli.interrupt import Interrupts, Stopped
from triton_vision.cli.progress import Count, Progress
from triton_vision.terminal import StatusLine, columns_of, cut, gauge, printable, short_time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_refusals_and_time_left() -> None:
    now = 0.0
    count = Count(lambda: iter(range(1000)))
    progress = Progress(None, count, clock=lambda: now)
    assert progress.text() == "  0 images, 0.0/s, 0 refused, 0:00"
    for number in range(250):
        progress.add(f"{number}.jpg", refused=number % 10 == 0)
    now = 10.0
    assert progress.text() == "  250 images, 25/s, 25 refused, 0:10"
    assert count.wait(10) == 1000
    assert progress.text() == "  [#####...............] 250 of 1000, 25/s, 25 refused, 0:30 left"
    # The rate is the last seconds', not the average since the start.
    for step in range(1, 51):
        now = 10.0 + step / 4
        progress.add("x.jpg", refused=False)
        text = progress.text()
    assert text == "  [######..............] 300 of 1000, 4.0/s, 25 refused, 2:55 left"
    assert progress.how_far(1000, 0) == "300 of 1000 images done, the last one x.jpg"
    assert progress.how_far(None, 312) == "300 of at least 312 images done, the last one x.jpg"


def test_more_images_than_were_counted() -> None:
    count = Count(lambda: iter(range(3)))
    assert count.wait(10) == 3
    progress = Progress(None, count, clock=lambda: 0.0)
    for _ in range(5):
        progress.add("x.jpg", refused=False)
    assert progress.text().startswith("  5 images, ")


def test_what_cannot_be_counted() -> None:
    def broken() -> object:
        raise OSError("gone")

    assert Count(None).wait(0) is None
    assert Count(broken).wait(10) is None  # type: ignore[arg-type]


def test_the_line_appears_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file, None):
        line = StatusLine(stream)
        line.draw("0123456789" * 5)
        line.clear()
        line.clear()
    assert terminal.getvalue() == "\r0123456789012345678\x1b[K\r\x1b[K"
    assert file.getvalue() == ""
    monkeypatch.setenv("TERM", "dumb")
    assert not StatusLine(Terminal()).possible


def test_rows_go_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("triton_vision.cli.progress.REDRAW_S", 0.001)
    drawn = threading.Event()

    class Watched(Terminal):
        def flush(self) -> None:
            drawn.set()

    stream = Watched()
    with Progress(stream, Count(None)) as progress:
        assert drawn.wait(10)
        progress.above(lambda: print("a row", file=stream))
    text = stream.getvalue()
    before, after = text.split("a row\n")
    assert before.endswith("\r\x1b[K")
    assert after.startswith("\r  0 images")
    assert after.endswith("\r\x1b[K")
    assert (progress.summary() or "").startswith("0 images in 0:0")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_text_for_terminals() -> None:
    assert printable("a\nb\x1b[0m\u202e" + os.fsdecode(b"\xff")) == "a\\nb\\x1b[0m\\u202e\\xff"
    assert columns_of("写真 e\u0301") == 6
    assert cut("写真.jpg", 3) == "写"
    assert cut("abc", 3) == "abc"
    assert (gauge(0, 0, 4), gauge(1, 2, 4), gauge(9, 2, 4)) == ("[####]", "[##..]", "[####]")
    assert (short_time(9.9), short_time(725), short_time(100_000)) == ("0:09", "12:05", "27:46:40")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_acts_where_the_command_waits(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        with interrupts.waiting():
            pass
        reached = False
        signal.raise_signal(number)
        reached = True  # a row is written here
        with pytest.raises(Stopped) as stopped, interrupts.waiting():
            pytest.fail("it waits although a signal has come")
        assert reached
        assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == before
    with Interrupts() as interrupts, pytest.raises(Stopped), interrupts.waiting():
        signal.raise_signal(number)


def test_a_signal_while_python_clears_something_away_ends_the_wait_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    before = sys.unraisablehook

    def wait() -> None:
        with interrupts.waiting():
            Dying()
            threading.Event().wait(10)
            pytest.fail("the signal is lost")

    with Interrupts() as interrupts, pytest.raises(Stopped) as stopped:
        wait()
    assert stopped.value.word == "terminated"
    assert sys.unraisablehook is before
    assert capsys.readouterr().err == ""


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.waiting():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
