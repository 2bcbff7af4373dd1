"""A server with TLS and tokens, for tests, and how it is asked."""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from triton_vision_client import ImageClient, TLSConfig
from tritonclient.grpc import service_pb2

from tests.certificates import Authority
from tests.conftest import COMMAND, SAMPLES, wait_until
from triton_vision.server import TritonServer
from triton_vision.server.renewal import Renewal

PHOTO = SAMPLES / "coffee.jpg"


MODEL = "ensemble_lite"


TOKENS = {role: f"{role}-token-of-the-tests=:,+" for role in ("admin", "shm", "inference")}
# Each API that the client's own calls do not touch: role -> a call of it.
GUARDED = {
    "load": ("admin", "RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="postprocess")),
    "unload": ("admin", "RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="nothing")),
    "index": ("admin", "RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    "trace": ("admin", "TraceSetting", service_pb2.TraceSettingRequest()),
    "logging": ("admin", "LogSettings", service_pb2.LogSettingsRequest()),
    "register": ("shm", "SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="none")),
    "unregister": ("shm", "SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name="none")),
    "shm": ("shm", "SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    "cuda": ("shm", "CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest()),
}
OPEN = {
    "ready": ("ServerReady", service_pb2.ServerReadyRequest()),
    "model": ("ModelReady", service_pb2.ModelReadyRequest(name=MODEL)),
    "metadata": ("ModelMetadata", service_pb2.ModelMetadataRequest(name=MODEL)),
    "config": ("ModelConfig", service_pb2.ModelConfigRequest(name=MODEL)),
    "statistics": ("ModelStatistics", service_pb2.ModelStatisticsRequest()),
}


@pytest.fixture(scope="module")
def small(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lite pipeline alone, which starts quickly."""
    folder = tmp_path_factory.mktemp("small")
    for name in ("preprocess_lite", "efficientnet_lite0", "postprocess", MODEL):
        (folder / name).symlink_to(repository / name)
    return folder


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody here trusts."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


class Serve:
    """``triton-vision serve`` with a certificate for localhost alone, and with every token."""

    def __init__(self, repository: Path, authority: Authority, folder: Path) -> None:
        pair = authority.issue("localhost", "localhost")
        self.ca = authority.certificate
        options = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
        for role, token in TOKENS.items():
            file = folder / role
            file.touch(mode=0o600)
            file.write_text(token + "\n")
            options += [f"--{role}-token-file", str(file)]
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--repository", str(repository), *ports, *options, "--log-level", "verbose"],
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready"):
                break
        found = re.search(r"gRPC ([\d.:]+), HTTP ([\d.:]+), metrics ([\d.:]+)", self.lines[-1] if self.lines else "")
        assert found, (self.lines, self.log.read_text())
        self.grpc, self.http, self.metrics = found.groups()

    @property
    def triton(self) -> int:
        """tritonserver's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if "tritonserver" in Path(f"/proc/{pid}/comm").read_text())

    def localhost(self) -> str:
        """gRPC's address by the name that its certificate is for."""
        return self.grpc.replace("127.0.0.1", "localhost")

    def channel(self) -> Any:
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.secure_channel(self.localhost(), credentials, options=[("grpc.enable_http_proxy", 0)])


@pytest.fixture(scope="module")
def served(small: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    serve = Serve(small, authority, tmp_path_factory.mktemp("served"))
    try:
        yield serve
        serve.process.terminate()
        assert serve.process.wait(15) == 0
    finally:
        serve.process.kill()
        serve.process.communicate()


def client(url: str, tls: TLSConfig | None = None, headers: Mapping[str, str] | None = None) -> ImageClient:
    return ImageClient(url, model=MODEL, tls=tls, headers=headers, timeout=10)


def best(one: ImageClient) -> str:
    with one:
        return one.classify(PHOTO).predictions[0].label


def renew(server: TritonServer) -> None:
    """Lets the keeper load a model anew, with whatever it needs for that."""
    renewal = Renewal(server.index, "postprocess", 30, sparing=True, counts=None, run=server.folder)
    wait_until(lambda: renewal.done, 60)
    assert renewal.problem == ""
    with server.index() as index:
        assert index.broken() == {}


def http(address: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> int:
    """The HTTP status of a GET, or of a POST where there is a body."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://{address}{path}", headers=dict(headers or {}), data=body)
    try:
        with opener.open(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def refusal(call: Callable[[], object]) -> str:
    """What the server says to a call that it refuses for want of a token."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return str(caught.value.details())
