"""What proxies, networks and servers in trouble do, and what the client makes of it; servers scripted in process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from triton_vision_client import (
    AsyncImageClient,
    AuthenticationError,
    DeadlineExceededError,
    ImageClient,
    ModelNotFoundError,
    RequestTooLargeError,
    RetryPolicy,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    TLSConfig,
)
from triton_vision_client._balancer import FIRST_EJECTION_S, LONGEST_EJECTION_S
from triton_vision_client._connecting import lacks_descriptors
from triton_vision_client._translate import is_refusal, translate

from tests.unit.client.scripted import CODE, Start, abort, answer, unless, wait_until

ONCE = RetryPolicy(attempts=2, initial=0.01)


def typed(code: Any, details: str, *, tls: bool = False) -> Exception:
    return translate(code, details, model="m", address="host:1", timeout=30.0, connected=True, tls=tls)


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


def test_a_broken_model_is_the_cause_though_the_last_try_was_late(start: Start) -> None:
    asked: list[int] = []

    def dead(request: Any, context: Any) -> Any:
        asked.append(1)
        if len(asked) % 2:
            context.abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        release.wait(1)
        return answer(request, context)

    release = threading.Event()
    url, _ = start(dead)
    with ImageClient(url, timeout=0.5, retry=ONCE) as client, pytest.raises(ServerUnavailableError, match="broken"):
        client.classify(b"x")
    assert len(asked) == 2

    async def twin() -> None:
        async with AsyncImageClient(url, timeout=0.5, retry=ONCE) as client:
            await client.classify(b"x")

    with pytest.raises(ServerUnavailableError, match="broken"):
        asyncio.run(twin())
    release.set()


def outcomes(url: str, callers: int, *, concurrent: bool) -> set[str]:
    """What so many calls at once end with, each within its time and a little more."""
    seconds, ends = 1.2, []

    def end(result: Any) -> str:
        assert time.monotonic() - began < seconds + 1.5
        return type(result).__name__

    async def classify(client: AsyncImageClient) -> None:
        result = await asyncio.gather(client.classify(b"x"), return_exceptions=True)
        ends.append(end(result[0]))

    async def twin() -> None:
        async with AsyncImageClient(url, timeout=seconds, retry=ONCE) as client:
            await asyncio.gather(*(classify(client) for _ in range(callers)))

    began = time.monotonic()
    if concurrent:
        asyncio.run(twin())
    else:
        with ImageClient(url, timeout=seconds, retry=ONCE) as client, futures.ThreadPoolExecutor(callers) as threads:
            ends += [end(call.exception()) for call in [threads.submit(client.classify, b"x") for _ in range(callers)]]
    assert len(ends) == callers
    return set(ends)


@pytest.fixture
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not wait for calls that are never answered."""
    monkeypatch.setattr("triton_vision_client._client.LAST_CALLS_S", 0.0)


def silent(request: Any, context: Any) -> Any:  # noqa: ARG001
    wait_until(lambda: not context.is_active(), 20)


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("callers", [4, 16, 64])
def test_a_model_that_never_answers_and_is_not_ready_is_broken(start: Start, callers: int, concurrent: bool) -> None:
    url, servicer = start(silent)
    servicer.models = set()
    assert outcomes(url, callers, concurrent=concurrent) == {"ServerUnavailableError"}


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_what_one_caller_hears_of_a_dead_model_all_callers_know(start: Start, concurrent: bool) -> None:
    """As a real server has it, which calls the model ready all the same."""
    turn = itertools.count()

    def dead(request: Any, context: Any) -> Any:
        if next(turn) == 15:
            context.abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        return silent(request, context)

    url, _ = start(dead)
    assert outcomes(url, 16, concurrent=concurrent) == {"ServerUnavailableError"}


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_a_model_that_is_ready_is_late_and_not_broken(start: Start, concurrent: bool) -> None:
    url, _ = start(silent)
    assert outcomes(url, 4, concurrent=concurrent) == {"DeadlineExceededError"}


@pytest.mark.usefixtures("brief_end")
def test_a_model_that_answers_again_is_broken_no_more(start: Start) -> None:
    script: list[Any] = [abort(CODE.INTERNAL, "Stub process 'm_0_0' is not healthy."), answer, silent]
    url, _ = start(lambda request, context: script[0](request, context))
    with ImageClient(url, timeout=0.3, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(ServerUnavailableError, match="broken"):
            client.classify(b"x")
        del script[0]
        client.classify(b"x")
        del script[0]
        with pytest.raises(DeadlineExceededError):
            client.classify(b"x")


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("concurrent", [False, True], ids=["threads", "asyncio"])
def test_a_server_that_is_mute_holds_up_a_late_call_for_a_moment_only(start: Start, concurrent: bool) -> None:
    url, servicer = start(silent)
    servicer.ready = silent
    assert outcomes(url, 4, concurrent=concurrent) == {"DeadlineExceededError"}


# Runs in a process of its own, which gRPC would abort. Its first argument is how many descriptors stay free.
SCARCE = """
import asyncio, os, resource, sys, time
from triton_vision_client import AsyncImageClient, ImageClient, RetryPolicy, ServerUnavailableError

free, urls, held = int(sys.argv[1]), sys.argv[2:], []
once = RetryPolicy(attempts=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def fill():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(held.pop())

def release():
    while held:
        os.close(held.pop())

def refused(error):
    assert isinstance(error, ServerUnavailableError), error
    assert "too few file descriptors left" in str(error) and "ulimit -n" in str(error), error
"""
SYNCHRONOUS = """
clients = [ImageClient(url, timeout=2, retry=once) for url in (*urls, urls)]
fill()
for client in clients:
    for call in (lambda: client.classify(b"x"), client.server_info, lambda: list(client.classify_many([b"x"]))):
        try:
            call()
        except Exception as error:
            refused(error)
        else:
            raise AssertionError
time.sleep(0.3)  # until the servers are to be asked again whether they are well
for client in clients:
    assert not client.ready()
release()
for client in clients:
    assert client.classify(b"x").predictions[0].class_id == 1
    assert client.ready()
    client.close()
"""
ASYNCHRONOUS = """
async def main():
    clients = [AsyncImageClient(url, timeout=2, retry=once) for url in (*urls, urls)]
    fill()
    for client in clients:
        for call in (lambda: client.classify(b"x"), client.server_info, client.classify_many([b"x"]).__anext__):
            try:
                await call()
            except Exception as error:
                refused(error)
            else:
                raise AssertionError
    await asyncio.sleep(0.3)  # until the servers are to be asked again whether they are well
    for client in clients:
        assert not await client.ready()
    release()
    for client in clients:
        assert (await client.classify(b"x")).predictions[0].class_id == 1
        assert await client.ready()
        await client.close()

asyncio.run(main())
"""
# The channels are there already, but not connected.
LATER = """
before = ImageClient(urls[0], timeout=2)
before.classify(b"x")
clients = [ImageClient(url, timeout=2, retry=once) for url in urls]
for client in clients:
    client._connection(client._balancer.members[0])
fill()
for client in clients:
    try:
        client.classify(b"x")
    except Exception as error:
        refused(error)
    else:
        assert free
release()
for client in clients:
    until = time.monotonic() + 20
    while not client.ready():  # gRPC lets some time pass between its attempts to connect
        assert time.monotonic() < until
        time.sleep(0.05)
    client.classify(b"x")
"""


@pytest.mark.parametrize("free", [0, 3, 8, 15])
@pytest.mark.parametrize("use", [SYNCHRONOUS, ASYNCHRONOUS, LATER], ids=["sync", "async", "later"])
def test_a_process_without_descriptors_says_so(start: Start, use: str, free: int) -> None:
    url, _ = start(answer)
    urls = [url, f"localhost:{url.rpartition(':')[2]}"]
    subprocess.run([sys.executable, "-c", SCARCE + use, str(free), *urls], check=True, timeout=60)


def test_a_look_at_the_descriptors_takes_microseconds_and_none_of_them() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert min(timeit.repeat(lacks_descriptors, number=100, repeat=5)) / 100 < 0.001
    assert len(os.listdir("/proc/self/fd")) < before + 100  # gRPC has some of its own, which come and go


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
    assert "or wants TLS" in str(typed(CODE.UNAVAILABLE, closed))
    assert "client's certificate" in str(typed(CODE.UNAVAILABLE, closed, tls=True))
    other = "failed to connect: Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification"
    assert "check its certificate" in str(typed(CODE.UNAVAILABLE, other, tls=True))


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (abort(CODE.UNAVAILABLE, "Exceeds maximum queue size"), None, ServerOverloadedError),
        (
            abort(CODE.UNAVAILABLE, "Exceeds maximum queue size"),
            abort(CODE.UNAVAILABLE, "Request for unknown model: 'm' is not found"),
            ServerOverloadedError,
        ),
        (abort(CODE.NOT_FOUND, "Request for unknown model"), None, ServerUnavailableError),
        (abort(CODE.NOT_FOUND, "no such"), abort(CODE.NOT_FOUND, "no such"), ModelNotFoundError),
    ],
)
def test_of_several_servers_failures_the_one_that_says_most(start: Start, one: Any, other: Any, kind: Any) -> None:
    urls = [start(one)[0], start(other)[0] if other else "127.0.0.1:9"]
    for order in (urls, urls[::-1]):
        with ImageClient(order, retry=ONCE) as client, pytest.raises(kind) as raised:
            client.classify(b"x")
        assert type(raised.value) is kind
        assert all(url in str(raised.value) for url in urls)  # nobody's failure is kept back


def test_a_mute_server_costs_a_moment_and_no_call(start: Start) -> None:
    url, _ = start(answer)
    mute, servicer = start(answer)
    held = []

    def silent(request: Any, context: Any) -> Any:  # noqa: ARG001
        held.append(context)
        wait_until(lambda: not context.is_active(), 20)

    servicer.live = silent

    async def twin() -> int:
        async with AsyncImageClient([mute, url], timeout=3) as client:
            return sum([(await client.classify(b"x")).predictions[0].class_id for _ in range(4)])

    with ImageClient([mute, url], timeout=3) as client:
        assert [client.classify(b"x").predictions[0].class_id for _ in range(4)] == [1] * 4
    assert asyncio.run(twin()) == 4
    assert held


def test_a_server_known_to_be_mute_does_not_swallow_what_another_refuses_for_a_moment(start: Start) -> None:
    turn = itertools.count()

    def now_and_then_full(request: Any, context: Any) -> Any:
        if next(turn) % 4 == 3:
            context.abort(CODE.UNAVAILABLE, "Exceeds maximum queue size")
        return answer(request, context)

    url, _ = start(now_and_then_full)
    mute, servicer = start(silent)
    servicer.live = servicer.ready = silent
    with ImageClient([mute, url], timeout=12) as client:
        for number in range(12):
            began = time.monotonic()
            assert client.classify(b"x").predictions[0].class_id == 1
            assert number == 0 or time.monotonic() - began < 4


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


def test_servers_of_different_models_come_back(start: Start) -> None:
    ill = False

    def sometimes(request: Any, context: Any) -> Any:
        if ill:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        if request.model_name != "ensemble":
            context.abort(CODE.NOT_FOUND, "Request for unknown model")
        return answer(request, context)

    url, _ = start(answer)
    one, servicer = start(sometimes)
    servicer.models = {"ensemble"}
    with ImageClient([one, url]) as client:
        for model in ("ensemble", "other") * 4:
            client.classify(b"x", model=model)
        ill = True
        for _ in range(4):
            client.classify(b"x", model="other")
        ill = False
        before = len(servicer.requests)

        def back() -> bool:
            client.classify(b"x", model="ensemble")
            return len(servicer.requests) > before

        wait_until(back, 2 * LONGEST_EJECTION_S)


def test_a_server_comes_back_for_a_client_of_other_models(start: Start) -> None:
    ill = True

    url, _ = start(answer)
    other, servicer = start(unless(lambda: ill))
    servicer.models = {"mine"}
    with ImageClient([other, url]) as client:  # whose own model, "ensemble", nobody has
        for _ in range(4):
            client.classify(b"x", model="mine")
        ill = False
        before = len(servicer.requests)

        def back() -> bool:
            client.classify(b"x", model="mine")
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


def test_impatient_calls_eject_nobody(start: Start) -> None:
    def slow(request: Any, context: Any) -> Any:
        time.sleep(0.1)  # latency that this test makes
        return answer(request, context)

    urls = [start(slow)[0], start(slow)[0]]
    with ImageClient(urls) as client:
        for _ in range(10):
            with pytest.raises(Exception, match="were over"):
                client.classify(b"x", timeout=0.03)
        assert not client._balancer.any_ejected()


def test_restricted_health_does_not_close_what_is_open(start: Start) -> None:
    urls = []
    for _ in range(2):
        url, servicer = start(answer)
        servicer.live = abort(CODE.UNAVAILABLE, "This protocol is restricted")
        urls.append(url)
    with ImageClient(urls) as client:
        for _ in range(4):
            client.classify(b"x")
        with pytest.raises(AuthenticationError):
            raise typed(CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")


def test_an_answer_that_cannot_be_read_is_asked_for_elsewhere(start: Start) -> None:
    def empty(request: Any, context: Any) -> Any:
        response = answer(request, context)
        response.Clear()
        return response

    urls = [start(empty)[0], start(answer)[0]]
    with ImageClient(urls) as client:
        assert [client.classify(b"x").predictions[0].class_id for _ in range(6)] == [1] * 6

    async def twin() -> list[int]:
        async with AsyncImageClient(urls) as client:
            return [(await client.classify(b"x")).predictions[0].class_id for _ in range(6)]

    assert asyncio.run(twin()) == [1] * 6


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


def test_a_fallback_that_answers_something_else(start: Start) -> None:  # noqa: ARG001
    with ImageClient("127.0.0.1:9", timeout=1, fallback=lambda *_: "abc") as client:  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="list of Predictions") as raised:
            client.classify(b"x")
        assert isinstance(raised.value.__cause__, ServerUnavailableError)
