"""Callers who stop waiting: an old server is left to answer, a newer one hears that it need not."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from triton_vision_client import (
    AsyncImageClient,
    DeadlineExceededError,
    ImageClient,
    RetryPolicy,
    ServerOverloadedError,
)
from triton_vision_client._cancelling import survives_cancelling
from tritonclient.grpc import service_pb2

from tests.conftest import wait_until
from tests.unit.client.scripted import CODE, Start, answer


class Watched:
    """A script that answers one-byte images when told to, all others at once; and sees which calls are cancelled."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = self.ended = self.cancelled = 0

    def __call__(self, request: Any, context: Any) -> Any:
        if len(request.raw_input_contents[0]) != 5:
            return answer(request, context)
        gone = threading.Event()
        context.add_callback(gone.set)
        self.begun += 1
        while not self.release.wait(0.01) and not gone.is_set():
            pass
        self.cancelled += gone.is_set()
        self.ended += 1
        return answer(request, context)


OLD, NEW = "2.51.0", "2.59.0"
Leave = Callable[[AsyncImageClient, Callable[[], Awaitable[None]]], Awaitable[None]]


@pytest.mark.parametrize(
    ("name", "version", "survives"),
    [
        ("triton", "2.51.0", False),  # 24.10
        ("triton", "2.58.1", False),
        ("triton", "2.59.0", True),  # 25.06
        ("triton", "2.73.0", True),
        ("triton", "3.0", True),
        ("triton", "2.59.0dev", False),
        ("triton", "", False),
        ("OpenVINO Model Server", "2026.1", False),
    ],
)
def test_which_servers_are_known_to_survive(name: str, version: str, survives: bool) -> None:
    metadata = service_pb2.ServerMetadataResponse(name=name, version=version)
    assert survives_cancelling(metadata) is survives
    assert not survives_cancelling(None)


async def cancel(client: AsyncImageClient, under_way: Callable[[], Awaitable[None]]) -> None:
    call = asyncio.ensure_future(client.classify(b"x"))
    await under_way()
    began = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - began < 5


async def time_out(client: AsyncImageClient, under_way: Callable[[], Awaitable[None]]) -> None:  # noqa: ARG001
    with pytest.raises(DeadlineExceededError, match=r"within|before the call's 0\.3 s"):
        await client.classify(b"x", timeout=0.3)


async def leave_a_stream(client: AsyncImageClient, under_way: Callable[[], Awaitable[None]]) -> None:
    stream = client.classify_many([b"ab"] * 16 + [b"x"])
    assert (await anext(stream)).error is None
    await under_way()
    await stream.aclose()


@pytest.mark.parametrize("leave", [cancel, time_out, leave_a_stream])
@pytest.mark.parametrize("version", [OLD, NEW])
def test_the_asyncio_twin_passes_on_that_nobody_waits_where_that_is_safe(
    start: Start, version: str, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    script = Watched()
    url, servicer = start(script)
    servicer.version = version

    async def under_way() -> None:
        while not script.begun:
            await asyncio.sleep(0.01)

    async def work() -> None:
        async with AsyncImageClient(url) as client:
            await known(client)
            await leave(client, under_way)
            member = client._balancer.members[0]
            if version == NEW:
                while not script.ended:
                    await asyncio.sleep(0.01)
            else:
                assert member.outstanding == 1  # it still counts as under way
            script.release.set()
            while client._in_air or member.outstanding:
                await asyncio.sleep(0.01)
            assert (await client.classify(b"four")).predictions[0].class_id == 4

    asyncio.run(work())
    gc.collect()
    assert script.cancelled == (version == NEW)
    assert "never retrieved" not in caplog.text


async def known(client: AsyncImageClient) -> None:
    """Until the client knows the server's version."""
    assert (await client.classify(b"ab")).error is None
    while client._tasks:
        await asyncio.sleep(0.01)


def test_an_error_that_nobody_waits_for_is_never_heard_of(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    script = Watched()

    def fails(request: Any, context: Any) -> Any:
        script(request, context)
        context.abort(CODE.INTERNAL, "too late")

    url, _ = start(fails)

    async def work() -> None:
        async with AsyncImageClient(url) as client:
            call = asyncio.ensure_future(client.classify(b"x"))
            while not script.begun:
                await asyncio.sleep(0.01)
            call.cancel()
            script.release.set()
            while client._in_air:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING, logger="asyncio"):
        asyncio.run(work())
        gc.collect()
    assert script.cancelled == 0
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_what_is_known_of_a_server_is_forgotten_when_it_fails(start: Start) -> None:
    url, servicer = start(answer)
    servicer.version = NEW
    with ImageClient(url) as client:
        member = client._balancer.members[0]
        assert not member.cancels
        client.classify(b"x")
        wait_until(lambda: member.cancels)
        client.classify(b"x")
        client._balancer.pick()
        client._balancer.failed(member)
        assert not member.cancels
        client.classify(b"x")
        wait_until(lambda: member.cancels)


def in_thread(client: ImageClient, ended: list[Any]) -> threading.Thread:
    def call() -> None:
        try:
            ended.append(client.classify(b"x", timeout=20))
        except BaseException as error:  # noqa: BLE001
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize("version", [OLD, NEW])
def test_closing_cancels_only_where_that_is_safe(start: Start, version: str) -> None:
    script = Watched()
    url, servicer = start(script)
    servicer.version = version
    client = ImageClient(url)
    client.classify(b"ab")
    member = client._balancer.members[0]
    wait_until(lambda: member.version_due > time.monotonic() + 100)
    ended: list[Any] = []
    thread = in_thread(client, ended)
    wait_until(lambda: script.begun == 1)
    stream = client.classify_many([b"ab"] * 16 + [b"x"])
    next(stream)
    wait_until(lambda: script.begun == 2)
    stream.close()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10
    if version == OLD:
        assert script.cancelled == script.ended == 0
        script.release.set()
    thread.join(10)
    assert not thread.is_alive()
    wait_until(lambda: script.ended == 2)
    assert script.cancelled == (2 if version == NEW else 0)
    assert isinstance(ended[0], ValueError) == (version == NEW)
    script.release.set()


def test_ctrl_c_leaves_the_server_to_answer(start: Start) -> None:
    script = Watched()
    url, _ = start(script)
    program = f"""
from triton_vision_client import ImageClient

with ImageClient({url!r}) as client:
    client.classify(b"x")
"""
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    wait_until(lambda: script.begun == 1, 20)
    threading.Timer(0.3, child.send_signal, [signal.SIGINT]).start()
    threading.Timer(1.0, script.release.set).start()
    _, errors = child.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert (script.ended, script.cancelled) == (1, 0)


@pytest.mark.parametrize("timeout", [0.3, 1.5])
def test_a_late_call_of_the_main_thread_is_left_to_the_server(start: Start, timeout: float) -> None:
    script = Watched()
    url, _ = start(script)
    with ImageClient(url) as client:
        client.classify(b"ab")
        with pytest.raises(DeadlineExceededError):
            client.classify(b"x", timeout=timeout)
        member = client._balancer.members[0]
        assert member.outstanding == 1
        script.release.set()
        wait_until(lambda: member.outstanding == 0)
    assert script.cancelled == 0


def test_the_asyncio_twin_is_closed_while_an_old_server_works(start: Start) -> None:
    script = Watched()
    url, _ = start(script)

    async def work() -> None:
        client = AsyncImageClient(url)
        call = asyncio.ensure_future(client.classify(b"x"))
        while not script.begun:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(ValueError, match="closed"):
            await call
        assert script.ended == 0
        script.release.set()
        while not script.ended:
            await asyncio.sleep(0.01)

    asyncio.run(work())
    assert script.cancelled == 0


def test_a_connection_that_is_not_there_is_not_waited_for(start: Start) -> None:  # noqa: ARG001
    async def work() -> float:
        async with AsyncImageClient("127.0.0.1:9") as client:
            call = asyncio.ensure_future(client.classify(b"x"))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            began = time.monotonic()
        return time.monotonic() - began

    assert asyncio.run(work()) < 1.5


def test_a_server_is_not_left_more_than_it_can_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_vision_client._client.MOST_LEFT", 2)
    script = Watched()
    url, _ = start(script)

    async def work() -> None:
        async with AsyncImageClient(url, retry=RetryPolicy(attempts=1)) as client:
            for _ in range(2):
                with pytest.raises(DeadlineExceededError):
                    await client.classify(b"x", timeout=0.1)
            with pytest.raises(ServerOverloadedError, match="nobody waits"):
                await client.classify(b"four")
            script.release.set()
            while client._balancer.members[0].left:
                await asyncio.sleep(0.01)
            assert (await client.classify(b"four")).predictions[0].class_id == 4

    asyncio.run(work())
    monkeypatch.setattr("triton_vision_client._client.MOST_LEFT", 0)
    with ImageClient(url, retry=RetryPolicy(attempts=1)) as client, pytest.raises(ServerOverloadedError):
        client.classify(b"four")


class Alarm(Exception):
    """As a signal's handler raises it."""


class Lost:
    """A stub's method, and the call that gRPC has lost: it never ends, or much too late."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def future(self, *_: Any, **__: Any) -> Lost:
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def done(self) -> bool:
        return False

    def result(self, _: float) -> None:
        raise Alarm


def test_a_call_that_grpc_has_lost_is_not_left_to_the_server_for_good(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_vision_client._flight.LATE_S", -1.0)  # GRACE_S makes up for it
    url, _ = start(answer)
    with ImageClient(url) as client:
        client.classify(b"ab")
        (member,) = client._balancer.members
        struck, lost = client._connections[member], Lost()
        monkeypatch.setattr(struck.stub, "ModelInfer", lost)
        with pytest.raises(Alarm):
            client.classify(b"x", timeout=0.3)
        client.models()
        assert (member.left, member.outstanding, len(client._in_air)) == (1, 1, 1)

        def is_given_up() -> bool:
            client.models()
            return (member.left, member.outstanding, len(client._in_air)) == (0, 0, 0)

        wait_until(is_given_up)
        assert client._connections[member] is not struck
        for callback in lost.callbacks:
            callback(lost)
        assert client.classify(b"four").predictions[0].class_id == 4
        assert (member.left, member.outstanding, len(client._in_air)) == (0, 0, 0)
