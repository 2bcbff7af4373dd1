"""The client at awkward moments, against servers scripted in process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
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
from triton_vision_client._names import LOOK_UP_AGAIN_S, LOOK_UP_EVERY_S, Names
from triton_vision_client._shm import left_over
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.unit.client.test_transport import CODE, Script, Scripted, abort, answer


class Ready(Scripted):
    """It says that it is live and ready, too, unless it wants a token for that, or has other models alone."""

    token = ""
    models: set[str] | None = None
    live: Script | None = None
    ready: Script | None = None

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's
        return self.live(request, context) if self.live else service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the protocol's
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's
        if self.token and dict(context.invocation_metadata()).get("token") != self.token:
            context.abort(CODE.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")
        if self.ready:
            return self.ready(request, context)
        return service_pb2.ModelReadyResponse(ready=self.models is None or request.name in self.models)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, Ready]]]:
    servers = []

    def one(script: Script, host: str = "127.0.0.1", garbled: Callable[[], bool] | None = None) -> tuple[str, Ready]:
        """A server; ``garbled`` says whether it answers questions about readiness with what is no message."""
        server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
        servicer = Ready(script)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        if garbled is not None:
            garble = grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff\xff\xff" if garbled() else b"\x08\x01")
            server.add_registered_method_handlers("inference.GRPCInferenceService", {"ModelReady": garble})
        port = server.add_insecure_port(f"{host}:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}", servicer

    yield one
    for server in servers:
        server.stop(0).wait()


Start = Callable[..., tuple[str, Ready]]


def several(monkeypatch: pytest.MonkeyPatch, delay: float = 0.0) -> None:
    """``triton.test`` stands for two servers."""
    real = socket.getaddrinfo

    def fake(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != "triton.test":
            return real(host, port, *arguments, **options)
        time.sleep(delay)  # the resolver's own time
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (1, 2)]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


def test_a_resolver_that_fails_changes_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    several(monkeypatch)
    url, _ = start(answer, "0.0.0.0")
    with ImageClient(url.replace("127.0.0.1", "triton.test")) as client:
        client.classify(b"x")
        before = list(client._balancer.members)

        def fails(*arguments: Any, **options: Any) -> Any:  # noqa: ARG001 - the resolver's
            raise OSError("no answer")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        looked_up(client)
        client.classify(b"x")
        assert client._balancer.members == before


def looked_up(client: ImageClient | AsyncImageClient) -> None:
    """Has the names looked up again, as after half a minute."""
    client._names._due = 0.0
    client._names.look_up()
    wait_until(lambda: not client._names._running)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_name_gains_and_loses_servers_without_any_failure(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["127.0.0.1"]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses],
    )
    url, _ = start(answer, "0.0.0.0")
    name = url.replace("127.0.0.1", "localhost")
    with ImageClient(name) as client:
        client.classify(b"x")
        assert [member.address for member in client._balancer.members] == [name]
        addresses[:] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        looked_up(client)
        for _ in range(6):
            client.classify(b"x")
        assert [member.address[:9] for member in client._balancer.members] == addresses
        assert len(client._connections) == 3  # that of the name itself has ended
        addresses.pop()
        looked_up(client)
        for _ in range(6):
            client.classify(b"x")
        assert [member.address[:9] for member in client._connections] == addresses


def test_names_are_looked_up_from_time_to_time_and_soon_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    now = 1000.0

    def resolver(*named: Any, **_: Any) -> list[Any]:
        asked.append(named)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    names = Names(["triton.test:8001", "127.0.0.1:8001"], lambda *_: None, clock=lambda: now)

    def looks() -> bool:
        before = len(asked)
        first = names.look_up()
        if first is not None:
            first[0].result(5)
        wait_until(lambda: not names._running)
        return len(asked) > before

    assert looks()
    assert asked == [("triton.test", 8001)]
    assert not looks()
    now += LOOK_UP_AGAIN_S
    assert not looks()
    names.suspect()
    assert looks()
    names.suspect()
    assert not looks()
    now += LOOK_UP_EVERY_S
    assert looks()


def test_two_observers_count_together() -> None:
    registry = prometheus_client.CollectorRegistry()
    for _ in range(2):
        PrometheusObserver(registry).call("ok", 0.1)
    assert registry.get_sample_value("triton_vision_client_seconds_count", {"outcome": "ok"}) == 2


def test_regions_of_other_containers_are_not_judged() -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    names = [f"triton_vision_client.{here}.999999999.1.0", f"triton_vision_client.{here + 1}.999999999.1.0", "other"]
    assert list(left_over(names)) == names[:1]


def test_first_calls_at_once_to_a_name_of_several_servers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    several(monkeypatch, delay=0.2)
    url, servicer = start(answer, "0.0.0.0")
    name = url.replace("127.0.0.1", "triton.test")
    with ImageClient(name) as client, futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda size: client.classify(b"x" * size).predictions[0].class_id, range(1, 40)))
        assert ids == list(range(1, 40))
        assert len(client._balancer.members) == 2

    async def twin() -> list[int]:
        async with AsyncImageClient(name) as client:
            results = await asyncio.gather(*(client.classify(b"x" * size) for size in range(1, 40)))
            return [result.predictions[0].class_id for result in results]

    assert asyncio.run(twin()) == list(range(1, 40))
    assert len(servicer.requests) == 78


def test_a_slow_resolver_does_not_outlast_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    several(monkeypatch, delay=3.0)
    began = time.monotonic()
    with ImageClient("triton.test:1", timeout=0.5) as client, pytest.raises(VisionClientError):
        client.classify(b"x")
    assert time.monotonic() - began < 2


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

    def hang(request: Any, context: Any) -> Any:
        release.wait(20)
        return answer(request, context)

    hung, slow = start(hang)
    good, _ = start(answer)
    late = 0
    with ImageClient([hung, good], timeout=0.3) as client:
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

    def once_bad(request: Any, context: Any) -> Any:
        if next(times) == 0:
            context.abort(CODE.UNAVAILABLE, "Socket closed")
        return answer(request, context)

    first, servicer = start(once_bad)
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


def hanging() -> tuple[Script, threading.Event]:
    release = threading.Event()

    def script(request: Any, context: Any) -> Any:
        release.wait(20)
        return answer(request, context)

    return script, release


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


def echo(request: Any, context: Any) -> Any:  # noqa: ARG001
    """The inputs as outputs of the same names."""
    response = service_pb2.ModelInferResponse(model_name=request.model_name)
    for given in request.inputs:
        response.outputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6).reshape(2, 3).astype(kind) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")),
        *(np.linspace(-1, 1, 6).reshape(3, 2).astype(kind) for kind in ("f2", "f4", "f8", ">f4", ">i4")),
        np.array([True, False]),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(5.0),
        np.zeros((0, 3), np.int32),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_tensors_of_every_kind_come_back_as_they_went(start: Start, array: Any) -> None:
    url, _ = start(echo)
    with ImageClient(url) as client:
        found = client.infer("m", {"T": array})["T"]
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


def test_bytes_and_text_are_sent_whole(start: Start) -> None:
    url, servicer = start(echo)
    given = [[b"end\0\0", "naïve"], [bytearray(b"\xff"), memoryview(b"")]]
    with ImageClient(url) as client:
        found = client.infer("m", {"T": np.array(given, np.object_)})["T"]
        assert found.tolist() == [[b"end\0\0", "naïve".encode()], [b"\xff", b""]]
        assert client.infer("m", {"T": [b"a\0", b"b"]})["T"].tolist() == [b"a\0", b"b"]
        with pytest.raises(TypeError, match="NoneType"):
            client.infer("m", {"T": np.array([None], np.object_)})
        servicer.script = lambda request, context: _cut(echo(request, context))
        with pytest.raises(ServerError, match="cannot be read"):
            client.infer("m", {"T": [b"whole"]})
        servicer.script = lambda request, context: _typed(echo(request, context))
        with pytest.raises(ServerError, match="with the contents of 0"):
            client.infer("m", {"T": [b"whole"]})


def _cut(response: Any) -> Any:
    response.raw_output_contents[0] = response.raw_output_contents[0][:-1]
    return response


def _typed(response: Any) -> Any:
    del response.raw_output_contents[:]
    return response


def test_an_answer_of_other_datatypes_is_none(start: Start) -> None:
    def other(request: Any, context: Any) -> Any:
        response = answer(request, context)
        for output in response.outputs:
            if output.name == "SCORES":
                output.datatype = "INT32"
        return response

    url, _ = start(other)
    with ImageClient(url) as client, pytest.raises(ServerError, match="as an image ensemble does"):
        client.classify(b"x")


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
        assert all(member.outstanding == 0 for member in client._balancer.members)
        assert client.classify(b"four").predictions[0].class_id == 4


def test_an_observer_s_mistake_costs_no_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def call(self, outcome: str, seconds: float) -> None:  # noqa: ARG002 - the interface's
            raise ZeroDivisionError

    url, _ = start(answer)
    with ImageClient(url, observer=Broken()) as client:
        assert client.classify(b"four").predictions[0].class_id == 4
    assert "the observer raised" in caplog.text
