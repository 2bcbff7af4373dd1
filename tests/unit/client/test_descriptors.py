"""A process at its limit of file descriptors says so, and lives."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit

import pytest
from triton_vision_client._connecting import lacks_descriptors

from tests.unit.client.scripted import Start, answer

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
until = time.monotonic() + 0.3  # the servers are asked again whether they are well meanwhile
while time.monotonic() < until:
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
