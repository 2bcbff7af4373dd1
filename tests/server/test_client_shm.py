"""Images through shared memory: the same answers, and nothing left behind whoever dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from triton_vision_client import AsyncImageClient, BadImageError, DeadlineExceededError, ImageClient
from triton_vision_client._shm import NAME

from tests.conftest import SAMPLES, jpeg
from triton_vision.server import TritonServer
from triton_vision.server.security import Security

TOKEN = "secret-of-this-test"
LITE = "ensemble_lite"
PHOTO = (SAMPLES / "coffee.jpg").read_bytes()


def regions(process: int | None = None) -> list[str]:
    """The clients' regions, of one process or of all."""
    found = [name for name in os.listdir("/dev/shm") if NAME.fullmatch(name)]
    return [name for name in found if process is None or name.split(".")[2] == str(process)]


def known_to(server: TritonServer) -> list[str]:
    """The regions that a server has registered."""
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(server.grpc_address) as client:
        return [name for name in client.get_system_shared_memory_status().regions if NAME.fullmatch(name)]


def test_the_same_answers_and_nothing_left(server: TritonServer, caplog: pytest.LogCaptureFixture) -> None:
    with Image.open(SAMPLES / "cat.jpg") as opened:
        array = np.asarray(opened.convert("RGB"))
    images: list[object] = [PHOTO, jpeg(1), b"text", array, "missing.jpg", *([PHOTO] * 40)]
    with ImageClient(server.grpc_address, model=LITE) as plain:
        expected = list(plain.classify_many(images))
        with ImageClient(server.grpc_address, model=LITE, transport="shm") as client:
            assert client.classify(PHOTO).predictions == plain.classify(PHOTO).predictions
            with pytest.raises(BadImageError, match="unsupported_format"):
                client.classify(b"text")
            assert regions(os.getpid())
            assert known_to(server)
            found = list(client.classify_many(images))
        for one, other in zip(found, expected, strict=True):
            assert str(one.error) == str(other.error)
            assert [entry.label for entry in one.predictions] == [entry.label for entry in other.predictions]
            np.testing.assert_allclose(
                [entry.score for entry in one.predictions], [entry.score for entry in other.predictions], atol=1e-5
            )
    assert regions(os.getpid()) == []
    assert known_to(server) == []
    assert not caplog.records


def test_the_asyncio_twin(server: TritonServer) -> None:
    async def work() -> None:
        async with AsyncImageClient(server.grpc_address, model=LITE, transport="shm") as client:
            together = await asyncio.gather(*(client.classify(PHOTO) for _ in range(8)))
            assert {result.predictions[0].label for result in together} == {"espresso"}
            assert len([item async for item in client.classify_many([PHOTO] * 40)]) == 40
            assert regions(os.getpid())

    asyncio.run(work())
    assert regions(os.getpid()) == []
    assert known_to(server) == []


def test_many_threads(server: TritonServer) -> None:
    labels: list[str] = []
    with ImageClient(server.grpc_address, model=LITE, transport="shm") as client:

        def work(seed: int) -> None:
            small = jpeg(seed, (64 + seed, 64))
            for _ in range(5):
                labels.append(client.classify(PHOTO).predictions[0].label)
                client.classify(small)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(regions(os.getpid())) <= 8
    assert labels == ["espresso"] * 40


def test_a_late_call_s_region_is_never_used_again(server: TritonServer) -> None:
    big = jpeg(3, (8000, 6000))
    with ImageClient(server.grpc_address, model=LITE, transport="shm") as client:
        client.classify(PHOTO)
        before = set(regions(os.getpid()))
        with pytest.raises(DeadlineExceededError):
            client.classify(big, timeout=0.25)  # it takes longer, and no wait of before counts
        assert client.classify(PHOTO).predictions[0].label == "espresso"
        assert not before - set(regions(os.getpid())) or len(before) == 1
    assert regions(os.getpid()) == []


def test_a_server_that_comes_back_is_told_again(repository: Path) -> None:
    first = TritonServer(repository, security=Security(shm_open=True)).start()
    port = int(first.grpc_address.rsplit(":", 1)[1])
    with ImageClient(first.grpc_address, model=LITE, transport="shm") as client:
        client.classify(PHOTO)
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        with TritonServer(repository, grpc_port=port, security=Security(shm_open=True)):
            assert client.classify(PHOTO).predictions[0].label == "espresso"
            assert client.classify(PHOTO).predictions[0].label == "espresso"
    assert regions(os.getpid()) == []


def test_a_server_that_takes_none_gets_them_by_grpc(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TritonServer(repository, security=Security(tokens={"shm": TOKEN})) as server:
        with (
            ImageClient(server.grpc_address, model=LITE, transport="shm") as client,
            caplog.at_level(logging.WARNING, "triton_vision_client"),
        ):
            for _ in range(2):
                assert client.classify(PHOTO).predictions[0].label == "espresso"
        (record,) = caplog.records
        assert "takes no shared memory from here, so images go over gRPC" in record.getMessage()
        assert "--shm-token-file, and give the client that token (shm_token=)" in record.getMessage()
        for given in ({"shm_token": TOKEN}, {"headers": {"triton-grpc-protocol-shm": TOKEN}}):
            with ImageClient(server.grpc_address, model=LITE, transport="shm", **given) as client:
                assert client.classify(PHOTO).predictions[0].label == "espresso"
                assert client._regions.told
        assert len(caplog.records) == 1

        async def twin() -> None:
            async with AsyncImageClient(server.grpc_address, model=LITE, transport="shm", shm_token=TOKEN) as client:
                assert (await client.classify(PHOTO)).predictions[0].label == "espresso"
                assert client._regions.told

        asyncio.run(twin())
        assert {model.name for model in ImageClient(server.grpc_address).models() if model.ready} >= {LITE}


@pytest.mark.quiet  # another worker's client may remove it, too
def test_what_a_killed_client_left_is_removed_by_the_next(server: TritonServer) -> None:
    program = (
        "import os, signal, sys\nfrom triton_vision_client import ImageClient\n"
        f"client = ImageClient({server.grpc_address!r}, model={LITE!r}, transport='shm')\n"
        f"client.classify({str(SAMPLES / 'coffee.jpg')!r})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = [name for name in regions() if name.split(".")[2] != str(os.getpid())]
    assert left
    with ImageClient(server.grpc_address, model=LITE, transport="shm") as client:
        client.classify(PHOTO)
        assert not set(left) & set(regions())
        assert not set(left) & set(known_to(server))


def test_a_client_that_is_not_closed_leaves_nothing_at_its_end(server: TritonServer) -> None:
    program = (
        "from triton_vision_client import ImageClient\n"
        f"client = ImageClient({server.grpc_address!r}, model={LITE!r}, transport='shm')\n"
        f"client.classify({str(SAMPLES / 'coffee.jpg')!r})\nimport os\nprint(os.getpid())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert regions(int(done.stdout)) == []


def test_a_forked_child_leaves_its_parent_s_alone(server: TritonServer) -> None:
    with ImageClient(server.grpc_address, model=LITE, transport="shm") as client:
        client.classify(PHOTO)
        mine = regions(os.getpid())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if client.classify(PHOTO).predictions[0].label == "espresso" else 2
                client.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert regions(child) == []
        assert regions(os.getpid()) == mine
        assert client.classify(PHOTO).predictions[0].label == "espresso"


def test_the_transport_has_two_names() -> None:
    with pytest.raises(ValueError, match="'grpc' or 'shm'"):
        ImageClient(transport="cuda")
