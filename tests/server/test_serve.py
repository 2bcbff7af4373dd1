"""``triton-vision serve`` as a process: ready line, what is left out, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from triton_vision_client import ImageClient, ModelNotFoundError

from tests.conftest import COMMAND, jpeg, wait_until
from tests.server.serving import PORTS, Serve, alive, echo, regions, serve
from triton_vision.server import TritonServer
from triton_vision.server.ports import resolve_ports

__all__ = ["echo", "serve"]  # fixtures


def test_serves_somebody_elses_repository_and_ends_cleanly(serve: Callable[..., Serve], echo: Path) -> None:
    one = serve(echo)
    line = one.until_ready()
    assert "models: echo" in line
    assert "127.0.0.1" in line
    family = one.family()
    assert regions(one.prefix)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(10) == 0
    assert not any(alive(pid) for pid in family)
    assert not regions(one.prefix)


def test_sigint_ends_it_while_a_model_hangs(serve: Callable[..., Serve], echo: Path) -> None:
    one = serve(echo)
    one.until_ready()
    family = one.family()
    caller = hang(one)
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(10) == 0
    wait_until(lambda: not any(alive(pid) for pid in family), 2)
    assert not regions(one.prefix)
    caller.wait(10)


SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("SLOW MODEL AT WORK", flush=True)
        time.sleep(120)
        return []
"""
OUTPUTS = """
output [
  { name: "LABELS" data_type: TYPE_STRING dims: [ -1 ] }, { name: "CLASS_IDS" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "SCORES" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "STATUS" data_type: TYPE_STRING dims: [ 1 ] }
]
"""


def test_a_stop_is_obeyed_while_the_first_image_takes_its_time(serve: Callable[..., Serve], tmp_path: Path) -> None:
    image = 'max_batch_size: 4 input [{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }]' + OUTPUTS
    maps = " ".join(
        f'{kind}_map {{ key: "{name}" value: "{name}" }}'
        for kind, name in [("input", "IMAGE")] + [("output", n) for n in ("LABELS", "CLASS_IDS", "SCORES", "STATUS")]
    )
    chain = f'platform: "ensemble" ensemble_scheduling {{ step [{{ model_name: "slow" model_version: -1 {maps} }}] }}'
    for name, config in (("slow", 'backend: "python"' + image), ("chain", chain + image)):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    (tmp_path / "models" / "slow" / "1" / "model.py").write_text(SLOW)
    one = serve(tmp_path / "models")
    assert one.process.stderr is not None
    assert any("SLOW MODEL AT WORK" in line for line in one.process.stderr)
    assert next(iter(one.process.stderr)) == "waiting: chain has not answered its first photo yet\n"
    family = one.family()
    one.process.terminate()
    assert one.process.wait(10) == 0
    wait_until(lambda: not any(alive(pid) for pid in family), 2)


def hang(one: Serve) -> subprocess.Popen[str]:
    """A caller whose request keeps the model busy; returns once the model has it."""
    code = (
        "import sys, numpy as np\nfrom tritonclient import grpc\n"
        "tensor = grpc.InferInput('TEXT', [1], 'BYTES'); tensor.set_data_from_numpy(np.array([b'hang'], object))\n"
        "grpc.InferenceServerClient(sys.argv[1]).infer('echo', [tensor])\n"
    )
    caller = subprocess.Popen([COMMAND[0], "-c", code, one.grpc], stderr=subprocess.DEVNULL, text=True)
    stub = one.stubs()[0]

    def ignores_sigterm() -> bool:
        match = re.search(r"SigIgn:\t(\w+)", Path(f"/proc/{stub}/status").read_text())
        return bool(match and int(match[1], 16) & 1 << (signal.SIGTERM - 1))

    wait_until(ignores_sigterm, 20)
    return caller


@pytest.mark.parametrize("busy", [False, True])
def test_no_child_outlives_a_killed_serve(serve: Callable[..., Serve], echo: Path, busy: bool) -> None:
    one = serve(echo)
    one.until_ready()
    caller = hang(one) if busy else None
    family = one.family()
    assert len(family) >= 3  # tritonserver, its stub, the guard
    one.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in family), 5)
    assert not regions(one.prefix)
    if caller:
        caller.wait(10)


def test_a_full_disk_behind_its_output_stops_nothing(echo: Path) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--repository", str(echo), *PORTS], stdout=full, stderr=full, start_new_session=True
        )
        try:
            children = f"/proc/{process.pid}/task/{process.pid}/children"
            wait_until(lambda: any(is_serving(int(pid)) for pid in Path(children).read_text().split()), 30)
            process.terminate()
            assert process.wait(15) == 0
        finally:
            process.kill()


def is_serving(pid: int) -> bool:
    """Whether a process is a tritonserver whose model has a process of its own."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text() == "tritonserver\n":
            return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return False


def test_a_guard_that_dies_is_replaced(serve: Callable[..., Serve], echo: Path) -> None:
    one = serve(echo)
    one.until_ready()
    caller = hang(one)  # whose stub would live on without a guard

    def is_guard(pid: int) -> bool:
        try:
            return b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has just ended
            return False

    def guards() -> list[int]:
        return [pid for pid in one.family() if is_guard(pid)]

    (old,) = guards()
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: bool(guards()) and old not in guards(), 5)
    family = one.family()
    one.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in family), 5)
    assert not regions(one.prefix)
    caller.wait(10)


@pytest.mark.quiet  # another worker's server may clear it, too
@pytest.mark.parametrize("busy", [False, True])
def test_what_killed_servers_left_is_cleared_by_the_next_start(
    serve: Callable[..., Serve], echo: Path, busy: bool
) -> None:
    one = serve(echo, "--shm-prefix", "tv_test_left_")
    one.until_ready()
    caller = hang(one) if busy else None
    family = one.family()
    stubs = set(one.stubs())
    # Everything at once, the guard too; tritonserver dies with its keeper, but a busy stub does not notice.
    for pid in [*(family - stubs if busy else family), one.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    one.process.wait()
    if caller is not None:
        caller.wait(20)
    assert all(map(alive, stubs)) == busy
    stranger = Path("/dev/shm/tv_test_left_but_not_ours")
    stranger.touch()
    try:
        assert len(regions("tv_test_left_")) > 1
        two = serve(echo, "--shm-prefix", "tv_test_left_")
        two.until_ready()
        assert not any(map(alive, stubs))
        two.process.terminate()
        assert two.process.wait(10) == 0
        assert regions("tv_test_left_") == [stranger.name]
    finally:
        stranger.unlink()


def test_a_prefix_in_use_and_a_port_in_use_are_refused(
    serve: Callable[..., Serve], echo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = serve(echo, "--shm-prefix", "tv_test_taken_")
    one.until_ready()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is guarded is the machine's, so the lock must be, too
    two = serve(echo, "--shm-prefix", "tv_test_taken_")
    _, error = two.process.communicate(timeout=20)
    assert two.process.returncode == 2
    assert "--shm-prefix" in error
    port = one.grpc.rsplit(":", 1)[1]
    three = serve(echo, "--grpc-port", port)
    _, error = three.process.communicate(timeout=20)
    assert three.process.returncode == 2
    assert f"port {port}" in error
    assert "--grpc-port" in error
    with ImageClient(one.grpc, timeout=5) as client, pytest.raises(ModelNotFoundError):
        client.classify(jpeg(1))  # the first one still serves


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--repository", "/nowhere"], "no model repository"),
        (["--config-name", "nonesuch"], "embedded"),
        (["--host", "203.0.113.1"], "203.0.113.1"),
        (["--grpc-port", "99999"], "99999"),
        (["--host", ""], "error: --host is empty"),
        (["--shm-prefix", ""], "error: --shm-prefix is empty"),
    ],
)
def test_what_cannot_work_is_one_sentence(repository: Path, options: list[str], words: str) -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--repository", str(repository), *PORTS, *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_python_class_cleans_up_when_its_start_fails(echo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Exception, match="in use"):
            TritonServer(echo, grpc_port=taken.getsockname()[1], shm_prefix="tv_test_failed_").start()
    assert not regions("tv_test_failed_")


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--metrics-port"])
def test_a_free_port_that_somebody_takes_meanwhile_is_chosen_anew(
    echo: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        times = itertools.count()

        def race(*arguments: Any) -> dict[str, int]:
            ports = resolve_ports(*arguments)
            return {**ports, option: taken} if next(times) == 0 else ports

        monkeypatch.setattr("triton_vision.server.process.resolve_ports", race)
        with TritonServer(echo) as server:
            assert next(times) == 2
            addresses = (server.grpc_address, server.http_address, server.metrics_address)
            assert f"127.0.0.1:{taken}" not in addresses
