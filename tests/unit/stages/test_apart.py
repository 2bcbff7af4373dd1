"""Work on one image in a process of its own: whatever becomes of it, the stage goes on."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triton_vision.stages import ImageRefused
from triton_vision.stages.apart import Apart
from triton_vision.stages.budget import UNIT, MemoryBudget, default_budget

SHAPE = (2, 3)
MEMORY = 64 * 1024 * 1024


def work(data: bytes) -> Any:
    match data:
        case b"refuse":
            raise ImageRefused("corrupt", "the PNG cannot be decoded: ä")
        case b"spin":
            while True:
                pass
        case b"crash":
            ctypes.string_at(0)
        case b"hoard":
            return np.zeros(1 << 30, np.uint8)
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"odd":
            raise KeyError("/a/path")
    return np.full(SHAPE, len(data), np.uint8)


@contextmanager
def apart() -> Iterator[Apart]:
    made = Apart(work, SHAPE, MEMORY)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Apart]:
    with apart() as made:
        yield made


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"refuse", "corrupt: the PNG cannot be decoded: ä"),
        (b"hoard", "too_complex: decoding takes more than 67 MB of memory"),
        (b"die", "too_complex: decoding it took the machine's last memory"),
        (b"crash", "corrupt: its decoder fails on it"),
        (b"odd", "corrupt: its decoder fails on it"),
    ],
)
def test_whatever_happens_to_it_is_a_refusal(worker: Apart, data: bytes, words: str) -> None:
    with pytest.raises(ImageRefused) as caught:
        worker.run(data, 5.0)
    assert str(caught.value).startswith(words)
    np.testing.assert_array_equal(worker.run(b"x" * 70_000_00 + b"yz", 5.0), np.full(SHAPE, 7_000_002 % 256, np.uint8))


def test_it_ends_after_its_seconds_and_threads_take_turns(worker: Apart) -> None:
    with pytest.raises(TimeoutError):
        worker.run(b"spin", 0.2)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda size: worker.run(bytes(size), 5.0), range(1, 40)))
    assert [array[0, 0] for array in made] == list(range(1, 40))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_child(template: int) -> int:
    while not (found := children(template)):
        pass
    return found[0]


@pytest.mark.parametrize("number", range(20))
def test_closing_ends_what_is_at_work_and_what_has_just_begun(number: int) -> None:
    with apart() as made:
        problems: list[BaseException] = []

        def run() -> None:
            try:
                made.run(b"spin", 60.0)
            except RuntimeError as error:
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        child = os.pidfd_open(wait_for_child(made._template))
        select.select([], [], [], number / 4000)
        made.close()
        thread.join(10)
        assert len(problems) == 1
        assert ends(child)


def ends(pidfd: int) -> bool:
    """Whether the process ends within ten seconds."""
    try:
        return bool(select.select([pidfd], [], [], 10.0)[0])
    finally:
        os.close(pidfd)


def test_it_dies_with_the_stage() -> None:
    code = (
        "import os, sys\n"
        "from tests.unit.stages.test_apart import Apart, MEMORY, SHAPE, work\n"
        "made = Apart(work, SHAPE, MEMORY)\n"
        "print(made._template, flush=True)\n"
        "sys.stdin.read()\n"
    )
    stage = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert stage.stdout is not None
    template = os.pidfd_open(int(stage.stdout.readline()))
    stage.kill()
    stage.communicate()
    assert ends(template)


def test_memory_is_shared_by_processes_and_given_back_by_the_dead(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib\n"
        "from triton_vision.stages.budget import MemoryBudget, UNIT\n"
        "with MemoryBudget(4 * UNIT, 4 * UNIT, pathlib.Path(sys.argv[1])).taken(3 * UNIT, lambda: None):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    budget, waited = MemoryBudget(4 * UNIT, 4 * UNIT, tmp_path), 0

    def check() -> None:
        nonlocal waited
        waited += 1
        if waited == 3:
            other.kill()

    with budget.taken(1.0, check):
        assert waited == 0
    with budget.taken(9 * UNIT, check):  # more than there is: all of it
        assert waited >= 3
    other.communicate()
    budget.close()


def test_waiting_for_memory_ends_when_nobody_waits_for_the_answer(tmp_path: Path) -> None:
    budget, whole = MemoryBudget(3 * UNIT, 2 * UNIT, tmp_path), 9.0 * UNIT

    def check() -> None:
        raise TimeoutError

    # Threads of one process wait for each other, too, and leave others something.
    with budget.taken(1.0, check), budget.taken(1.0, check), pytest.raises(TimeoutError), budget.taken(1.0, check):
        pass
    with budget.taken(whole, check), pytest.raises(TimeoutError), budget.taken(1.0, check):
        pass
    budget.close()


@pytest.mark.parametrize(
    ("files", "megabytes"),
    [
        ({}, 8000),
        ({"memory.max": "max\n"}, 8000),
        ({"memory.max": "2000000000\n"}, 2000),
        ({"memory/memory.limit_in_bytes": "1000000000"}, 1000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/a/b/memory.limit_in_bytes": "500000000"}, 500),
        ({"system.slice/one/memory.max": "400000000"}, 400),
    ],
)
def test_the_budget_is_a_quarter_of_what_the_process_may_use(
    tmp_path: Path, files: dict[str, str], megabytes: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        7812500 kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("11:memory:/a/b\n4:cpu,cpuacct:/a\n0::/system.slice/one\n")
    assert default_budget(tmp_path, meminfo, own) == megabytes * 1_000_000 // 4
