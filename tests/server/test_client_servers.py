"""The client with several real servers: one killed and brought back, one with a dead model, and none at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_vision_client import (
    AsyncImageClient,
    DeadlineExceededError,
    ImageClient,
    Observer,
    Prediction,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)

from tests.conftest import SAMPLES, wait_until
from triton_vision.server import TritonServer

LITE = "ensemble_lite"
NOWHERE = "127.0.0.1:9"
PHOTO = (SAMPLES / "coffee.jpg").read_bytes()


@pytest.fixture
def servers(repository: Path) -> Iterator[list[TritonServer]]:
    running = [TritonServer(repository).start() for _ in range(2)]
    yield running
    for server in running:
        server.stop()


class Told(Observer):
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.retries: list[str] = []
        self.ejections: list[str] = []

    def call(self, outcome: str, seconds: float) -> None:
        assert seconds > 0
        self.outcomes.append(outcome)

    def retry(self, error: VisionClientError) -> None:
        self.retries.append(type(error).__name__)

    def ejection(self, address: str) -> None:
        self.ejections.append(address)


class Load:
    """Calls from several threads until it is left; what failed, and how many there were by server."""

    def __init__(self, client: ImageClient, callers: int = 4) -> None:
        self.failures: list[VisionClientError] = []
        self.answers = 0
        self._client = client
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                assert self._client.classify(PHOTO, top_k=1).predictions[0].label == "espresso"
                self.answers += 1
            except VisionClientError as error:
                self.failures.append(error)

    def more(self, count: int) -> None:
        """Waits for that many further answers."""
        wanted = self.answers + count
        wait_until(lambda: self.answers >= wanted, 60)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def infers(server: TritonServer) -> int:
    """How many images the server's ensemble has answered."""
    with ImageClient(server.grpc_address) as client:
        from tritonclient.grpc import service_pb2

        stub = client._connection(client._balancer.members[0]).stub
        answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=LITE), timeout=10)
        return int(answer.model_stats[0].inference_count)


def test_a_killed_server_costs_no_call_and_gets_its_share_back(servers: list[TritonServer], repository: Path) -> None:
    told = Told()
    addresses = [server.grpc_address for server in servers]
    with ImageClient(addresses, model=LITE, observer=told) as client, Load(client) as load:
        load.more(30)
        assert min(infers(server) for server in servers) > 5  # both work
        os.kill(servers[1].pid, signal.SIGKILL)
        servers[1].stop()
        load.more(30)
        port = int(addresses[1].rsplit(":", 1)[1])
        servers[1] = TritonServer(repository, grpc_port=port).start()
        back = time.monotonic()
        before = infers(servers[1])
        wait_until(lambda: infers(servers[1]) > before, 5)
        assert time.monotonic() - back < 5
        load.more(30)
    assert load.failures == []
    assert addresses[1] in told.ejections
    assert "ServerUnavailableError" in told.retries
    assert set(told.outcomes) == {"ok"}


def test_a_server_whose_model_is_dead_costs_no_call(servers: list[TritonServer]) -> None:
    """Its readiness stays green, and it fails at once: the fewest calls under way are always there."""
    told = Told()
    addresses = [server.grpc_address for server in servers]
    with ImageClient(addresses, model=LITE, observer=told) as client, Load(client) as load:
        load.more(20)
        for stub in stubs(servers[0], "efficientnet_lite0"):
            os.kill(stub, signal.SIGKILL)
        load.more(60)
    assert load.failures == []
    assert addresses[0] in told.ejections
    # It is asked again, ever more rarely, not with every call.
    assert 0 < len(told.retries) < 30


def stubs(server: TritonServer, model: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if parent == server.pid and words[0].endswith("triton_python_backend_stub") and f"/{model}/" in words[1]:
            found.append(int(process.name))
    assert found
    return found


def test_many_go_on_while_a_server_dies(servers: list[TritonServer]) -> None:
    addresses = [server.grpc_address for server in servers]

    def images() -> Iterator[bytes]:
        for number in range(160):
            if number == 60:
                os.kill(servers[0].pid, signal.SIGKILL)
            yield PHOTO

    with ImageClient(addresses, model=LITE) as client:
        assert [result.predictions[0].label for result in client.classify_many(images(), top_k=1)] == ["espresso"] * 160


def test_the_asyncio_twin_balances_and_fails_over(servers: list[TritonServer]) -> None:
    addresses = [server.grpc_address for server in servers]

    async def work() -> list[str]:
        async with AsyncImageClient(addresses, model=LITE) as client:
            first = await asyncio.gather(*(client.classify(PHOTO, top_k=1) for _ in range(20)))
            assert min(infers(server) for server in servers) > 3
            os.kill(servers[1].pid, signal.SIGKILL)
            second = await asyncio.gather(*(client.classify(PHOTO, top_k=1) for _ in range(20)))
            return [result.predictions[0].label for result in (*first, *second)]

    assert asyncio.run(work()) == ["espresso"] * 40


def test_a_fallback_answers_for_servers_that_do_not() -> None:
    asked: list[object] = []

    def guess(image: object, error: VisionClientError) -> list[Prediction]:
        assert isinstance(error, ServerUnavailableError)
        asked.append(image)
        return [Prediction("unknown", -1, 0.0)]

    with ImageClient(NOWHERE, timeout=3, fallback=guess) as client:
        result = client.classify(b"one")
        assert result.degraded
        assert result.predictions == (Prediction("unknown", -1, 0.0),)
        many = list(client.classify_many([b"two", "/nowhere.jpg", b"three"]))
    assert [item.degraded for item in many] == [True, False, True]
    assert many[1].error is not None
    assert asked == [b"one", b"two", b"three"]

    async def later(image: object, error: VisionClientError) -> list[Prediction]:  # noqa: ARG001
        await asyncio.sleep(0)
        return [Prediction("unknown", -1, 0.0)]

    async def twin() -> None:
        async with AsyncImageClient(NOWHERE, timeout=3, fallback=later) as client:
            assert (await client.classify(b"one")).degraded
            assert [item.degraded async for item in client.classify_many([b"two"])] == [True]

    asyncio.run(twin())


def test_what_a_server_tells_about_itself(server: TritonServer) -> None:
    with ImageClient(server.grpc_address) as client:
        info = client.server_info()
        assert (info.name, info.version) == ("triton", "2.51.0")
        assert "system_shared_memory" in info.extensions
        models = {model.name: model for model in client.models()}
        assert models[LITE].ready
        assert models["preprocess"].version == "1"

    async def twin() -> None:
        async with AsyncImageClient(server.grpc_address) as client:
            assert await client.server_info() == info
            assert {model.name: model for model in await client.models()} == models

    asyncio.run(twin())


# -- threads, forks, event loops ------------------------------------------------------------------------------------


def test_a_client_made_and_used_before_a_fork_works_after_it(server: TritonServer) -> None:
    with ImageClient(server.grpc_address, model=LITE) as client:
        expected = client.classify(PHOTO).predictions
        for _ in range(3):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    same = client.classify(PHOTO).predictions == expected
                    many = len(list(client.classify_many([PHOTO] * 20)))
                    code = 0 if same and many == 20 else 2
                finally:
                    os._exit(code)
            os.close(write)
            os.close(read)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert client.classify(PHOTO).predictions == expected  # the parent's go on


def test_an_asyncio_client_in_threads_of_their_own_loops(server: TritonServer) -> None:
    labels: list[str] = []

    def run() -> None:
        client = AsyncImageClient(server.grpc_address, model=LITE)

        async def work() -> None:
            labels.append((await client.classify(PHOTO)).predictions[0].label)

        asyncio.run(work())
        asyncio.run(work())
        asyncio.run(client.close())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert labels == ["espresso"] * 8


def cancelled(server: TritonServer) -> int:
    """How many inferences the server has seen cancelled."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.split()[-1] for line in lines if "nv_inference_request_failure" in line and "CANCELED" in line]
    assert counts
    return sum(int(float(count)) for count in counts)


def test_a_server_that_would_not_survive_it_sees_no_call_cancelled(server: TritonServer) -> None:
    """Which is what crashes it, though rarely within seconds: so what is counted is what it sees."""
    before, pid, left = cancelled(server), server.pid, 0

    async def come_and_go(client: AsyncImageClient, seed: int) -> None:
        nonlocal left
        for turn in range(6):
            call = asyncio.ensure_future(client.classify(PHOTO))
            await asyncio.wait({call}, timeout=0.01 * ((seed + turn) % 8))
            left += not call.done()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            with contextlib.suppress(DeadlineExceededError, ServerOverloadedError):
                await client.classify(PHOTO, timeout=0.01)

    async def idle(client: AsyncImageClient) -> None:
        while client._in_air:
            await asyncio.sleep(0.02)

    async def work() -> None:
        async with AsyncImageClient(server.grpc_address, model=LITE) as client:
            assert (await client.classify(PHOTO)).error is None
            await asyncio.gather(*(come_and_go(client, seed) for seed in range(8)))
            await idle(client)
            stream = client.classify_many([PHOTO] * 100)
            await anext(stream)
            await stream.aclose()
            await idle(client)
            assert all(member.outstanding == 0 for member in client._balancer.members)
            call = asyncio.ensure_future(client.classify_many([PHOTO] * 16).__anext__())
            await asyncio.sleep(0.02)
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(work())
    with ImageClient(server.grpc_address, model=LITE) as client:
        stream = client.classify_many([PHOTO] * 100)
        next(stream)
        stream.close()
        wait_until(lambda: not client._in_air, 60)
    with ImageClient(server.grpc_address, model=LITE) as client:
        assert client.classify(PHOTO).predictions[0].label == "espresso"
    assert left > 10
    assert (cancelled(server), server.pid) == (before, pid)
