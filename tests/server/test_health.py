"""The health check and the first photo of a start, on a real Triton whose pipelines fare differently."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import wait_until
from triton_vision.server import ModelLoadError, TritonServer, health, warmup
from triton_vision.server.local import LocalIndex
from triton_vision.server.stubs import StubWatch

# What each pipeline's only stage does with a photo.
STAGE = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        self.gate = pathlib.Path(__file__).parent / "gate"

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()) for request in requests]

    def answer(self, images):
        if self.name == "raising_stage" or self.name == "own_stage" and images[0, 0] != b"a face":
            raise ValueError("this core fails on every photo")
        if self.name == "choosy_stage" and images[0, 0] != b"a face":
            error = pb_utils.TritonError("image 0: no_face: nobody is to be seen", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        if self.name == "crowded_stage":
            time.sleep(0.05)
        while self.name == "hanging_stage" and not self.gate.exists():
            time.sleep(0.01)
        status = pb_utils.Tensor("STATUS", np.full((len(images), 1), b"", object))
        return pb_utils.InferenceResponse(output_tensors=[status])
"""
TENSORS = """
max_batch_size: 1
input [{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "STATUS" data_type: TYPE_STRING dims: [ 1 ] }]
"""
NAMES = ("fine", "raising", "own", "choosy", "killed", "hanging", "crowded")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("health")
    for name in NAMES:
        stage = f"{name}_stage"
        maps = " ".join(
            f'{way}_map {{ key: "{of}" value: "{of}" }}' for way, of in (("input", "IMAGE"), ("output", "STATUS"))
        )
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(
            'platform: "ensemble"'
            + TENSORS
            + f'ensemble_scheduling {{ step [{{ model_name: "{stage}" model_version: -1 {maps} }}] }}'
        )
        (folder / stage / "1").mkdir(parents=True)
        (folder / stage / "1" / "model.py").write_text(STAGE)
        (folder / stage / "config.pbtxt").write_text(
            'backend: "python"' + TENSORS + "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
        )
    (folder / "own" / "probe.jpg").write_bytes(b"a face")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, warm=False) as running:
        yield running


Ask = Callable[..., None]


@pytest.fixture(params=["gRPC", "HTTP"])
def start(server: TritonServer, request: pytest.FixtureRequest) -> Ask:
    """The start's first photo, over either protocol."""
    if request.param == "HTTP":
        return LocalIndex(server.http_address, {}).classify_once

    def over_grpc(ensemble: str, timeout: float = 60.0, folder: Path | None = None) -> None:
        warmup.classify_once(server.grpc_address, ensemble, timeout, folder=folder)

    return over_grpc


def check(server: TritonServer, model: str, timeout: float = 20.0, photo: bytes | None = None) -> health.Health:
    return health.check(f"http://{server.http_address}", model, timeout, photo)


def test_the_server_itself_tells_which_ensembles_take_a_photo(server: TritonServer) -> None:
    found = health.image_ensembles(f"http://{server.http_address}", time.monotonic() + 10)
    assert found is not None
    assert sorted(found) == sorted(NAMES)
    assert server.selection is not None
    assert sorted(server.selection.image_ensembles()) == sorted(NAMES)


def test_a_core_that_fails_on_every_photo_is_unhealthy_and_stops_a_start(server: TritonServer, start: Ask) -> None:
    assert check(server, "fine").report.startswith("healthy: fine answered a photo")
    start("fine")
    found = check(server, "raising")
    assert not found.healthy
    assert "this core fails on every photo" in found.report
    with pytest.raises(ModelLoadError, match="this core fails on every photo"):
        start("raising")


def test_a_refusal_is_an_answer_and_a_photo_of_its_own_is_taken(
    server: TritonServer, start: Ask, tmp_path: Path
) -> None:
    found = check(server, "choosy")
    assert found.healthy
    assert "refused a photo (HTTP 400: in ensemble 'choosy', image 0: no_face: nobody is to be seen)" in found.report
    start("choosy")
    own = tmp_path / "choosy"
    own.mkdir()
    (own / "probe.jpg").write_bytes(b"a face")
    found = health.check_all(f"http://{server.http_address}", ["choosy"], repository=tmp_path)
    assert found.report.startswith("healthy: choosy answered a photo")
    start("choosy", folder=own)
    (own / "probe.jpg").unlink()
    (own / "probe.jpg").mkdir()
    with pytest.raises(ModelLoadError, match=r"probe\.jpg cannot be read"):
        start("choosy", folder=own)


def test_a_start_and_the_health_check_send_the_repositorys_photo(server: TritonServer, repository: Path) -> None:
    assert server.selection is not None
    own = replace(server.selection, served={"own": server.selection.served["own"]})
    server._send_one_image(own)
    url = f"http://{server.http_address}"
    assert health.check_all(url, ["own"], repository=repository).healthy
    assert not health.check_all(url, ["own"]).healthy


def test_a_killed_stub_is_unhealthy_although_the_model_is_ready(server: TritonServer, start: Ask) -> None:
    for stub in StubWatch(server.pid).look():
        if stub.model == "killed_stage":
            os.kill(stub.pid, signal.SIGKILL)
    reports = []

    def ill() -> bool:
        found = health.check_all(f"http://{server.http_address}", ["fine", "killed"])
        reports.append(found.report)
        return not found.healthy

    wait_until(ill, 20)
    assert reports[-1].startswith("unhealthy: killed is broken (HTTP 500: ")
    with pytest.raises(ModelLoadError):
        start("killed")


def test_a_server_that_answers_nobody_is_stuck(server: TritonServer, repository: Path) -> None:
    """Its queue fills, and Triton words that as it words load."""
    gate = repository / "hanging_stage" / "1" / "gate"
    found: list[health.Health] = []

    def full() -> bool:
        found.append(check(server, "hanging", 1.0))
        return "Exceeds maximum queue size" in found[-1].report

    try:
        wait_until(full, 30)
        assert not any(one.healthy for one in found), found
        assert any("stuck: no answer to a photo within" in one.report for one in found), found
    finally:
        gate.touch()
    wait_until(lambda: check(server, "hanging").report.startswith("healthy: hanging answered"), 20)


def test_a_crowded_server_is_busy_and_stops_no_start(
    server: TritonServer, start: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "INSIST_S", 0.5)
    enough = threading.Event()

    def crowd() -> list[int]:
        found = []
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
        connection = http.client.HTTPConnection(server.http_address, timeout=30)
        while not enough.is_set():
            connection.request("POST", "/v2/models/crowded/infer", body=b"x", headers=headers)
            with connection.getresponse() as answer:
                answer.read()
                found.append(answer.status)
        connection.close()
        return found

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(crowd) for _ in range(8)]
        try:
            wait_until(lambda: "turned a photo away" in check(server, "crowded").report, 20)
            found = [check(server, "crowded") for _ in range(10)]
            assert all(one.healthy for one in found), found
            start("crowded")
        finally:
            enough.set()
    assert {status for caller in callers for status in caller.result()} == {200, 503}
