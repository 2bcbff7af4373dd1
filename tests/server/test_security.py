"""TLS, mutual TLS and tokens, between a real Triton and the client, with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from triton_vision_client import AsyncImageClient, AuthenticationError, ImageClient, ServerUnavailableError, TLSConfig
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.certificates import Authority
from tests.conftest import COMMAND, ROOT, SAMPLES
from tests.server.test_serve import alive, wait_until
from triton_vision.server import ServerStartError, TritonServer, health
from triton_vision.server.certificates import Certificates
from triton_vision.server.renewal import Renewal
from triton_vision.server.security import MORE_ADMIN_APIS, Security, header, parse_admin_apis

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


# -- TLS --------------------------------------------------------------------------------------------------------------


def test_serve_says_what_is_closed(served: Serve) -> None:
    assert (
        "tls: gRPC is encrypted, for localhost; HTTP stays in the clear and listens on 127.0.0.1 only, "
        "metrics listen on 127.0.0.1 only"
    ) in served.lines
    assert (
        "tokens: admin for model-repository, trace, logging; shm for shared-memory; inference for inference"
        in served.lines
    )
    warnings = [line for line in served.lines if line.startswith("warning")]
    assert warnings
    assert all("callers can crash Triton" in line for line in warnings)


def test_the_right_authority_and_name(served: Serve) -> None:
    inference = {header("inference"): TOKENS["inference"]}
    assert best(client(served.localhost(), TLSConfig(ca=served.ca), inference)) == "espresso"


def test_another_authority_another_name_and_no_tls(served: Serve, stranger: Authority) -> None:
    inference = {header("inference"): TOKENS["inference"]}
    for url, tls in (
        (served.localhost(), TLSConfig(ca=stranger.certificate)),
        (served.grpc, TLSConfig(ca=served.ca)),  # 127.0.0.1, for which the certificate is not
        (served.localhost(), None),
    ):
        with pytest.raises(ServerUnavailableError):
            best(client(url, tls, inference))


def test_an_expired_certificate_is_refused_by_the_client(small: Path, authority: Authority) -> None:
    pair = authority.issue("expired", "localhost", days=-1)
    # The command refuses to start with it, so that it is the client's judgement that counts here.
    security = Security(tls=Certificates(pair.certificate, pair.key))
    with TritonServer(small, security=security) as server:
        url = server.grpc_address.replace("127.0.0.1", "localhost")
        with pytest.raises(ServerUnavailableError):
            best(client(url, TLSConfig(ca=authority.certificate)))


def test_serve_refuses_an_expired_certificate_before_anything_starts(small: Path, authority: Authority) -> None:
    pair = authority.issue("expired-at-start", "localhost", days=-1)
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    ended = subprocess.run(
        [*COMMAND, "serve", "--repository", str(small), *tls], capture_output=True, text=True, check=False, timeout=30
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"error: the certificate {pair.certificate} has expired: renew it\n"


def test_mutual_tls_takes_the_authoritys_callers_alone(small: Path, authority: Authority, stranger: Authority) -> None:
    # A certificate for servers only, which the keeper could not show as a caller; on another of loopback's addresses,
    # so that what listens on 127.0.0.1 alone can be told.
    pair = authority.issue("mutual", "127.0.0.2")
    security = Security(tls=Certificates(pair.certificate, pair.key, authority.certificate))
    right = authority.issue("caller", client=True)
    expired = authority.issue("expired-caller", client=True, days=-1)
    other = stranger.issue("other-caller", client=True)
    with TritonServer(small, host="127.0.0.2", security=security) as server:
        ca = authority.certificate
        url = server.grpc_address
        assert url.startswith("127.0.0.2:")
        assert best(client(url, TLSConfig(ca, right.certificate, right.key))) == "espresso"
        for wrong in (TLSConfig(ca), *(TLSConfig(ca, pair.certificate, pair.key) for pair in (expired, other)), None):
            with pytest.raises(ServerUnavailableError):
                best(client(url, wrong))
        for address in (server.http_address, server.metrics_address):
            host, port = address.split(":")
            assert host == "127.0.0.1"
            socket.create_connection((host, int(port)), 5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", int(port)), 5)
        assert http(server.http_address, f"/v2/models/{MODEL}/ready") == 200
        renew(server)
        assert best(client(url, TLSConfig(ca, right.certificate, right.key))) == "espresso"


def test_without_http_and_metrics_nothing_answers_in_the_clear(small: Path, authority: Authority) -> None:
    pair, caller = authority.issue("closed", "127.0.0.1"), authority.issue("closed-caller", client=True)
    tls = Certificates(pair.certificate, pair.key, authority.certificate)
    with TritonServer(small, security=Security(tls=tls, http=False, metrics=False)) as server:
        assert (server.http_address, server.metrics_address) == ("", "")
        assert best(client(server.grpc_address, TLSConfig(authority.certificate, caller.certificate, caller.key)))
        listening = {port for port in listening_ports(server.pid) if f":{port}" not in server.grpc_address}
        assert len(listening) == 1  # the keeper's own, closed to all others
        address = f"127.0.0.1:{listening.pop()}"
        for path in ("/v2", "/v2/health/live", f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/config", "/v2/models/stats"):
            assert http(address, path) == 403, path
        for path in ("/v2/repository/index", f"/v2/models/{MODEL}/infer", "/v2/logging", "/v2/trace/setting"):
            assert http(address, path, {header("keeper"): "guess"}, b"{}") == 403, path
        assert http(address, "/v2/systemsharedmemory/status") == 403
        renew(server)


def test_without_options_nobody_reaches_memory_models_or_settings(small: Path) -> None:
    with TritonServer(small) as server:
        with grpc.insecure_channel(server.grpc_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _, method, request in GUARDED.values():
                for metadata in ([], [(header("keeper"), "guess")], [(header("admin"), ""), (header("shm"), "")]):
                    call = partial(getattr(stub, method), request, timeout=10, metadata=metadata)
                    assert "restricted" in refusal(call), method
            for method, request in OPEN.values():
                getattr(stub, method)(request, timeout=10)
        for path in (
            "/v2/systemsharedmemory/status",
            "/v2/cudasharedmemory/status",
            "/v2/trace/setting",
            "/v2/logging",
        ):
            assert http(server.http_address, path) == 403, path
        for path in ("/v2/repository/index", f"/v2/repository/models/{MODEL}/load", "/v2/logging"):
            assert http(server.http_address, path, None, b"{}") == 403, path
        for path in ("/v2/health/ready", f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/config", "/v2/models/stats"):
            assert http(server.http_address, path) == 200, path
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert "=hidden" in command
        assert server.security.headers()[header("keeper")] not in command
        renew(server)
        assert best(client(server.grpc_address)) == "espresso"


def test_shared_memory_is_open_where_that_was_asked_for_and_http_is_not_needed(small: Path) -> None:
    with TritonServer(small, security=Security(shm_open=True, http=False)) as server:
        with grpc.insecure_channel(server.grpc_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest(), timeout=10)
            assert "restricted" in refusal(partial(stub.RepositoryIndex, GUARDED["index"][2], timeout=10))
        renew(server)


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(entry))
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_inference_wants_its_token(served: Serve) -> None:
    tls = TLSConfig(ca=served.ca)
    for headers in ({}, {header("inference"): "wrong"}, {header("admin"): TOKENS["admin"]}):
        with pytest.raises(AuthenticationError):
            best(client(served.localhost(), tls, headers))
        for verb in ("infer", "versions/1/infer", "generate", "generate_stream"):
            assert http(served.http, f"/v2/models/{MODEL}/{verb}", headers, b"{}") == 403
        with served.channel() as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            requests = iter([service_pb2.ModelInferRequest(model_name=MODEL)])
            stream = stub.ModelStreamInfer(requests, timeout=10, metadata=tuple(headers.items()))
            assert header("inference") in refusal(partial(next, stream))
    body = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
    right = {**body, header("inference"): TOKENS["inference"]}
    assert http(served.http, f"/v2/models/{MODEL}/infer", right, PHOTO.read_bytes()) == 200


@pytest.mark.parametrize("name", GUARDED)
def test_what_is_guarded_opens_to_its_own_token_alone(served: Serve, name: str) -> None:
    role, method, request = GUARDED[name]
    others = [(header(other), token) for other, token in TOKENS.items() if other != role]
    with served.channel() as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        for metadata in ([], [(header(role), "wrong")], [(header(role), "")], others):
            assert "restricted" in refusal(partial(call, request, timeout=10, metadata=metadata))
        right = partial(call, request, timeout=10, metadata=[(header(role), TOKENS[role])])
        if name == "register":  # past the token, it names no region
            assert "Unable to open shared memory" in refusal(right)
        else:
            right()


def test_the_containers_health_check_has_the_token_too(
    served: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = partial(health.check, f"http://{served.http}", MODEL)
    assert "cannot be tried without the inference token" in asked().report
    monkeypatch.setenv("TRITON_VISION_INFERENCE_TOKEN", TOKENS["inference"])
    assert "answered a photo" in asked().report
    (tmp_path / "token").write_text("wrong\n")
    monkeypatch.setenv("TRITON_VISION_INFERENCE_TOKEN_FILE", str(tmp_path / "token"))
    assert "cannot be tried without the inference token" in asked().report
    (tmp_path / "token").write_text(TOKENS["inference"] + "\n")
    assert "answered a photo" in asked().report


def test_what_is_open_stays_open(served: Serve) -> None:
    with served.channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for method, request in OPEN.values():
            getattr(stub, method)(request, timeout=10)
    for path in ("/v2/health/ready", f"/v2/models/{MODEL}/ready", f"/v2/models/{MODEL}", "/v2/models/stats"):
        assert http(served.http, path) == 200
    assert http(served.metrics, "/metrics") == 200


@pytest.mark.parametrize(
    ("role", "path", "body"),
    [
        ("admin", "/v2/repository/index", b"{}"),
        ("admin", "/v2/trace/setting", None),
        ("admin", "/v2/logging", None),
        ("shm", "/v2/systemsharedmemory/status", None),
        ("shm", "/v2/cudasharedmemory/status", None),
    ],
)
def test_the_same_header_opens_it_over_http(served: Serve, role: str, path: str, body: bytes | None) -> None:
    assert http(served.http, path, None, body) == 403
    assert http(served.http, path, {header(role): "wrong"}, body) == 403
    assert http(served.http, path, {header(role): TOKENS[role]}, body) == 200


def test_no_token_is_seen_or_said(served: Serve) -> None:
    """Not in what other users can read of the processes, not in a model's environment, not in the verbose log."""
    session = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == served.triton]
    assert len(session) >= 4  # Triton and the stubs of three models
    seen = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*session, served.process.pid)]
    seen += [Path(f"/proc/{pid}/environ").read_bytes() for pid in session if pid != served.triton]
    seen += [served.log.read_bytes(), "\n".join(served.lines).encode()]
    assert all(seen)
    for token in TOKENS.values():
        assert not [text for text in seen if token.encode() in text]


def _session(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1


def test_tokens_without_tls_and_an_admin_who_guards_everything(small: Path) -> None:
    apis = parse_admin_apis(",".join(MORE_ADMIN_APIS))
    with TritonServer(small, security=Security(tokens=TOKENS, admin_apis=apis)) as server:
        assert best(client(server.grpc_address, None, {header("inference"): TOKENS["inference"]})) == "espresso"
        with pytest.raises(AuthenticationError):
            best(client(server.grpc_address))
        with grpc.insecure_channel(server.grpc_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for method, request in OPEN.values():
                call = getattr(stub, method)
                assert header("admin") in refusal(partial(call, request, timeout=10))
                call(request, timeout=10, metadata=[(header("admin"), TOKENS["admin"])])
        assert http(server.http_address, "/v2/health/ready") == 403
        assert http(server.http_address, "/v2/health/ready", {header("admin"): TOKENS["admin"]}) == 200
        renew(server)


def test_a_token_for_one_call_opens_only_that_call(served: Serve) -> None:
    right = {header("inference"): TOKENS["inference"]}
    with client(served.localhost(), TLSConfig(ca=served.ca)) as one:
        for _ in range(2):
            assert one.classify(PHOTO, headers=right).predictions[0].label == "espresso"
            with pytest.raises(AuthenticationError):
                one.classify(PHOTO)
            with pytest.raises(AuthenticationError):
                one.classify(PHOTO, headers={header("inference"): "wrong"})


def test_the_asyncio_client_has_certificates_and_tokens_too(served: Serve) -> None:
    async def classify(headers: Mapping[str, str]) -> str:
        tls = TLSConfig(ca=served.ca)
        async with AsyncImageClient(served.localhost(), model=MODEL, tls=tls, headers=headers, timeout=10) as one:
            return (await one.classify(PHOTO)).predictions[0].label

    assert asyncio.run(classify({header("inference"): TOKENS["inference"]})) == "espresso"
    with pytest.raises(AuthenticationError):
        asyncio.run(classify({}))


def test_shared_memory_is_taken_with_its_token_and_done_without(
    served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {header("inference"): TOKENS["inference"]}
    for given, said in ((headers, 1), ({**headers, header("shm"): TOKENS["shm"]}, 0)):
        caplog.clear()
        tls = TLSConfig(ca=served.ca)
        with ImageClient(served.localhost(), model=MODEL, tls=tls, headers=given, transport="shm", timeout=10) as one:
            assert one.classify(PHOTO).predictions[0].label == "espresso"
        refusals = [record.getMessage() for record in caplog.records if "takes no shared memory" in record.getMessage()]
        assert len(refusals) == said
        assert all(header("shm") in line for line in refusals)


def test_the_whole_list_of_models_wants_the_admin_token(served: Serve) -> None:
    with client(served.localhost(), TLSConfig(ca=served.ca)) as one:
        assert {info.state for info in one.models()} == {"READY"}  # those that are loaded
        assert one.ready()
    with client(served.localhost(), TLSConfig(ca=served.ca), {header("admin"): TOKENS["admin"]}) as one:
        assert MODEL in {info.name for info in one.models()}


# -- what stands behind it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--grpc-restricted-protocol", "--http-restricted-api"])
def test_triton_refuses_what_stands_in_for_a_secret(small: Path, option: str) -> None:
    """Should the real option ever fail to take its place, nothing runs with a token that is known."""
    with pytest.raises(ServerStartError), TritonServer(small, options=[f"{option}=hidden"], warm=False):
        pass


def test_another_server_at_the_port_is_no_proof(served: Serve, authority: Authority) -> None:
    other = authority.issue("another", "localhost")
    with pytest.raises(ServerStartError, match="shows another certificate"):
        Certificates(other.certificate, other.key).seen_at(served.grpc)
    with pytest.raises(ServerStartError, match="makes no TLS connection"):
        Certificates(other.certificate, other.key).seen_at(served.http)


def test_a_model_that_does_not_load_is_named_over_tls(small: Path, authority: Authority, tmp_path: Path) -> None:
    for entry in small.iterdir():
        (tmp_path / entry.name).symlink_to(entry.resolve())
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.py").write_text("raise RuntimeError('no luck')\n")
    (tmp_path / "broken" / "config.pbtxt").write_text(
        'backend: "python"\ninput { name: "A" data_type: TYPE_FP32 dims: 1 }\n'
        'output { name: "B" data_type: TYPE_FP32 dims: 1 }\n'
    )
    pair = authority.issue("for-broken", "localhost")
    security = Security(tls=Certificates(pair.certificate, pair.key, authority.certificate), tokens=TOKENS, http=False)
    server = TritonServer(tmp_path, security=security, strict=True)
    with pytest.raises(Exception, match=r"broken does not load: .*no luck"), server:
        pass


def test_nothing_outlives_a_killed_serve(small: Path, tmp_path: Path) -> None:
    """Also where Triton's arguments are hidden, its life is bound to its keeper's."""
    serve = Serve(small, Authority(tmp_path), tmp_path)
    triton = serve.triton
    os.kill(serve.process.pid, signal.SIGKILL)
    serve.process.communicate()
    wait_until(lambda: not alive(triton), 10)


def test_the_documented_call_and_lines(served: Serve) -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    for shown, real in (
        ("triton.example:8001", served.localhost()),
        ("inference.token", str(served.log.with_name("inference"))),
        ("ca.pem", str(served.ca)),
    ):
        assert shown in code
        code = code.replace(shown, real)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("espresso\n", "")
    for line in served.lines:
        if line.startswith(("tls: ", "tokens: ")):
            assert line.replace("localhost", "triton.example") in page
    for role in TOKENS:
        assert f"`{header(role)}`" in page
