"""Which model's Python processes are replaced, when, and what happens if that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from triton_vision.server import renewal, stubs
from triton_vision.server.errors import ModelLoadError
from triton_vision.server.index import ServerIndex
from triton_vision.server.renewal import MIB, Tending, bound
from triton_vision.server.stubs import Stub, StubWatch, end_stubs


class Index(ServerIndex):
    """Stands for a server: takes every load, or none."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.go_on = threading.Event()
        self.go_on.set()
        self.loads: list[list[tuple[int, int]]] = []
        self.reserve = Path()
        self.reserved: list[bool] = []

    def config(self, model: str) -> dict[str, Any]:
        assert model == "stage"
        return {"name": model, "instance_group": [{"count": 3}, {"count": 2, "rate_limiter": {"priority": 5}}]}

    def load(self, model: str, config: Mapping[str, Any], timeout: float) -> None:
        assert timeout == 30
        self.go_on.wait(10)
        self.reserved.append(self.reserve.exists())
        groups = config["instance_group"]
        self.loads.append([(group["count"], group["rate_limiter"]["priority"]) for group in groups])
        if self.problem:
            raise ModelLoadError({model: self.problem})

    def __exit__(self, *_: object) -> None:
        pass


class Watch(StubWatch):
    """Stands for the processes of a server."""

    def __init__(self) -> None:
        super().__init__(0)
        self.running: list[Stub] = []
        self.dead: list[Stub] = []
        self.unknown = False

    def look(self, *, search: bool = False) -> list[Stub]:
        del search
        return self.running

    def nameless(self, seconds: float) -> bool:
        del seconds
        return self.unknown

    def lost(self, seconds: float = 0.0) -> list[Stub]:
        del seconds
        return self.dead


class World:
    """A server with one stub, memory and a clock that the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = Index()
        self.told: list[str] = []
        self.stub = Stub(1, "stage", "region")
        self.now, self.free = 1000.0, 60 * MIB
        self._region = folder / "region"
        monkeypatch.setattr(stubs, "SHM", folder)
        monkeypatch.setattr(renewal, "_total", lambda: 64 * MIB)
        monkeypatch.setattr(renewal, "_free", lambda: self.free)
        monkeypatch.setattr(renewal, "_clock", lambda: self.now)
        self.index.reserve = folder / renewal.RESERVE
        self.tending = Tending(0, lambda: self.index, self.told.append, 5.0, folder)
        self.watch = self.tending._watch = Watch()
        self.watch.running = [self.stub]
        self.grow(1)

    def grow(self, mib: int) -> None:
        self._region.write_bytes(b"x" * (mib * MIB))

    def pass_time(self, seconds: float) -> str:
        """Tends, before and after; returns what that came to."""
        why = self.settle()
        self.now += seconds
        return self.settle() or why

    def settle(self) -> str:
        why = self.tending.tend()
        deadline = time.monotonic() + 10
        while self.tending._renewal is not None and not why:
            assert time.monotonic() < deadline
            why = self.tending.tend()
        return why


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_the_bound_is_a_share_of_what_there_is() -> None:
    assert bound(64 * MIB, 5, free=1 * MIB) == 4 * MIB
    assert bound(64 * MIB, 5, free=4 * MIB) == 12 * MIB
    assert bound(64 * MIB, 0, free=1 * MIB) == 8 * MIB
    for free in (1 * MIB, 1000 * MIB):
        assert bound(1024 * MIB, 8, free) == 16 * MIB
        assert bound(64 * 1024 * MIB, 8, free) == 32 * MIB


def test_a_region_is_given_back_once_it_has_stopped_growing(world: World) -> None:
    assert world.pass_time(100) == ""
    assert world.index.loads == []
    for mib in (13, 14, 15, 16):
        world.grow(mib)
        world.pass_time(0.5)
    assert world.index.loads == []
    world.pass_time(1)
    assert world.index.loads == [[(3, 1), (2, 4)]]
    assert world.told == []


def test_a_model_that_needs_its_memory_keeps_it_for_longer_each_time(world: World) -> None:
    world.grow(16)
    renewed = []
    for _ in range(400):
        count = len(world.index.loads)
        world.pass_time(1)
        if len(world.index.loads) > count:
            renewed.append(world.now)
    assert [round(b - a) for a, b in pairwise(renewed)] == [30, 60, 120]
    world.free = 20 * MIB  # of 64: others may need it
    world.pass_time(1)
    assert len(world.index.loads) == len(renewed) + 2  # of one process first


def test_where_memory_is_short_one_process_at_a_time_is_made(world: World) -> None:
    world.grow(16)
    world.free = 1 * MIB
    world.pass_time(2)
    assert world.index.loads == [[(1, 1), (1, 4)], [(3, 1), (2, 4)]]


def test_the_first_new_process_finds_room_however_full_it_is(world: World) -> None:
    reserve = world.index.reserve
    assert reserve.stat().st_blocks * 512 >= renewal.RESERVE_BYTES
    world.grow(16)
    world.pass_time(2)
    assert world.index.reserved == [False]
    assert reserve.stat().st_blocks * 512 >= renewal.RESERVE_BYTES


def test_a_process_that_died_before_it_was_seen_ends_the_server(world: World) -> None:
    assert world.pass_time(10) == ""
    world.watch.unknown = True
    assert world.pass_time(1) == "Triton keeps a dead process of a Python model"


def test_what_cannot_be_replaced_is_told_once_and_tried_again(world: World) -> None:
    world.grow(16)
    world.index.problem = "no room"
    for _ in range(200):
        assert world.pass_time(1) == ""
    assert len(world.index.loads) in (2, 3)
    assert len(world.told) == 1
    assert world.told[0].startswith("warning: stage: ")
    assert world.told[0].endswith("no room")


def test_a_dead_process_is_replaced_at_once(world: World) -> None:
    world.watch.dead = [world.stub]
    assert world.settle() == ""
    assert world.told == [
        "error: stage: a Python process died; replacing the model's processes",
        "replaced: stage: all its Python processes, in 0.0 s",
    ]
    assert len(world.index.loads) == 1
    world.settle()
    assert len(world.index.loads) == 1  # its region may stay for a moment
    world.now += 60
    assert world.settle() == "Triton keeps a dead Python process of stage"


def test_a_dead_process_that_cannot_be_replaced_costs_a_restart(world: World) -> None:
    world.watch.dead = [world.stub]
    world.index.problem = "no luck"
    for _ in range(renewal.MOST_LOADS - 1):
        assert world.settle() == ""  # a new process may have died, too
    assert world.told[1::2] == ["error: stage: not replaced, trying again: no luck"] * (renewal.MOST_LOADS - 1)
    assert world.settle() == "the Python processes of stage could not be replaced: no luck"


def test_a_dead_process_that_a_load_waits_for_costs_a_restart(world: World) -> None:
    world.watch.dead = [world.stub]
    world.index.go_on.clear()
    world.tending.tend()
    deadline = time.monotonic() + 10
    while not (world.tending._renewal and world.tending._renewal.loading_since == world.now):
        assert time.monotonic() < deadline
    world.now += 60
    assert world.tending.tend() == ""  # Triton knows that this one has died
    world.watch.dead = [world.stub, Stub(2, "stage", "another")]
    stuck = "Triton waits for a Python process of stage that died while the model was loaded anew"
    assert world.tending.tend() == stuck
    world.now -= 60
    assert world.tending.tend() == ""
    world.index.go_on.set()
    world.settle()


def test_a_dead_process_is_not_kept_waiting_for_the_answers_that_others_owe(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "DEAD_DEBT_S", 0.05)
    world.watch.dead = [world.stub]
    with owing(world.index.reserve.parent):
        world.settle()
    assert len(world.index.loads) == 1
    assert "warning: stage: its Python processes still owed answers, whose callers get none" in world.told


def test_a_server_that_ends_while_a_load_is_prepared_is_a_problem_like_any_other(tmp_path: Path) -> None:
    one = renewal.Renewal(Index, "stage", 30, sparing=False, counts=None, run=tmp_path / "gone")
    one._thread.join(10)
    assert "No such file or directory" in one.problem


def test_a_frozen_process_is_killed(world: World) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        frozen = Stub(process.pid, "stage", "region")
        world.watch._known[frozen.pid] = frozen
        world.watch._stopped[frozen.pid] = stubs.FROZEN_LOOKS
        world.tending.tend()
        assert process.wait(10) == -signal.SIGKILL
    assert world.told == ["error: stage: a Python process has been stopped by a signal for seconds; killing it"]


@contextmanager
def owing(folder: Path) -> Iterator[None]:
    """A process that owes an answer."""
    program = (
        "import sys; from triton_vision.run import *; Debt(debt_path(Path(sys.argv[1]), 'stage')).begin(); print()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; sys.stdout.flush(); sys.stdin.read()", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


# -- noticing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts what looks like a stub."""
    program = tmp_path / stubs.PROGRAM
    program.symlink_to(sys.executable)
    (tmp_path / "models" / "stage" / "1").mkdir(parents=True)
    model = tmp_path / "models" / "stage" / "1" / "model.py"
    model.write_text("import time; print(flush=True); time.sleep(60)")
    started: list[subprocess.Popen[bytes]] = []

    def start(region: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([program, model, region], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_a_process_that_triton_did_not_end_is_lost(
    process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubs, "SHM", tmp_path)
    monkeypatch.setattr(stubs, "REMOVAL_S", -1.0)
    watch = StubWatch(os.getpid())
    for number, tidy in enumerate((False, True)):
        region = tmp_path / f"region{number}"
        region.touch()
        one = process(region.name)
        stub = Stub(one.pid, "stage", region.name)
        assert watch.look() == [stub]
        assert watch.lost() == []
        if tidy:
            region.unlink()
        one.kill()
        one.wait()
        assert watch.look() == []
        assert watch.lost() == ([] if tidy else [stub])
        region.unlink(missing_ok=True)
        watch.look()
        assert watch.lost() == []


def test_a_process_that_stays_stopped_is_frozen_unless_its_server_is_stopped_too(
    process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubs, "SHM", tmp_path)
    one = process("region")
    watch = StubWatch(os.getpid())
    one.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED)
    for server, found in ((one.pid, []), (os.getpid(), [one.pid])):
        watch._server = server
        for _ in range(stubs.FROZEN_LOOKS):
            assert watch.frozen() == []
            watch.look()
        assert [stub.pid for stub in watch.frozen()] == found


def test_only_stubs_of_that_region_are_ended(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    ours, other = process("ours"), process("other")
    assert end_stubs(lambda region: region == "ours") == 1
    assert ours.wait(10) == -9
    assert other.poll() is None
