"""How long an answer takes, from Triton's metrics; and what the first stage of a chain is told of it."""

from __future__ import annotations

import http.server
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision import run
from triton_vision.repository import read_model
from triton_vision.server.pace import PATIENCE_S, Chain, Pace, chains

CHAIN = Chain((("core", "post"),), instances=2, patience=4.0)


def metrics(waiting: float, done: float, requests: float | None = None, model: str = "core") -> str:
    """As Triton writes them, in two versions of the model."""
    return "".join(
        f"# HELP nv_inference_{name} some words\n# TYPE nv_inference_{name} counter\n"
        f'nv_inference_{name}{{model="{model}",version="1"}} {value}\n'
        f'nv_inference_{name}{{model="{model}",version="2"}} 0\n'
        for name, value in (
            ("pending_request_count", waiting),
            ("count", done),
            ("request_success", done if requests is None else requests),
            ("exec_count", 7),
        )
    )


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace({"first": CHAIN}, tmp_path)


def test_an_idle_chain_admits_everything(pace: Pace) -> None:
    for second in range(10):
        pace.see(second, metrics(0, 100 * second))
    assert pace.told("first")[:2] == (0.0, math.inf)


def test_the_wait_is_what_waits_at_the_rate_of_a_busy_core(pace: Pace) -> None:
    for tick in range(30):
        pace.see(tick / 10, metrics(120, 6 * tick))
    wait, room, each = pace.told("first")
    assert each == pytest.approx(2 / 60)  # seconds, of two instances
    assert wait == pytest.approx(2.0)
    # Two more seconds of patience at 60 a second, for two instances.
    assert room == pytest.approx(60.0)
    pace.see(3.0, metrics(300, 180))
    assert list(pace.told("first")[:2]) == pytest.approx([5.0, 0.0])
    # What was measured is known when the next wave comes.
    pace.see(4.0, metrics(0, 240))
    assert pace.told("first")[1] == math.inf
    pace.see(9.0, metrics(240, 300))
    assert list(pace.told("first")[:2]) == pytest.approx([4.0, 0.0])


def test_requests_of_many_images_count_as_many(pace: Pace) -> None:
    for tick in range(30):
        pace.see(tick / 10, metrics(10, 96 + 6 * tick, 6 + 6 * tick / 16))
    assert pace.told("first")[0] == pytest.approx(160 / 60, rel=0.01)


def test_callers_of_many_images_do_not_weigh_on_those_who_come_later(pace: Pace) -> None:
    for tick in range(30):
        pace.see(tick / 10, metrics(10, 96 + 6 * tick, 6 + 6 * tick / 32))
    pace.see(3.0, metrics(0, 300, 20))
    pace.see(10.0, metrics(30, 300, 20))
    assert pace.told("first")[0] == pytest.approx(0.5)


def test_an_endless_queue_of_unknown_speed_is_not_made_longer(pace: Pace) -> None:
    pace.see(0.0, metrics(200, 0))
    assert pace.told("first")[:2] == (0.0, math.inf)
    pace.see(0.1, metrics(300, 0))
    assert pace.told("first")[:2] == (1e6, 0.0)


def test_a_model_that_is_loaded_anew_begins_anew(pace: Pace) -> None:
    for tick in range(30):
        pace.see(tick / 10, metrics(60, 1000 + 6 * tick))
    pace.see(3.0, metrics(60, 0))
    pace.see(3.1, metrics(60, 6))
    assert pace.told("first")[0] == pytest.approx(1.0)


def test_chains_of_the_repository() -> None:
    names = ("preprocess", "resnet50_trt", "postprocess", "ensemble", "preprocess_lite", "efficientnet_lite0")
    found = chains({name: read_model(ROOT / "model_repository" / name, "embedded") for name in names})
    assert list(found) == ["preprocess"]
    assert found["preprocess"].steps == (("resnet50_trt", "postprocess"),)
    assert found["preprocess"].patience == PATIENCE_S
    assert found["preprocess"].instances > 1


@pytest.fixture
def endpoint() -> Iterator[str]:
    """What Triton's metrics port would say, of a queue that grows."""
    began = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = metrics(1000, 100 * (time.monotonic() - began)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            del args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_it_writes_the_page_of_the_first_stage(tmp_path: Path, endpoint: str) -> None:
    pace = Pace({"first": CHAIN}, tmp_path)
    page = run.page_path(tmp_path, "first")
    assert run.PAGE.unpack(page.read_bytes()) == (0.0, 0.0, 0.0, 0.0)
    pace.start(endpoint)
    deadline = time.monotonic() + 30
    while not 5 < run.PAGE.unpack(page.read_bytes())[1] < 20:
        assert time.monotonic() < deadline, run.PAGE.unpack(page.read_bytes())
        time.sleep(0.02)
    written, _, room, _ = run.PAGE.unpack(page.read_bytes())
    assert 0 <= time.monotonic() - written < 30
    assert room == 0.0
    pace.stop()
    pace.stop()
