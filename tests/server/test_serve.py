"""``triton-vision serve`` as a process: ready line, what is left out, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from triton_vision_client import ImageClient, ModelNotFoundError

from tests.conftest import COMMAND, SAMPLES, jpeg
from triton_vision.server import TritonServer
from triton_vision.server.stubs import read_stub

PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
ECHO = """
import os, signal, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if os.path.exists(os.path.join(args["model_repository"], "broken")):
            raise ValueError("the sky is green")

    def execute(self, requests):
        text = pb_utils.get_input_tensor_by_name(requests[0], "TEXT")
        if text.as_numpy()[0] == b"hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if text.as_numpy()[0] == b"chatter":
            for number in range(2000):
                print(number, "x" * 200, flush=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", text.as_numpy())])]
"""
ECHO_CONFIG = """
backend: "python"
input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] }]
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """Somebody else's repository: one Python model, nothing of the suite."""
    version = tmp_path / "theirs" / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ECHO)
    (version.parent / "config.pbtxt").write_text(ECHO_CONFIG)
    return tmp_path / "theirs"


class Serve:
    """A running ``serve``."""

    def __init__(self, repository: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--repository", str(repository), *PORTS, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("ready:"):
                return line
        raise AssertionError(f"not ready: {self.lines} {self.process.communicate()}")

    @property
    def grpc(self) -> str:
        match = re.search(r"gRPC (\S+),", self.lines[-1])
        assert match
        return match[1]

    @property
    def tritonserver(self) -> int:
        return next(pid for pid in self.family() if Path(f"/proc/{pid}/comm").read_text() == "tritonserver\n")

    def stubs(self) -> list[int]:
        """Triton's own Python processes, and not what those have forked."""
        return [pid for pid in self.family() if read_stub(pid) is not None]

    @property
    def prefix(self) -> str:
        return f"triton_vision_{self.grpc.rsplit(':', 1)[1]}_"

    def family(self) -> set[int]:
        """Every process below this one."""
        found: set[int] = set()
        todo = [self.process.pid]
        while todo:
            children = subprocess.run(["pgrep", "-P", str(todo.pop())], capture_output=True, text=True, check=False)
            new = {int(pid) for pid in children.stdout.split()} - found
            found |= new
            todo += new
        return found


@pytest.fixture
def serve() -> Iterator[Callable[..., Serve]]:
    running: list[Serve] = []

    def start(repository: Path, *options: str) -> Serve:
        running.append(Serve(repository, *options))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def regions(prefix: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


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


def test_a_model_that_does_not_load_is_named_with_its_reason(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "echo" / "broken").touch()
    one = serve(echo, "--log-level", "error", "--shm-prefix", "tv_test_broken_")
    _, error = one.process.communicate(timeout=60)
    assert one.process.returncode == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: echo does not load: ")
    assert "the sky is green" in last
    assert "(echo/1/model.py, line " in last
    assert "/dev/shm" not in last
    assert len([line for line in error.splitlines() if "the sky is green" in line]) == 1
    assert not regions("tv_test_broken_")


def test_a_broken_model_takes_down_its_own_pipeline_only(serve: Callable[..., Serve], echo: Path) -> None:
    shutil.copytree(echo / "echo", echo / "bad")
    (echo / "bad" / "broken").touch()
    config = echo / "bad" / "config.pbtxt"
    config.write_text(config.read_text().replace('"echo"', '"bad"'))
    one = serve(echo, "--log-level", "error", "--require", "echo")
    assert one.until_ready().startswith("ready: 1 of 2 pipelines: echo | gRPC ")
    one.process.terminate()
    _, error = one.process.communicate(timeout=60)
    complaints = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1
    assert complaints[0].startswith("error: bad does not load: ")


def test_without_a_pipeline_there_is_nothing_to_serve(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "chain").mkdir()
    (echo / "chain" / "config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step [ { model_name: "echo" }, { model_name: "gone" } ] }'
    )
    for options, told in (
        ((), "there is nothing to serve: chain left out, as said above"),
        (("--require", "chain"), "chain, which --require names, chains gone, which is not in the repository"),
    ):
        one = serve(echo, *options)
        said, error = one.process.communicate(timeout=60)
        assert one.process.returncode == 2
        assert "left out: chain: chains gone, which is not in the repository" in said
        assert error.strip() == f"error: {told}"
    shutil.rmtree(echo / "chain")
    (echo / "stray").mkdir()
    one = serve(echo, "--strict")
    _, error = one.process.communicate(timeout=60)
    assert (one.process.returncode, error.strip()) == (2, "error: --strict: left out: stray")


def test_a_model_whose_process_dies_while_loading_is_named(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "echo" / "1" / "model.py").write_text("import os, time\ntime.sleep(1)\nos._exit(3)\n")
    one = serve(echo)
    _, error = one.process.communicate(timeout=60)
    assert one.process.returncode == 2
    assert error.strip().splitlines()[-1] == "error: echo does not load: its Python process died while loading it"


def test_models_without_artifacts_are_left_out_with_the_reason(
    serve: Callable[..., Serve], repository: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    shutil.copytree(repository, part)
    (part / "resnet50_trt" / "1" / "model.onnx").unlink()
    one = serve(part)
    line = one.until_ready()
    said = "\n".join(one.lines)
    mend = f"make it: triton-vision prepare resnet50_trt --repository {part}"
    assert f"left out: resnet50_trt: has no 1/model.onnx ({mend})" in said
    assert "left out: ensemble: chains resnet50_trt, which is left out" in said
    assert "ensemble_lite" in line
    with ImageClient(one.grpc, model="ensemble_lite") as client:
        assert "espresso" in client.classify(SAMPLES / "coffee.jpg").predictions[0].label


def test_random_weights_are_said_at_every_start(serve: Callable[..., Serve], repository: Path) -> None:
    one = serve(repository)
    one.until_ready()
    assert "warning: resnet50_trt, ensemble: made from random weights, so the answers mean nothing" in one.lines


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
