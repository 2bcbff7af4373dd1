"""The benchmark's own parts, and what a server looks like after a long run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from triton_vision.server import TritonServer

pytestmark = pytest.mark.quiet

BENCHMARKS = ROOT / "benchmarks"
MEGABYTE = 1024 * 1024


def run(*command: str) -> Any:
    done = subprocess.run([sys.executable, *command], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    run("images.py", str(folder), "--small", "40", "--large", "1")
    return folder


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, TritonServer]]:
    """The suite around the stand-in network, and the tutorial's chain."""
    folder = tmp_path_factory.mktemp("benchmark")
    code = "import sys, pathlib, repository as r; f = pathlib.Path(sys.argv[1]); r.suite(f / 's'); r.tutorial(f / 't')"
    run("-c", code, str(folder))
    with TritonServer(folder / "s") as suite, TritonServer(folder / "t", warm=False) as tutorial:
        yield suite, tutorial


def stubs(server: TritonServer, model: str) -> list[int]:
    """The processes of a model's instances."""
    found = subprocess.run(["pgrep", "-g", str(server.pid)], capture_output=True, text=True, check=True).stdout.split()
    return [int(pid) for pid in found if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text()]


def private_bytes(pid: int) -> int:
    """Memory that is this process's alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def shared_bytes(server: TritonServer) -> int:
    """What the server's regions in /dev/shm have grown to."""
    prefix = f"triton_vision_{server.grpc_address.rpartition(':')[2]}_"
    return sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"{prefix}*") if path.is_file())


def test_every_contestant_answers_the_recipe_s_labels(suites: tuple[TritonServer, TritonServer], images: Path) -> None:
    suite, tutorial = suites
    for server, model in ((suite, "ensemble"), (tutorial, "tutorial")):
        for kind in ("small", "large"):
            call = ("load.py", "grpc", server.grpc_address, "--images", str(images), "--kind", kind, "--model", model)
            assert run(*call, "--requests", "64")["count"] == 64
    assert run("loops.py", "kit", "--images", str(images), "--seconds", "0.2", "--warm", "0")["rate"] > 0


def test_a_wrong_answer_ends_a_measurement(suites: tuple[TritonServer, TritonServer], images: Path) -> None:
    call = ["load.py", "grpc", suites[0].grpc_address, "--images", str(images), "--model", "ensemble_nothing"]
    done = subprocess.run([sys.executable, *call, "--requests", "32"], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode != 0
    assert "a wrong answer" in done.stderr


def test_20000_requests_grow_neither_memory_nor_shared_memory(
    suites: tuple[TritonServer, TritonServer], images: Path
) -> None:
    server = suites[0]
    call = ("load.py", "grpc", server.grpc_address, "--images", str(images), "--requests")
    run(*call, "4000")
    pids = [server.pid, *(pid for model in ("preprocess", "stand_in", "postprocess") for pid in stubs(server, model))]
    before, shared = {pid: private_bytes(pid) for pid in pids}, shared_bytes(server)
    assert shared > 0
    assert run(*call, "20000")["count"] == 20000
    grown = {pid: (private_bytes(pid) - before[pid]) / MEGABYTE for pid in pids}
    # An allocator's reserves move by a few MB; 20,000 images of 65 kB are 1,300 MB.
    assert max(grown.values()) < 20, grown
    assert shared_bytes(server) <= shared + 2 * MEGABYTE
    preprocess = stubs(server, "preprocess")
    assert len(preprocess) >= 2
    assert max(private_bytes(pid) for pid in preprocess) < 150 * MEGABYTE
