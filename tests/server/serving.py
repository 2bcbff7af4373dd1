"""``triton-vision serve`` as a process of its own, for tests, and a model that echoes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import COMMAND
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def regions(prefix: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
