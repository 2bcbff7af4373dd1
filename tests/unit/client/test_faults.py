"""What proxies, networks and servers in trouble do, and what the client makes of it; servers scripted in process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from triton_vision_client import (
    AsyncImageClient,
    ImageClient,
    RequestTooLargeError,
    RetryPolicy,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    TLSConfig,
)
from triton_vision_client._balancer import FIRST_EJECTION_S, LONGEST_EJECTION_S
from triton_vision_client._translate import is_refusal

from tests.conftest import wait_until
from tests.unit.client.scripted import CODE, ONCE, Start, abort, answer, typed, unless


@pytest.mark.parametrize(
    ("code", "details", "kind", "words"),
    [
        (CODE.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", RequestTooLargeError, "smaller"),
        (CODE.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", ServerOverloadedError, "later"),
        (CODE.RESOURCE_EXHAUSTED, "Bandwidth exhausted or memory limit exceeded", ServerOverloadedError, "later"),
        (CODE.UNKNOWN, "Received http2 header with status: 413", RequestTooLargeError, "proxy"),
        (CODE.UNIMPLEMENTED, "Received http2 header with status: 404", ServerUnavailableError, "does not speak gRPC"),
        (CODE.UNKNOWN, "Stream removed (Failed parsing HTTP/2)", ServerUnavailableError, "broke off"),
        (CODE.INTERNAL, "Received RST_STREAM with error code 2", ServerUnavailableError, "broke off"),
        (CODE.CANCELLED, "Received RST_STREAM with error code 8", ServerUnavailableError, "broke off"),
        (CODE.DEADLINE_EXCEEDED, "upstream request timeout", Exception, "upstream request timeout"),
        (CODE.INTERNAL, "the model raised", ServerError, "log may say more"),
        (CODE.INVALID_ARGUMENT, "unexpected inference output 'LABELS' for model 'm'", ServerError, "does not classify"),
        (CODE.INVALID_ARGUMENT, "unexpected inference input 'IMAGE' for model 'm'", ServerError, "an image ensemble"),
        (CODE.INVALID_ARGUMENT, "expected 2 inputs but got 1. Got input(s) ['IMAGE'], but", ServerError, "an image en"),
        (CODE.INTERNAL, "Failed to process the request(s), message: Connection reset by peer", ServerError, "log may"),
        (CODE.INTERNAL, "Failed to process the request(s): unknown model type", ServerError, "log may say more"),
        (CODE.RESOURCE_EXHAUSTED, "a tensor too large for the memory pool", ServerOverloadedError, "later"),
        (CODE.RESOURCE_EXHAUSTED, "received metadata size exceeds hard limit", ServerError, "headers"),
        (CODE.UNAVAILABLE, "Server not ready", ServerUnavailableError, "starting or ending"),
        (CODE.UNAVAILABLE, "upstream request timeout", ServerUnavailableError, "no server answers"),
        (CODE.UNAVAILABLE, "Received http2 header with status: 429", ServerOverloadedError, "proxy"),
        (CODE.UNAVAILABLE, "Received http2 header with status: 503", ServerUnavailableError, "proxy"),
    ],
)
def test_what_each_answer_means(code: Any, details: str, kind: type[Exception], words: str) -> None:
    error = typed(code, details)
    assert isinstance(error, kind)
    assert words in str(error)


REGION = "triton_python_backend_shm_region_5a1c"
NO_ROOM = (
    f"in ensemble 'm', Failed to process the request(s) for model instance 'm_0_0', message: Failed to increase the "
    f"shared memory pool size for key '{REGION}' to 67108864 bytes. If you are running Triton inside docker, use "
    "'--shm-size' flag to control the shared memory region size. Error: No space left on device"
)


@pytest.mark.parametrize(
    ("code", "details", "kept"),
    [
        (CODE.INTERNAL, NO_ROOM, "no room"),
        (CODE.INTERNAL, f"Unable to open shared memory region: '/{REGION}', errno 2", "Unable to open"),
        (CODE.INTERNAL, "Stub process 'm_0_0' is not healthy: /opt/models/m/1/model.py", "is not healthy"),
        (CODE.INTERNAL, "ZeroDivisionError: division\n\nAt:\n  /opt/models/m/1/model.py(12): execute\n", "division"),
        (CODE.INVALID_ARGUMENT, "cannot read '/opt/models/m/labels.txt'", "cannot read"),
        (CODE.UNKNOWN, "b'/tmp/python_env/bin/x' failed", "failed"),
    ],
)
def test_nobody_hears_of_a_server_s_paths_and_regions(code: Any, details: str, kept: str) -> None:
    error = str(typed(code, details))
    assert kept in error
    assert not any(told in error for told in (REGION, "/opt", "/tmp", "model.py"))


def test_what_is_no_path_stays(start: Start) -> None:  # noqa: ARG001
    assert "images/s, 3/4, http://host/v2/models" in str(typed(CODE.INTERNAL, "images/s, 3/4, http://host/v2/models"))


def test_a_request_without_room_is_tried_again_and_a_batch_image_by_image(start: Start) -> None:
    asked: list[int] = []

    def little_room(request: Any, context: Any) -> Any:
        asked.append(request.inputs[0].shape[0])
        if asked[-1] > 1 or len(asked) == 1:
            context.abort(CODE.INTERNAL, NO_ROOM)
        return answer(request, context)

    url, _ = start(little_room)
    policy = RetryPolicy(attempts=2, initial=0.01)
    with ImageClient(url, retry=policy) as client:
        assert client.classify(b"x").predictions[0].class_id == 1
        assert asked == [1, 1]
        assert [result.predictions[0].class_id for result in client.classify_many([b"x", b"xx", b"xxx"])] == [1, 2, 3]
        assert asked[2:] == [3, 3, 1, 1, 1]

    async def twin() -> list[int]:
        async with AsyncImageClient(url, retry=policy) as client:
            return [result.predictions[0].class_id async for result in client.classify_many([b"x", b"xx"])]

    assert asyncio.run(twin()) == [1, 2]


def test_what_never_finds_room_says_what_to_do(start: Start) -> None:
    url, _ = start(abort(CODE.INTERNAL, NO_ROOM))
    with ImageClient(url, retry=ONCE) as client, pytest.raises(ServerOverloadedError, match="send fewer or smaller"):
        client.classify(b"x")


def test_a_thousand_callers_do_not_hammer_a_server_that_is_full(start: Start) -> None:
    url, servicer = start(abort(CODE.UNAVAILABLE, "in ensemble 'm', Exceeds maximum queue size: about 3.2 s"))
    failures: list[ServerOverloadedError] = []
    with ImageClient(url, timeout=10) as client:

        def call() -> None:
            for _ in range(20):
                with pytest.raises(ServerOverloadedError, match=r"queue of .* is full") as raised:
                    client.classify(b"x")
                failures.append(raised.value)

        threads = [threading.Thread(target=call) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failures) == 1000
    # What the calls have earned, and the reserve.
    assert len(servicer.requests) <= 1000 + 0.2 * 1000 + 20


def test_models_without_the_index(start: Start) -> None:
    url, servicer = start(answer)
    with ImageClient(url) as client:
        assert [(model.name, model.ready) for model in client.models()] == [("m", True)]

    async def twin() -> list[str]:
        async with AsyncImageClient(url) as client:
            return [model.name for model in await client.models()]

    assert asyncio.run(twin()) == ["m"]
    servicer.token = "t"
    with ImageClient(url, headers={"token": "t"}) as client:
        assert [(model.name, model.ready) for model in client.models()] == [("m", True), ("n", False)]


class Status(grpc.RpcError):
    def __init__(self, code: Any, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "refused"),
    [
        (CODE.INVALID_ARGUMENT, "Unable to open shared memory region", True),
        (CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'", True),
        (CODE.UNAVAILABLE, "Socket closed", False),
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", False),
        (CODE.UNKNOWN, "Stream removed", False),
        (CODE.INTERNAL, "Received RST_STREAM with error code 2", False),
        (CODE.RESOURCE_EXHAUSTED, "Bandwidth exhausted", False),
    ],
)
def test_a_server_without_shared_memory_is_told_from_one_in_trouble(code: Any, details: str, refused: bool) -> None:
    assert is_refusal(Status(code, details)) is refused


def test_tls_that_does_not_fit_is_told_from_a_wrong_port() -> None:
    closed = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Socket closed"
    assert "wants TLS" in str(typed(CODE.UNAVAILABLE, closed))
    assert "client's certificate" in str(typed(CODE.UNAVAILABLE, closed, tls=True))
    other = "failed to connect: Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification"
    assert "check its certificate" in str(typed(CODE.UNAVAILABLE, other, tls=True))


def test_a_question_about_health_that_is_answered_with_nothing(start: Start) -> None:
    ill = True

    url, _ = start(answer)
    other, servicer = start(unless(lambda: ill), garbled=lambda: ill)
    with ImageClient(other) as client:
        assert not client.ready()
    with ImageClient([other, url]) as client:
        for _ in range(8):
            client.classify(b"x")
        ill = False
        before = len(servicer.requests)

        def back() -> bool:
            client.classify(b"x")
            return len(servicer.requests) > before

        wait_until(back, 2 * LONGEST_EJECTION_S)


def test_refusals_are_answers(start: Start) -> None:
    down = True

    def bad(request: Any, context: Any) -> Any:  # noqa: ARG001
        if down:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        context.abort(CODE.INVALID_ARGUMENT, "image 0: corrupt: no image")

    url, _ = start(bad)
    other, _ = start(bad)
    with ImageClient([url, other], retry=ONCE) as client:
        with pytest.raises(ServerUnavailableError):
            client.classify(b"x")
        down = False
        time.sleep(FIRST_EJECTION_S * 2)  # the pause itself is what is waited for
        for _ in range(4):
            with pytest.raises(Exception, match="corrupt"):
                client.classify(b"x")
        assert not any(member.on_trial or member.ejected_until for member in client._balancer.members)


def test_look_ups_are_within_the_call_s_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> Any:
        time.sleep(4)  # the resolver's own time
        return []

    url, _ = start(answer)
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    dead = "triton.test:9"

    def late(seconds: float, call: Callable[[], Any]) -> bool:
        began = time.monotonic()
        with contextlib.suppress(Exception):  # how it fails is not what this is about
            call()
        return time.monotonic() - began > seconds + 0.5

    with ImageClient([dead, url]) as client:
        assert not late(0.3, lambda: client.ready(timeout=0.3))
        assert not late(0.6, lambda: client.classify(b"x", timeout=0.6))
    asynchronous = AsyncImageClient([dead, url])
    assert not late(0.6, lambda: asyncio.run(asynchronous.classify(b"x", timeout=0.6)))
    asyncio.run(asynchronous.close())


def test_certificates_are_looked_at_before_they_are_used(tmp_path: Path) -> None:
    garbage = tmp_path / "ca.pem"
    garbage.write_text("no certificate")
    for tls in (TLSConfig(ca=garbage), TLSConfig(certificate=garbage, key=garbage)):
        with pytest.raises(ValueError, match=r"TLSConfig: .*ca\.pem"):
            ImageClient(tls=tls)
    with pytest.raises(FileNotFoundError):
        ImageClient(tls=TLSConfig(ca=tmp_path / "nowhere.pem"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"retry": 5},
        {"observer": "x"},
        {"fallback": 5},
        {"tls": True},
        {"url": 5},
        {"url": b"x:1"},
        {"timeout": "3"},
        {"timeout": True},
        {"url": [5]},
    ],
)
@pytest.mark.parametrize("kind", [ImageClient, AsyncImageClient])
def test_arguments_of_the_wrong_kind(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments)) if arguments != {"url": [5]} else "address"):
        kind(**arguments)
