"""The client at awkward moments, against servers scripted in process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from triton_vision_client import (
    AsyncImageClient,
    DeadlineExceededError,
    ImageClient,
    Observer,
    PrometheusObserver,
    RetryPolicy,
    ServerError,
    VisionClientError,
)
from triton_vision_client._shm import left_over

from tests.conftest import wait_until
from tests.unit.client.scripted import CODE, Start, abort, answer, hanging, unless


def test_two_observers_count_together() -> None:
    registry = prometheus_client.CollectorRegistry()
    for _ in range(2):
        PrometheusObserver(registry).call("ok", 0.1)
    assert registry.get_sample_value("triton_vision_client_seconds_count", {"outcome": "ok"}) == 2


def test_regions_of_other_containers_are_not_judged() -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    names = [f"triton_vision_client.{here}.999999999.1.0", f"triton_vision_client.{here + 1}.999999999.1.0", "other"]
    assert list(left_over(names)) == names[:1]


def test_a_server_that_fails_at_once_is_not_loved_for_it(start: Start) -> None:
    bad, failing = start(abort(CODE.INTERNAL, "something is broken"))
    good, _ = start(answer)
    with ImageClient([bad, good]) as client:
        for _ in range(60):
            assert client.classify(b"four").predictions[0].class_id == 4
        assert len(failing.requests) < 15
        assert all(member.outstanding == 0 for member in client._balancer.members)


def test_an_error_everywhere_is_an_error(start: Start) -> None:
    urls = [start(abort(CODE.INTERNAL, "something is broken"))[0] for _ in range(2)]
    with ImageClient(urls) as client:
        for _ in range(5):
            with pytest.raises(ServerError, match="something is broken"):
                client.classify(b"x")


def test_a_server_that_is_late_again_and_again_is_left_alone(start: Start) -> None:
    release = threading.Event()
    release.set()

    def hang(request: Any, context: Any) -> Any:
        release.wait(20)
        return answer(request, context)

    hung, slow = start(hang)
    good, other = start(answer)
    late = 0
    with ImageClient([hung, good], timeout=0.3) as client:
        while not (slow.requests and other.requests):  # connected to both
            client.classify(b"x", timeout=20)
        slow.requests.clear()
        release.clear()
        for _ in range(40):
            try:
                client.classify(b"x")
            except DeadlineExceededError:
                late += 1
    release.set()
    assert 1 <= late <= 8
    assert len(slow.requests) == late


def test_a_wrong_model_s_name_costs_nobody_a_server(start: Start) -> None:
    def only_e(request: Any, context: Any) -> Any:
        if request.model_name != "ensemble":
            context.abort(CODE.UNAVAILABLE, "Request for unknown model: 'typo' is not found")
        return answer(request, context)

    urls = [start(only_e)[0] for _ in range(2)]
    with ImageClient(urls) as client:
        for _ in range(5):
            with pytest.raises(VisionClientError):
                client.classify(b"x", model="typo")
        assert not any(member.ejected_until for member in client._balancer.members)


def test_a_server_comes_back_whose_readiness_wants_a_token_of_each_call(start: Start) -> None:
    times = itertools.count()

    first, servicer = start(unless(lambda: next(times) == 0))
    second, _ = start(answer)
    servicer.token = "secret"
    with ImageClient([first, second]) as client:
        deadline = time.monotonic() + 10
        while len(servicer.requests) < 4:
            client.classify(b"x", headers={"token": "secret"})
            assert time.monotonic() < deadline


def test_a_dead_server_and_one_that_is_ejected_but_well(start: Start) -> None:
    url, _ = start(answer)
    with ImageClient([url, "127.0.0.1:9"], retry=RetryPolicy(attempts=2)) as client:
        well = next(member for member in client._balancer.members if member.address == url)
        well.outstanding += 1
        client._balancer.failed(well)
        assert client.classify(b"four").predictions[0].class_id == 4


def test_readiness_is_not_used_up_by_a_silent_server(start: Start) -> None:
    url, _ = start(answer)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = [f"127.0.0.1:{silent.getsockname()[1]}", url]

        async def twin() -> bool:
            async with AsyncImageClient(urls) as client:
                return await client.ready(timeout=20)

        began = time.monotonic()
        with ImageClient(urls) as client:
            assert client.ready(timeout=20)
        assert asyncio.run(twin())
        assert time.monotonic() - began < 5
        with ImageClient(urls[0]) as client:
            assert not client.ready(timeout=0.2)


# -- many -----------------------------------------------------------------------------------------------------------


def test_what_the_iterable_raises_comes_behind_what_it_gave(start: Start) -> None:
    url, _ = start(answer)

    def images() -> Iterator[bytes]:
        for size in range(1, 30):
            yield b"x" * size
        raise KeyError("the list is damaged")

    with ImageClient(url) as client:
        results = client.classify_many(images())
        assert [next(results).predictions[0].class_id for _ in range(1, 30)] == list(range(1, 30))
        with pytest.raises(KeyError, match="damaged"):
            next(results)

    async def twin() -> None:
        async with AsyncImageClient(url) as client:
            results = client.classify_many(images())
            for size in range(1, 30):
                assert (await anext(results)).predictions[0].class_id == size
            await anext(results)

    with pytest.raises(KeyError, match="damaged"):
        asyncio.run(twin())


def test_a_low_limit_on_messages_costs_only_the_image_that_is_larger(start: Start) -> None:
    def limited(request: Any, context: Any) -> Any:
        if len(request.raw_input_contents[0]) > 4 << 20:
            context.abort(CODE.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4194304)")
        return answer(request, context)

    url, _ = start(limited)
    images = [b"x" * (1 << 20)] * 3 + [b"y" * (5 << 20)] + [b"z" * (1 << 20)] * 6
    with ImageClient(url) as client:
        results = list(client.classify_many(images))

    async def twin() -> list[Any]:
        async with AsyncImageClient(url) as client:
            return [result async for result in client.classify_many(images)]

    for found in (results, asyncio.run(twin())):
        assert [len(result.source) for result in found] == [len(image) for image in images]
        assert [result.error.reason if result.error else "" for result in found] == [""] * 3 + ["too_large"] + [""] * 6


@pytest.mark.parametrize("images", ["cat.jpg", b"cat", Path("cat.jpg")])
def test_one_image_where_many_are_wanted(images: Any) -> None:
    with ImageClient() as client, pytest.raises(TypeError, match="takes many images"):
        client.classify_many(images)


def test_a_slow_reader_of_results_outlives_a_blip(start: Start) -> None:
    counter = itertools.count()

    def blip(request: Any, context: Any) -> Any:
        if next(counter) == 2:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        return answer(request, context)

    url, _ = start(blip)
    with ImageClient(url, timeout=0.4) as client:
        seen = 0
        for _ in client.classify_many([b"x" * size for size in range(1, 81)]):
            seen += 1
            if seen == 1:
                time.sleep(0.8)  # longer than a request's timeout
    assert seen == 80


def test_a_slow_generator_does_not_hold_up_the_loop(start: Start) -> None:
    url, _ = start(answer)
    ticks = 0

    def slow() -> Iterator[bytes]:
        for size in range(1, 40):
            time.sleep(0.02)  # a slow disk
            yield b"x" * size

    async def work() -> list[int]:
        nonlocal ticks

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        async with AsyncImageClient(url, timeout=0.3) as client:
            ids = [result.predictions[0].class_id async for result in client.classify_many(slow())]
        ticking.cancel()
        return ids

    assert asyncio.run(work()) == list(range(1, 40))
    assert ticks > 20


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ImageClient() as client:
        with pytest.raises(OSError, match="may never end"):
            client.classify(tmp_path / "pipe")
        (result,) = client.classify_many([tmp_path / "pipe"])
    assert result.error is not None
    assert result.error.reason == "unreadable"


def test_a_file_object_may_raise_anything() -> None:
    class Broken:
        def read(self) -> bytes:
            raise RuntimeError("the archive is damaged")

    with ImageClient() as client:
        (result,) = client.classify_many([Broken()])
    assert "the archive is damaged" in str(result.error)


# -- ends -----------------------------------------------------------------------------------------------------------


def test_closing_while_a_call_is_under_way(start: Start) -> None:
    script, release = hanging()
    url, servicer = start(script)
    client = ImageClient(url, retry=RetryPolicy(attempts=1))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            client.classify(b"x")
        except (VisionClientError, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not servicer.requests:
        time.sleep(0.01)
    client.close()
    thread.join(10)
    release.set()
    assert not thread.is_alive()
    assert len(raised) == 1


def test_closing_the_asyncio_twin_while_a_call_is_under_way(start: Start) -> None:
    script, release = hanging()
    url, servicer = start(script)

    async def work() -> BaseException | None:
        client = AsyncImageClient(url, retry=RetryPolicy(attempts=1))
        call = asyncio.ensure_future(client.classify(b"x"))
        while not servicer.requests:
            await asyncio.sleep(0.01)
        await client.close()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        return error if isinstance(error, BaseException) else None

    error = asyncio.run(work())
    release.set()
    assert isinstance(error, ValueError)
    assert "closed" in str(error)


def test_one_event_loop_after_another_leaves_nothing_open(start: Start) -> None:
    url, _ = start(answer)
    client = AsyncImageClient(url)

    async def work() -> None:
        await client.classify(b"x")

    asyncio.run(work())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        asyncio.run(work())
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    asyncio.run(client.close())


# -- tensors --------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_no_policy() -> None:
    for wrong in ({"attempts": 0}, {"initial": float("nan")}, {"reserve": -1}):
        with pytest.raises(ValueError, match="at least"):
            RetryPolicy(**wrong)
    assert RetryPolicy(attempts=5000).pause(4999) <= 2.0


def test_an_unfinished_stream_may_be_collected_at_any_moment(start: Start) -> None:
    """Also while the same thread is inside the client: its locks may be taken again."""
    url, _ = start(answer)
    with ImageClient(url) as client:

        def unfinished() -> None:
            results = client.classify_many([b"x"] * 60)
            next(results)
            cycle: list[Any] = [results]
            cycle.append(cycle)

        for _ in range(5):
            unfinished()
            with client._balancer._lock, client._budget._lock:
                gc.collect()
        wait_until(lambda: all(member.outstanding == 0 for member in client._balancer.members))
        assert client.classify(b"four").predictions[0].class_id == 4


def test_an_observer_s_mistake_costs_no_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def call(self, outcome: str, seconds: float) -> None:  # noqa: ARG002 - the interface's
            raise ZeroDivisionError

    url, _ = start(answer)
    with ImageClient(url, observer=Broken()) as client:
        assert client.classify(b"four").predictions[0].class_id == 4
    assert "the observer raised" in caplog.text
