"""How long an answer takes, from Triton's metrics; and what the first stage of a chain is told of it."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision import run
from triton_vision.repository import read_model
from triton_vision.server.pace import PATIENCE_S, Chain, Pace, chains

CHAIN = Chain((("core", "post"),), patience=4.0)


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
            ("exec_count", done // 6),
        )
    )


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace({"first": CHAIN}, tmp_path)


def feed(pace: Pace, start: float, seconds: float, waiting: float, rate: float = 60.0, requests: float = 1.0) -> float:
    """Samples ten times a second, of a core that does ``rate`` items a second since 0.0; returns when they end."""
    for tick in range(round(10 * seconds) + 1):
        now = start + tick / 10
        pace.see(now, metrics(waiting, rate * now, rate * now * requests))
    return now


def test_an_idle_chain_admits_everything(pace: Pace) -> None:
    now = feed(pace, 0.0, 10.0, waiting=0)
    assert pace.told("first", now) == (0.0, 4.0, 0.0, 0.0)


def test_the_wait_is_what_waits_at_the_rate_of_a_busy_core(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=114)
    wait, patience, each, waiting = pace.told("first", now)
    assert [waiting, each] == pytest.approx([114, 1 / 60])
    assert wait == pytest.approx(2.0)  # 114, and the 6 of the batch at work
    assert patience == 4.0
    # What was measured is known when the next wave comes.
    now = feed(pace, 3.1, 5.0, waiting=0)
    assert pace.told("first", now)[0] == 0.0
    now = feed(pace, now + 0.1, 0.0, waiting=240)
    assert pace.told("first", now)[0] == pytest.approx(4.0)


def test_a_queue_that_was_just_emptied_is_kept_short(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=30)
    # The core has taken all of it: 30 and what has come meanwhile.
    pace.see(now + 0.1, metrics(0, 60 * now + 6))
    assert pace.told("first", now + 0.1) == pytest.approx((36 / 60, 4.0, 1 / 60, 0.0))
    pace.see(now + 0.4, metrics(0, 60 * now + 6))
    assert pace.told("first", now + 0.4)[0] == pytest.approx(18 / 60)
    pace.see(now + 3.0, metrics(0, 60 * now + 42))
    assert pace.told("first", now + 3.0) == (0.0, 4.0, 0.0, 0.0)


def test_requests_of_many_images_count_as_many(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=10, requests=1 / 16)
    assert pace.told("first", now)[0] == pytest.approx(160 / 60, rel=0.05)


def test_callers_of_many_images_do_not_weigh_on_those_who_come_later(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=10, requests=1 / 32)
    now = feed(pace, now + 0.1, 3.0, waiting=0)
    now = feed(pace, now + 0.1, 0.0, waiting=30)
    assert pace.told("first", now)[0] == pytest.approx(0.5)


def test_an_endless_queue_of_unknown_speed_is_not_made_longer(pace: Pace) -> None:
    pace.see(0.0, metrics(200, 0))
    assert pace.told("first", 0.0) == (0.0, 4.0, 0.0, 200.0)
    pace.see(0.1, metrics(300, 0))
    assert pace.told("first", 0.1)[0] == 1e6


def test_a_machine_that_stood_still_has_not_become_slower(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=30)
    pace.see(now + 5.0, metrics(30, 60 * now + 6))
    assert pace.told("first", now + 5.0)[0] < 1.0
    # A core that is slower for a while is one that is slower on average.
    now = feed(pace, 0.0, 3.0, waiting=30)
    for tick in range(1, 11):
        pace.see(now + tick / 10, metrics(30, 60 * now + tick))
    assert pace.told("first", now + 1.0)[0] == pytest.approx(30 / 47, rel=0.1)


def test_a_model_that_is_loaded_anew_begins_anew(pace: Pace) -> None:
    now = feed(pace, 0.0, 3.0, waiting=60)
    pace.see(now + 0.1, metrics(60, 0))
    pace.see(now + 0.2, metrics(60, 6))
    assert pace.told("first", now + 0.2)[0] == pytest.approx(1.1)


def test_chains_of_the_repository() -> None:
    names = ("preprocess", "resnet50_trt", "postprocess", "ensemble", "preprocess_lite", "efficientnet_lite0")
    found = chains({name: read_model(ROOT / "model_repository" / name, "embedded") for name in names})
    assert list(found) == ["preprocess"]
    assert found["preprocess"].steps == (("resnet50_trt", "postprocess"),)
    assert found["preprocess"].patience == PATIENCE_S


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
    assert page.read_bytes() == bytes(run.PAGE_BYTES)
    pace.start(endpoint)
    deadline = time.monotonic() + 30
    while not 5 < run.PAGE.unpack_from(page.read_bytes())[1] < 20:
        assert time.monotonic() < deadline, run.PAGE.unpack_from(page.read_bytes())
        time.sleep(0.02)
    written, _, patience, *_ = run.PAGE.unpack_from(page.read_bytes())
    assert 0 <= time.monotonic() - written < 30
    assert patience == 4.0
    pace.stop()
    pace.stop()
