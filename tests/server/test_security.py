"""TLS, mutual TLS and tokens, between a real Triton and the client, with certificates made here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest
from triton_vision_client import ServerUnavailableError, TLSConfig
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.certificates import Authority
from tests.conftest import COMMAND, ROOT, wait_until
from tests.server.guarded import (
    GUARDED,
    MODEL,
    OPEN,
    TOKENS,
    Serve,
    authority,
    best,
    client,
    http,
    refusal,
    renew,
    served,
    small,
    stranger,
)
from tests.server.serving import alive
from triton_vision.server import ServerStartError, TritonServer
from triton_vision.server.certificates import Certificates
from triton_vision.server.security import Security, header

__all__ = ["authority", "served", "small", "stranger"]  # fixtures

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


# -- what stands behind it --------------------------------------------------------------------------------------------


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
