"""Tokens: what each opens, over gRPC and HTTP, and that none is seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import grpc
import pytest
from triton_vision_client import AsyncImageClient, AuthenticationError, ImageClient, TLSConfig
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.guarded import (
    GUARDED,
    MODEL,
    OPEN,
    PHOTO,
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
)
from triton_vision.server import ServerStartError, TritonServer, health
from triton_vision.server.security import MORE_ADMIN_APIS, Security, header, parse_admin_apis

__all__ = ["authority", "served", "small"]  # fixtures


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


@pytest.mark.parametrize("option", ["--grpc-restricted-protocol", "--http-restricted-api"])
def test_triton_refuses_what_stands_in_for_a_secret(small: Path, option: str) -> None:
    """Should the real option ever fail to take its place, nothing runs with a token that is known."""
    with pytest.raises(ServerStartError), TritonServer(small, options=[f"{option}=hidden"], warm=False):
        pass
