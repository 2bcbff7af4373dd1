"""Addresses that are names, against resolvers and servers scripted in process."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent import futures
from typing import Any

import pytest
from triton_vision_client import (
    AsyncImageClient,
    ImageClient,
    VisionClientError,
)
from triton_vision_client._names import LOOK_UP_AGAIN_S, LOOK_UP_EVERY_S, Names

from tests.conftest import wait_until
from tests.unit.client.scripted import Start, answer


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
