"""When a server that dies is started again, how soon, and when that is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import cast

import pytest

from triton_vision.server import ServerStartError, SetupError, keeper, renewal
from triton_vision.server.process import TritonServer

DIED = "tritonserver ended with signal SIGSEGV"


class Doomed:
    """Stands for a server that dies at once, each time that it was started."""

    def __init__(self, starts: list[Exception | None]) -> None:
        self.starts = starts
        self.pid = os.getpid()
        self.start_took = 0.0
        self.folder = Path("/nonexistent")
        self.stop_requested = threading.Event()
        self.stops = 0

    def index(self) -> None:
        raise AssertionError("there is no stub to look after")

    def ended(self) -> str:
        return DIED

    def stop(self) -> None:
        self.stops += 1

    def start(self) -> None:
        if not self.starts:
            self.stop_requested.set()  # a signal, while it starts
            raise ServerStartError("ended before it was ready")
        problem = self.starts.pop(0)
        if problem is not None:
            raise problem


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "PERIOD_S", 0.0)
    monkeypatch.setattr(keeper, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(keeper, "LAST_DELAY_S", 0.004)
    monkeypatch.setattr(keeper, "CRASH_DELAY_S", 0.004)


def keep(server: Doomed) -> tuple[list[str], int]:
    told: list[str] = []
    ready: list[None] = []
    keeper.keep(cast(TritonServer, server), told.append, lambda: ready.append(None))
    return told, len(ready)


def test_the_delay_doubles_and_a_start_that_fails_counts() -> None:
    server = Doomed([None, SetupError("port 8001 is in use"), OSError("no space"), None])
    told, ready = keep(server)
    assert told == [
        f"error: {DIED}; restarting in 0.001 s",
        f"error: {DIED}; restarting in 0.002 s",
        "error: port 8001 is in use; restarting in 0.004 s",
        "error: no space; restarting in 0.004 s",
        f"error: {DIED}; restarting in 0.004 s",
    ]
    assert ready == 2
    assert server.stops == 5  # what was left is ended before each start


def test_it_gives_up_after_so_many_starts_that_fail_in_a_row() -> None:
    server = Doomed([OSError("no space")] * 99)
    with pytest.raises(ServerStartError, match="no space; that was the 10th failure in a row, so it is not restarted"):
        keep(server)
    assert len(server.starts) == 89


def test_callers_who_crash_it_cannot_end_it_for_good() -> None:
    died = ServerStartError(f"{DIED}: it said no reason")
    told, ready = keep(Doomed([None, died, died] * 20))
    assert ready == 20
    assert len(told) == 61


def test_time_in_health_makes_the_next_failure_the_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "HEALTHY_S", 0.0)
    told, ready = keep(Doomed([None] * 20))
    assert ready == 20
    assert set(told) == {f"error: {DIED}; restarting in 0.001 s"}


def test_a_server_whose_processes_cannot_be_replaced_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(renewal.Tending, "tend", lambda _: "no luck")
        server = Doomed([])
        server.pid = process.pid
        monkeypatch.setattr(server, "ended", lambda: "")
        assert keep(server)[0] == ["error: no luck; restarting in 0.001 s"]
        assert process.wait(10) == -signal.SIGKILL


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(keeper, "CRASH_DELAY_S", 600.0)
    server = Doomed([])
    threading.Timer(0.1, server.stop_requested.set).start()
    assert keep(server) == ([f"error: {DIED}; restarting in 600 s"], 0)
