"""The client through a network that misbehaves: a proxy that delays, resets, half-closes, garbles and swallows."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from triton_vision_client import (
    AsyncImageClient,
    DeadlineExceededError,
    ImageClient,
    RetryPolicy,
    ServerUnavailableError,
    VisionClientError,
)

from tests.conftest import SAMPLES, wait_until
from triton_vision.server import TritonServer

LITE = "ensemble_lite"
PHOTO = (SAMPLES / "coffee.jpg").read_bytes()
FAST = RetryPolicy(attempts=3, initial=0.01, maximum=0.05)


class Proxy:
    """Passes connections on to a server, and does to them what it is told to.

    ``fault`` is called with each piece that comes from the client, before it is passed on; what it returns is passed
    on, None swallows it.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.fault: Callable[[bytes], bytes | None] = lambda piece: piece
        self.back: Callable[[bytes], bytes | None] = lambda piece: piece
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.accepted = 0
        self._run(self._accept)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                server = socket.create_connection(self._target)
                self._open += [client, server]
                self._run(self._pass, client, server, lambda piece: self.fault(piece))
                self._run(self._pass, server, client, lambda piece: self.back(piece))

    def _pass(self, source: socket.socket, sink: socket.socket, fault: Callable[[bytes], bytes | None]) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                changed = fault(piece)
                if changed is not None:
                    sink.sendall(changed)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Breaks every connection off with RST."""
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RD)  # wakes whoever reads from it
            connection.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture
def proxy(server: TritonServer) -> Iterator[Proxy]:
    one = Proxy(server.grpc_address)
    yield one
    one.close()


def swallow(piece: bytes) -> None:
    del piece


def label(client: ImageClient, **options: float) -> str:
    return client.classify(PHOTO, top_k=1, **options).predictions[0].label  # type: ignore[arg-type]


def test_resets_between_and_in_the_middle_of_calls(proxy: Proxy) -> None:
    with ImageClient(proxy.address, model=LITE, retry=FAST) as client:
        assert label(client) == "espresso"
        proxy.reset()
        assert label(client) == "espresso"
        once = [True]

        def break_off(piece: bytes) -> bytes | None:
            if len(piece) > 1000 and once:
                once.clear()
                threading.Thread(target=proxy.reset).start()
                return None
            return piece

        proxy.fault = break_off
        assert label(client) == "espresso"
        assert not once
    assert proxy.accepted >= 3


def test_latency_is_time_and_nothing_else(proxy: Proxy) -> None:
    def slow(piece: bytes) -> bytes:
        time.sleep(0.05)  # the latency that is tested
        return piece

    proxy.fault = proxy.back = slow
    with ImageClient(proxy.address, model=LITE) as client:
        assert label(client) == "espresso"
        with pytest.raises((DeadlineExceededError, ServerUnavailableError)):
            label(client, timeout=0.03)
        assert label(client) == "espresso"


@pytest.mark.parametrize("direction", ["fault", "back"])
def test_a_black_hole_ends_with_the_call_s_own_timeout(proxy: Proxy, direction: str) -> None:
    with ImageClient(proxy.address, model=LITE, retry=RetryPolicy(attempts=1)) as client:
        assert label(client) == "espresso"
        setattr(proxy, direction, swallow)
        began = time.monotonic()
        with pytest.raises(VisionClientError) as caught:
            label(client, timeout=1.0)
        assert time.monotonic() - began < 2
        assert isinstance(caught.value, (DeadlineExceededError, ServerUnavailableError))
        setattr(proxy, direction, lambda piece: piece)
        proxy.reset()
    with ImageClient(proxy.address, model=LITE, retry=FAST) as client:
        assert label(client, timeout=10.0) == "espresso"


def test_a_black_hole_among_several_is_left_within_the_call(proxy: Proxy, server: TritonServer) -> None:
    """Keepalive finds the connection dead, and the call goes to the other server, in its own time."""
    with ImageClient([proxy.address, server.grpc_address], model=LITE, timeout=25) as client:
        for _ in range(4):
            assert label(client) == "espresso"
        proxy.back = swallow
        began = time.monotonic()
        for _ in range(4):
            assert label(client) == "espresso"
        assert time.monotonic() - began < 20


def test_the_asyncio_twin_leaves_a_black_hole(proxy: Proxy, server: TritonServer) -> None:
    async def work() -> list[str]:
        async with AsyncImageClient([proxy.address, server.grpc_address], model=LITE, timeout=25) as client:
            await asyncio.gather(*(client.classify(PHOTO) for _ in range(4)))
            proxy.back = swallow
            results = await asyncio.gather(*(client.classify(PHOTO, top_k=1) for _ in range(4)))
            return [result.predictions[0].label for result in results]

    assert asyncio.run(work()) == ["espresso"] * 4


def test_garbage_from_the_server_is_a_broken_connection(proxy: Proxy) -> None:
    with ImageClient(proxy.address, model=LITE) as client:
        assert label(client) == "espresso"
        proxy.back = lambda piece: b"\xff" * len(piece)
        with pytest.raises(VisionClientError):
            label(client, timeout=3.0)
        proxy.back = lambda piece: piece
        proxy.reset()

        def well() -> bool:
            with suppress(ServerUnavailableError):  # a connection begun in between leaves gRPC in its back-off
                assert label(client, timeout=10.0) == "espresso"
                return True
            return False

        wait_until(well, 20)


def test_a_half_closed_connection_is_replaced(proxy: Proxy) -> None:
    with ImageClient(proxy.address, model=LITE, retry=FAST) as client:
        assert label(client) == "espresso"
        for connection in list(proxy._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        assert label(client, timeout=10.0) == "espresso"
        assert proxy.accepted >= 2


@pytest.mark.quiet
def test_many_through_a_network_that_breaks_off_again_and_again(proxy: Proxy) -> None:
    """Every result once, in order, whatever happens to the connections."""
    stop = threading.Event()

    def break_off() -> None:
        while not stop.wait(0.3):
            proxy.reset()

    breaker = threading.Thread(target=break_off)
    retry = RetryPolicy(attempts=30, initial=0.02, maximum=0.2, budget=5, reserve=200)
    images = [PHOTO, b"text"] * 60
    with ImageClient(proxy.address, model=LITE, retry=retry, timeout=60) as client:
        breaker.start()
        try:
            results = list(client.classify_many(images, top_k=1))
        finally:
            stop.set()
            breaker.join()
    assert [result.source for result in results] == images
    assert [result.error.reason if result.error else result.predictions[0].label for result in results] == [
        "espresso",
        "unsupported_format",
    ] * 60
    assert proxy.accepted > 1


def test_keepalive_is_not_taken_for_abuse(server: TritonServer) -> None:
    """An idle connection, and then a call that waits longer than the pings are apart, on Triton's defaults."""
    with ImageClient(server.grpc_address, model=LITE) as client:
        images = [PHOTO] * 32

        def crowd() -> None:
            list(client.classify_many(images * 12, top_k=1))

        threads = [threading.Thread(target=crowd) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert label(client) == "espresso"
