"""What takes long waits beside the others: they are answered at once, and it is answered when it is done."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, encoded, jpeg, noise
from tests.unit.stages.test_kit import PREPROCESS, WITH_STATUS, images, numbers, parameter
from triton_vision import run
from triton_vision.stages import (
    Aside,
    ImageRefused,
    ItemStage,
    Overloaded,
    Preprocess,
    StageConfig,
    lane,
    preprocess,
    read_pixels,
    structure,
)
from triton_vision.stages.gate import Gate, find_gate
from triton_vision.stages.testing import Request, StageRunner


class Long(ItemStage):
    """Negative numbers take until they are let go; -9 is refused then."""

    def setup(self, config: StageConfig) -> None:  # noqa: ARG002 - the verb's signature
        self.go = threading.Event()

    def process(self, number: Any) -> Any:
        if number[0] >= 0:
            return number
        raise Aside(0.1 if number[0] == -9 else 3.0, lambda check: self.later(number, check))

    def later(self, number: Any, check: Callable[[], None]) -> Any:
        while not self.go.wait(0.01):
            check()
        if number[0] == -9:
            raise ImageRefused("too_complex", "in the end")
        return -number

    def interrupt(self) -> None:
        self.go.set()


@pytest.fixture
def runner() -> Iterator[StageRunner]:
    made = StageRunner(Long, WITH_STATUS)
    yield made
    made.close()


def execute(runner: StageRunner, *requests: Request) -> list[Any]:
    """What ``execute`` returns at once: None for what is answered later."""
    return list(runner.adapter.execute(requests))


def stage(runner: StageRunner) -> Long:
    assert isinstance(runner.adapter.stage, Long)
    return runner.adapter.stage


def test_neighbours_do_not_wait_for_it_nor_does_it_lose_its_own(runner: StageRunner) -> None:
    late = numbers(1, -2, 3, status=[b"", b"", b"old: told"], on_bad_image="mask")
    before, nothing, behind = execute(runner, numbers(5, status=[b""]), late, numbers(6, status=[b""]))
    assert (before.outputs["OUT"], behind.outputs["OUT"]) == (5, 6)
    assert nothing is None
    assert late.sender is not None
    assert late.sender.answer is None
    stage(runner).go.set()
    answer = late.sender.wait()
    assert answer.outputs["OUT"].ravel().tolist() == [1, 2, 0]
    assert answer.outputs["STATUS"].ravel().tolist() == [b"", b"", b"old: told"]


def test_what_is_refused_in_the_end_is_told_like_any_refusal(runner: StageRunner) -> None:
    stage(runner).go.set()
    masked, failed = numbers(-9, -1, status=[b"", b""], on_bad_image="mask"), numbers(2, -9, status=[b"", b""])
    answers = runner.execute([masked, failed])
    assert answers[0].outputs["STATUS"].ravel().tolist() == [b"too_complex: in the end", b""]
    assert (answers[1].error, answers[1].code) == ("image 1: too_complex: in the end", "INVALID_ARG")
    counters = runner.close()
    assert counters["triton_vision_refusals_total", "numbers", "too_complex"] == 2


def test_more_than_there_is_patience_for_is_turned_away(runner: StageRunner) -> None:
    waiting = [numbers(-1, status=[b""]) for _ in range(4)]
    answers = execute(runner, *waiting)
    # One is at work, and a second may wait: six seconds of work exceed the patience of four.
    assert [answer is None for answer in answers] == [True, True, False, False]
    assert answers[2].code == "UNAVAILABLE"
    assert answers[2].error.startswith("Exceeds maximum queue size: an answer would take about 9.0 s")
    assert execute(runner, numbers(1, status=[b""]))[0].outputs["OUT"] == 1


@pytest.mark.parametrize(("cancelled", "timeout_us", "code"), [(True, 0, "CANCELLED"), (False, 1000, "UNAVAILABLE")])
def test_it_is_left_when_nobody_waits_for_it(runner: StageRunner, cancelled: bool, timeout_us: int, code: str) -> None:
    request = numbers(-1, status=[b""])
    request.timeout_us = timeout_us
    assert execute(runner, request) == [None]
    assert request.sender is not None
    request.cancelled = cancelled
    assert request.sender.wait().code == code


def test_unloading_leaves_what_nobody_would_take() -> None:
    runner = StageRunner(Long, WITH_STATUS)
    waiting = [numbers(-1, status=[b""]) for _ in range(2)]
    assert execute(runner, *waiting) == [None, None]
    runner.close()
    assert [request.sender and request.sender.answer for request in waiting] == [None, None]
    assert not [thread for thread in threading.enumerate() if thread.name == "numbers-aside"]


PAID = """
import sys, pathlib
from triton_vision.run import paid
with paid(pathlib.Path(sys.argv[1]), float(sys.argv[2])) as enough:
    print(enough, flush=True)
    sys.stdin.read()
"""


def keeper(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that wants to replace the stage's."""
    command = [sys.executable, "-c", PAID, str(run.debt_path(folder, "numbers")), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_keeper_waits_for_answers_that_are_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.VARIABLE, str(tmp_path))
    runner = StageRunner(Long, WITH_STATUS)
    late = numbers(-1, status=[b""])
    assert execute(runner, late) == [None]
    hasty = keeper(tmp_path, 0.1)
    assert told(hasty) == "False"
    hasty.communicate()
    patient = keeper(tmp_path, 60)
    stage(runner).go.set()
    assert late.sender is not None
    assert late.sender.wait().outputs["OUT"] == 1
    assert told(patient) == "True"
    # As long as it has the process to itself, nothing is owed: what is short is done at once, the rest turned away.
    short, long = execute(runner, numbers(-9, status=[b""], on_bad_image="mask"), numbers(-2, status=[b""]))
    assert short.outputs["STATUS"] == b"too_complex: in the end"
    assert (long.code, long.error[:28]) == ("UNAVAILABLE", "Exceeds maximum queue size: ")
    patient.communicate()
    again = numbers(-3, status=[b""])
    assert execute(runner, again) == [None]
    assert again.sender is not None
    assert again.sender.wait().outputs["OUT"] == 3
    runner.close()


def test_a_large_image_is_decoded_beside_small_ones_to_the_same_pixels() -> None:
    large, small = encoded(noise(1, (4000, 3000)), "PNG", compress_level=1), jpeg(2)
    runner = StageRunner(Preprocess, PREPROCESS)
    late = images(large, small, b"junk", on_bad_image="mask")
    first, answer = runner.execute([images(small), late])
    assert late.sender is not None
    np.testing.assert_array_equal(answer.outputs["PIXELS"][1], first.outputs["PIXELS"][0])
    assert [bool(text) for text in answer.outputs["STATUS"].ravel()] == [False, False, True]
    np.testing.assert_array_equal(answer.outputs["PIXELS"][0], read_pixels(large))
    runner.close()


def test_the_time_for_one_image_is_bounded_and_its_neighbours_are_answered() -> None:
    text = b"P3\n300 300\n255\n" + b"#\n" * 500_000
    runner = StageRunner(Preprocess, PREPROCESS + parameter("max_seconds", "0.2"))
    answer = runner.execute([images(jpeg(1), text, jpeg(2), on_bad_image="mask")])[0]
    status = answer.outputs["STATUS"].ravel().tolist()
    assert status == [b"", b"too_complex: decoding takes more than 0.2 s (the server's max_seconds)", b""]
    runner.close()


def test_what_takes_longer_than_expected_gets_out_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # It looks as if it took 0.3 s, and takes some.
    text = b"P3\n300 300\n255\n" + b"#\n" * 200_000
    monkeypatch.setattr(structure, "SLOW_BYTE_S", 0.3e-6)
    monkeypatch.setattr(preprocess, "SHORT_S", 0.35)
    monkeypatch.setattr(lane, "SHORT_S", 0.35)
    runner = StageRunner(Preprocess, PREPROCESS + parameter("max_seconds", "0.8"))
    expected: list[float] = []
    put = runner.adapter._lane.put

    def noted(seconds: float, job: lane.Job, *, sure: bool) -> None:
        expected.append(seconds)
        put(seconds, job, sure=sure)

    monkeypatch.setattr(runner.adapter._lane, "put", noted)
    answer = runner.execute([images(jpeg(1), text, on_bad_image="mask")])[0]
    status = answer.outputs["STATUS"].ravel().tolist()
    assert status == [b"", b"too_complex: decoding takes more than 0.8 s (the server's max_seconds)"]
    assert expected == [0.3, 0.8]
    runner.close()


def test_a_request_is_bounded_in_total_and_nobody_s_text_comes_back() -> None:
    runner = StageRunner(Preprocess, PREPROCESS + parameter("max_request_bytes", "1000"))
    answer = runner.execute([images(bytes(600), bytes(600))])[0]
    assert (answer.code, "1200 bytes, and at most 1000" in answer.error) == ("INVALID_ARG", True)
    answer = runner.execute([images(b"x", on_bad_image="y" * 100_000)])[0]
    assert len(answer.error) < 200
    runner.close()
    runner = StageRunner(Long, WITH_STATUS)
    for text in (b"no reason", b": of what", b"too: \x1b[31m", b"a: " + b"x" * 1000, b"\xff: x", bytes(70_000)):
        answer = runner.execute([numbers(1, status=[text])])[0]
        assert (answer.code, answer.error[:12]) == ("INVALID_ARG", "input STATUS")
    runner.close()


ENDLESS = """
from tests.unit.stages.test_kit import NUMBERS, numbers
from triton_vision.stages import ItemStage
from triton_vision.stages.testing import StageRunner

class Endless(ItemStage):
    limit_s = 0.1
    def process(self, number):
        while number[0] > 0:
            pass
        return number

runner = StageRunner(Endless, NUMBERS % ("", ""))
print(runner.execute([numbers(0)])[0].outputs["OUT"], flush=True)
runner.execute([numbers(1)])
"""


def test_a_stage_that_never_comes_back_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-signal.SIGPROF, "[[0.]]\n"), done.stderr


def page(folder: Path, wait: float, *, each: float = 0.0, waiting: int = 9, age: float = 0.0) -> Path:
    """A page as the keeper would write it, for a chain with three seconds of patience."""
    path = run.page_path(folder, "numbers")
    if not path.exists():
        path.write_bytes(bytes(run.PAGE_BYTES))
    with path.open("r+b") as file:
        file.write(run.PAGE.pack(time.monotonic() - age, wait, 3.0, each, waiting))
    return path


def test_the_gate_admits_what_can_be_answered_in_time(tmp_path: Path) -> None:
    gate = Gate(page(tmp_path, wait=2.0), 0)
    gate.admit(2, 0.0)
    gate.admit(2, 6.0)
    with pytest.raises(Overloaded, match=r"about 2\.0 s"):
        gate.admit(1, 3.0)
    page(tmp_path, wait=3.5)
    with pytest.raises(Overloaded, match=r"about 3\.5 s"):
        gate.admit(1, 0.0)
    page(tmp_path, wait=9.0, age=5.0)
    gate.admit(1, 1.5)  # nobody writes it any more


def test_those_who_have_just_been_admitted_come_first_whichever_instance_has_them(tmp_path: Path) -> None:
    gate, other = (Gate(page(tmp_path, wait=1.0, each=0.5), instance) for instance in range(2))
    gate.admit(2, 0.0)
    other.admit(1, 0.0)
    for one in (gate, other):
        with pytest.raises(Overloaded, match=r"about 2\.5 s"):
            one.admit(1, 4.0)
    gate.admit(2, 0.0)
    with pytest.raises(Overloaded, match=r"about 3\.5 s"):
        other.admit(1, 0.0)
    # What is still in this stage is not in the queue that the next page tells of; what has passed it before, is.
    other.passed()
    page(tmp_path, wait=1.0, each=0.5)
    with pytest.raises(Overloaded, match=r"about 3\.0 s"):
        gate.admit(1, 4.0)
    gate.passed()
    with pytest.raises(Overloaded, match=r"about 3\.0 s"):
        gate.admit(1, 4.0)
    page(tmp_path, wait=2.0, each=0.5)
    gate.admit(1, 0.0)
    # What an instance died with does not count once it is replaced.
    Gate(page(tmp_path, wait=2.9, each=0.5), 0).admit(1, 0.0)


def test_what_has_been_done_since_the_page_was_written_waits_no_more(tmp_path: Path) -> None:
    gate = Gate(page(tmp_path, wait=0.2, each=0.02, age=1.5), 0)
    for items in (190, 10, 20):
        gate.admit(items, 0.0)
    with pytest.raises(Overloaded):
        gate.admit(1, 0.0)


def test_a_few_requests_may_always_wait_however_many_images_they_hold(tmp_path: Path) -> None:
    gate = Gate(page(tmp_path, wait=4.0, each=0.05, waiting=2), 0)
    gate.admit(32, 0.0)
    gate.admit(32, 0.0)
    with pytest.raises(Overloaded):
        gate.admit(32, 0.0)
    page(tmp_path, wait=4.0, each=0.05, waiting=1)
    with pytest.raises(Overloaded):
        gate.admit(1, 5.0)  # nobody would wait so long for it


def test_a_stage_finds_its_gate_and_refuses_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gate("numbers", 0) is None
    monkeypatch.setenv(run.VARIABLE, str(tmp_path))
    assert find_gate("numbers", 0) is None
    page(tmp_path, wait=2.0, each=1.5)
    runner = StageRunner(Long, WITH_STATUS)
    good, turned_away = runner.execute([numbers(1, status=[b""]), numbers(2, status=[b""])])
    assert good.outputs["OUT"] == 1
    assert (turned_away.code, "about 3.5 s" in turned_away.error) == ("UNAVAILABLE", True)
    runner.close()
