"""Calls and clients that end in unusual ways, against servers scripted in process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton_vision_client import AsyncImageClient, BadImageError, ImageClient, Observer, Result, VisionClientError
from triton_vision_client._balancer import Member
from triton_vision_client._calls import Call
from triton_vision_client._forks import _open
from triton_vision_client._regions import Regions

from tests.conftest import wait_until
from tests.unit.client.scripted import Start, answer, hanging, unless


class Heard(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def call(self, outcome: str, seconds: float) -> None:
        self.calls.append((outcome, seconds))


def forked(work: Any) -> int:
    """Does something in a forked child; returns its exit status, at the latest after 20 s."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_stream_is_not_gone_on_with_in_a_forked_child(start: Start) -> None:
    url, _ = start(answer)
    with ImageClient(url) as client:
        stream = client.classify_many(b"x" * size for size in range(1, 200))
        next(stream)

        def child() -> None:
            with pytest.raises(RuntimeError, match="fork"):
                list(stream)

        assert forked(child) == 0
        assert len(list(stream)) == 198  # the parent's goes on


def test_an_asyncio_client_left_open_says_that_it_does_not_survive_a_fork(start: Start) -> None:
    url, _ = start(answer)
    program = f"""
import asyncio, os
from triton_vision_client import AsyncImageClient, ImageClient

async def call(client, close):
    await client.classify(b"x")
    if close:
        await client.close()

async def again():
    async with AsyncImageClient({url!r}) as client:
        await client.classify(b"x")

def child(close):
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        asyncio.run(again())
    except RuntimeError as error:
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(0)

first, second = AsyncImageClient({url!r}), AsyncImageClient({url!r})
asyncio.run(call(first, close=False))
asyncio.run(call(first, close=True))  # in another loop, and it ends what the first one has left
assert child(True) == 0
asyncio.run(call(second, close=False))
assert child(False) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_asyncio_client_is_closed_in_another_loop_than_it_was_used_in(start: Start) -> None:
    url, servicer = start(answer)
    client = AsyncImageClient(url)
    asyncio.run(client.classify(b"x"))
    asyncio.run(client.close())
    with pytest.raises(ValueError, match="closed"):
        asyncio.run(client.classify(b"x"))
    assert len(servicer.requests) == 1
    assert not client._connections


def test_who_is_cancelled_before_the_end_hears_of_that(start: Start) -> None:
    script, release = hanging()
    url, _ = start(script)

    async def work() -> None:
        client = AsyncImageClient(url)
        cancelled, waiting = (asyncio.ensure_future(client.classify(b"x")) for _ in range(2))
        ready = asyncio.ensure_future(client.ready())
        await asyncio.sleep(0.2)  # until they are under way, or not: either is fine
        cancelled.cancel()
        await client.close()
        done = await asyncio.gather(cancelled, waiting, ready, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert isinstance(done[1], ValueError)
        assert isinstance(done[2], bool)

    asyncio.run(work())
    release.set()


def test_an_end_that_is_cancelled_is_an_end(start: Start) -> None:
    url, _ = start(answer)

    async def work() -> None:
        client = AsyncImageClient(url)
        await client.classify(b"x")
        ending = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await client.close()
        assert not client._connections

    asyncio.run(work())
    assert not _open


def test_a_source_that_blocks_does_not_keep_the_program_from_ending(start: Start) -> None:
    url, _ = start(answer)
    program = f"""
import asyncio, os, signal, threading
from triton_vision_client import AsyncImageClient

def source():
    yield b"x"
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Event().wait()

async def main():
    async with AsyncImageClient({url!r}) as client:
        async for result in client.classify_many(source()):
            print(result)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=20, capture_output=True, check=False)
    assert b"KeyboardInterrupt" in ended.stderr


def test_an_error_that_is_kept_does_not_keep_the_connection(start: Start) -> None:
    script, release = hanging()
    url, _ = start(script)
    kept = []

    async def work() -> None:
        async with AsyncImageClient(url) as client:
            try:
                await client.classify(b"x", timeout=0.1)
            except VisionClientError as error:
                kept.append(error)

    asyncio.run(work())
    release.set()
    assert len(kept) == 1
    assert not _open
    assert "_poll_wrapper" not in " ".join(thread.name for thread in threading.enumerate())


def test_a_call_that_a_closed_event_loop_has_left_pending_costs_the_next_loop_nothing(start: Start) -> None:
    script, release = hanging()

    def first_hangs(request: Any, context: Any) -> Any:
        return (script if len(request.raw_input_contents[0]) == 5 else answer)(request, context)

    url, servicer = start(first_hangs)
    client = AsyncImageClient(url)
    loop = asyncio.new_event_loop()
    pending = loop.create_task(client.classify(b"x"))
    while not servicer.requests:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert asyncio.run(client.classify(b"xx")).predictions[0].class_id == 2
    asyncio.run(client.close())
    release.set()
    assert not client._connections
    pending._log_destroy_pending = False  # type: ignore[attr-defined]  # it is never done, as it should be here


def test_a_region_is_registered_while_another_call_hears_that_all_are_forgotten() -> None:
    regions, server = Regions(), Member("host:1")
    call = Call("ModelInfer", lambda *_: None, lambda _: None, "m", 1.0, ())
    call.images = [b"x"]
    regions.place(call)
    region = regions.unknown_to(call, server)
    assert region is not None
    regions.tells(server, region.name, ())
    regions.forget(server)
    regions.heard(region, server, (("token", "t"),), None)
    assert regions.unknown_to(call, server) is None
    assert [(left.name, left.metadata) for left in regions.end()] == [(region.name, (("token", "t"),))]


def test_probes_that_never_begin_are_made_again(start: Start) -> None:
    ill = True

    url, _ = start(answer)
    other, servicer = start(unless(lambda: ill))

    async def work() -> None:
        nonlocal ill
        async with AsyncImageClient([other, url]) as client:
            for _ in range(4):
                await client.classify(b"x")
            ill = False
            member = next(one for one in client._balancer.members if one.ejected_until)
            while not member.probing_until:
                await client._look_up(1.0)
            for task in list(client._tasks):  # as a framework does that cleans up
                task.cancel()
            before, deadline = len(servicer.requests), time.monotonic() + 10
            while len(servicer.requests) == before:
                assert time.monotonic() < deadline
                await client.classify(b"x")

    asyncio.run(work())


def test_what_strikes_while_a_call_is_sent_spoils_no_later_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = start(answer)
    client = ImageClient(url)
    client.classify(b"x")
    (struck,) = client._connections.values()
    whole = struck.stub.ModelInfer.future

    def interrupted(*arguments: Any, **options: Any) -> Any:
        whole(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(struck.stub.ModelInfer, "future", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(client.classify_many([b"x"]))
    assert [result.predictions[0].class_id for result in client.classify_many([b"xx"])] == [2]
    assert struck not in client._connections.values()

    # gRPC can wait without end for a call that it has lost.
    stuck = threading.Event()
    monkeypatch.setattr(struck.channel, "close", stuck.wait)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 4
    stuck.set()


def test_the_observer_hears_of_what_was_cancelled(start: Start) -> None:
    script, release = hanging()
    url, _ = start(script)
    heard = Heard()

    async def impatient() -> None:
        async with AsyncImageClient(url, observer=heard) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.classify(b"x"), 0.2)

    asyncio.run(impatient())
    assert [outcome for outcome, _ in heard.calls] == ["cancelled"]
    release.set()


def test_the_observer_hears_of_what_was_answered_though_nobody_came_for_it(start: Start) -> None:
    script, release = hanging()

    def first_two(request: Any, context: Any) -> Any:
        (first_length,) = struct.unpack_from("<I", request.raw_input_contents[0])
        return answer(request, context) if first_length <= 17 else script(request, context)

    url, servicer = start(first_two)
    heard = Heard()
    with ImageClient(url, observer=heard) as client:
        stream = client.classify_many([b"x" * size for size in range(1, 61)])
        next(stream)
        wait_until(lambda: len(servicer.requests) == 4 and len(client._in_air) == 2)
        stream.close()
    release.set()
    assert [outcome for outcome, _ in heard.calls] == ["ok", "ok", "cancelled", "cancelled"]


def test_the_time_of_a_call_is_the_server_s_and_not_its_reader_s(start: Start) -> None:
    url, servicer = start(answer)
    heard = Heard()
    with ImageClient(url, observer=heard) as client:
        stream = client.classify_many([b"x"] * 64)
        next(stream)
        wait_until(lambda: len(servicer.requests) == 4)
        time.sleep(0.5)  # a slow reader
        list(stream)
    assert max(seconds for _, seconds in heard.calls) < 0.4


def test_the_observer_hears_what_the_caller_gets(start: Start) -> None:
    def cut(request: Any, context: Any) -> Any:
        response = answer(request, context)
        response.raw_output_contents.pop()
        return response

    url, _ = start(cut)
    heard = Heard()
    with ImageClient(url, observer=heard) as client, pytest.raises(Exception, match="image ensemble"):
        client.classify(b"x")
    assert [outcome for outcome, _ in heard.calls] == ["ServerError"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_failed_call_lets_go_of_everything(start: Start) -> None:
    good, _ = start(answer)
    watched = []

    def photo() -> NDArray[np.uint8]:
        watched.append(weakref.ref(one := np.zeros((1, 1, 3), np.uint8)))
        return one

    def fails(client: ImageClient) -> None:
        with contextlib.suppress(VisionClientError):
            client.classify(photo())
        with contextlib.suppress(VisionClientError):
            list(client.classify_many([photo()]))

    async def twin(client: AsyncImageClient) -> None:
        async with client:
            with contextlib.suppress(VisionClientError):
                await client.classify(photo())
            with contextlib.suppress(VisionClientError):
                _ = [result async for result in client.classify_many([photo()])]

    for urls in (["127.0.0.1:9"], [good, "127.0.0.1:9"]):
        with ImageClient(urls, timeout=0.5) as client:
            fails(client)
        asyncio.run(twin(AsyncImageClient(urls, timeout=0.5)))
    assert [ref() is None for ref in watched] == [True] * 8
    # gRPC's asyncio side ends with its last channel, and a fork is safe again.
    assert not _open
    assert "_poll_wrapper" not in " ".join(thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("spoil", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", [ImageClient, AsyncImageClient])
def test_a_client_is_neither_copied_nor_pickled(kind: Any, spoil: Any) -> None:
    with pytest.raises(TypeError, match="client cannot be"):
        spoil(kind())


def test_results_are_compared_pickled_and_printed() -> None:
    refused = Result(b"x" * 10_000_000, error=BadImageError("truncated", "the file ends early", 3))
    assert pickle.loads(pickle.dumps(refused)) == refused
    assert hash(pickle.loads(pickle.dumps(refused))) == hash(refused)
    assert refused != Result(b"", error=BadImageError("corrupt", "the file ends early", 3))
    assert len(repr(refused)) < 300
    assert "cat.jpg" in repr(Result("cat.jpg"))


def test_a_device_is_no_image() -> None:
    with ImageClient() as client:
        with pytest.raises(OSError, match="read it and pass the bytes"):
            client.classify("/dev/zero")
        (result,) = client.classify_many(["/dev/zero"])
        assert result.error is not None
        assert result.error.reason == "unreadable"
