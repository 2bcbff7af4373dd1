"""What ``serve`` does about a Triton that dies, Python processes that die or grow, and output that nobody reads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conftest import wait_until
from tests.server.serving import Serve, alive, echo, regions, serve
from triton_vision.server import renewal

__all__ = ["echo", "serve"]  # fixtures


def say(client: triton.InferenceServerClient, text: bytes, timeout: float = 30) -> bytes:
    tensor = triton.InferInput("TEXT", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text], object))
    answer = client.infer("echo", [tensor], client_timeout=timeout).as_numpy("ECHO")
    return bytes(answer[0])


@contextmanager
def callers(address: str, count: int = 3) -> Iterator[list[str]]:
    """A few that call all the time; what they did not get is in the list."""
    failed: list[str] = []
    stop = threading.Event()

    def call() -> None:
        with triton.InferenceServerClient(address) as client:
            while not stop.is_set():
                try:
                    assert say(client, b"hello") == b"hello"
                except InferenceServerException as error:
                    failed.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def next_error(one: Serve) -> str:
    """Serve's next own line on stderr, past what Triton writes there when it crashes."""
    assert one.process.stderr is not None
    return next(line.strip() for line in one.process.stderr if line.startswith("error: "))


def test_a_triton_that_dies_is_restarted_and_a_stop_meanwhile_is_obeyed(
    serve: Callable[..., Serve], echo: Path
) -> None:
    one = serve(echo)
    ready = one.until_ready()
    old = {one.tritonserver, *one.stubs()}
    left = set(regions(one.prefix))
    os.kill(one.tritonserver, signal.SIGSEGV)
    assert next_error(one) == "error: tritonserver ended with signal SIGSEGV; restarting in 1 s"
    assert one.until_ready() == ready  # the ports, too
    assert not any(map(alive, old))
    assert not left & set(regions(one.prefix))
    with triton.InferenceServerClient(one.grpc) as client:
        assert say(client, b"hello") == b"hello"
    os.kill(one.tritonserver, signal.SIGABRT)
    assert next_error(one) == "error: tritonserver ended with signal SIGABRT; restarting in 2 s"
    one.process.terminate()
    assert one.process.wait(10) == 0
    assert not one.family()
    assert not regions(one.prefix)


def test_a_python_process_that_dies_is_replaced(serve: Callable[..., Serve], echo: Path) -> None:
    with (echo / "echo" / "config.pbtxt").open("a") as file:
        file.write("instance_group [{ count: 2 kind: KIND_CPU }]\n")
    one = serve(echo)
    one.until_ready()
    server = one.tritonserver
    for how_many in (1, 2):
        old = one.stubs()
        assert len(old) == 2
        for pid in old[:how_many]:
            os.kill(pid, signal.SIGKILL)
        died = "a Python process died" if how_many == 1 else "2 Python processes died"
        assert next_error(one) == f"error: echo: {died}; replacing the model's processes"
        wait_until(lambda old=old: len(one.stubs()) == 2 and not set(one.stubs()) & set(old), 30)  # type: ignore[misc]
        wait_until(lambda: len(regions(one.prefix)) == 2, 10)
        with triton.InferenceServerClient(one.grpc) as client:
            for _ in range(4):
                assert say(client, b"hello") == b"hello"
    assert one.tritonserver == server
    one.process.terminate()
    assert one.process.wait(10) == 0


def test_memory_that_a_large_request_has_taken_comes_back_and_no_call_fails(
    serve: Callable[..., Serve], echo: Path
) -> None:
    one = serve(echo)
    one.until_ready()
    old = one.stubs()
    size = renewal.LARGEST + 8 * renewal.MIB

    def largest() -> int:
        return max((os.stat(f"/dev/shm/{name}").st_blocks * 512 for name in regions(one.prefix)), default=0)

    with callers(one.grpc) as failed, triton.InferenceServerClient(one.grpc) as client:
        assert len(say(client, b"x" * size)) == size
        assert largest() > size
        wait_until(lambda: not set(one.stubs()) & set(old) and 0 < largest() < renewal.SMALLEST, 60)
        assert say(client, b"hello") == b"hello"
    assert failed == []


def test_output_that_nobody_reads_holds_nothing_up(serve: Callable[..., Serve], echo: Path) -> None:
    one = serve(echo)
    one.until_ready()  # from here on nobody reads stderr
    with triton.InferenceServerClient(one.grpc) as client:
        for _ in range(3):
            assert say(client, b"chatter", timeout=60) == b"chatter"
    one.process.terminate()
    assert one.process.wait(15) == 0


@pytest.mark.parametrize("what", ["tritonserver", "stub"])
def test_what_dies_before_it_was_ready_ends_serve(serve: Callable[..., Serve], echo: Path, what: str) -> None:
    victim = "os.getppid()" if what == "tritonserver" else "os.getpid()"
    (echo / "echo" / "1" / "model.py").write_text(f"import os\nos.kill({victim}, 9)\n")  # at once
    one = serve(echo)
    _, error = one.process.communicate(timeout=60)
    assert one.process.returncode == 2
    assert "restarting" not in error
    assert ("Python process died" if what == "stub" else "signal SIGKILL") in error
