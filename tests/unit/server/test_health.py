"""The health check against servers that answer as Triton does, each in its own plight."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from triton_vision.server.health import PHOTO, check, main

Answer = tuple[int, bytes]
READY: Answer = (200, b"")
LABELS: Answer = (200, b'{"model_name":"ensemble"}espresso')


@contextmanager
def triton(ready: Answer | None, infer: Answer | None, seen: list[tuple[str, bytes]] | None = None) -> Iterator[str]:
    """An HTTP server with these answers, None for a connection that is closed without one; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, found: Answer | None) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if seen is not None:
                seen.append((f"{self.command} {self.path} {self.headers.get('Inference-Header-Content-Length')}", body))
            if found is None:
                self.close_connection = True
                return
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(found[1])))
            self.end_headers()
            self.wfile.write(found[1])

        def do_GET(self) -> None:
            self.answer(ready)

        def do_POST(self) -> None:
            self.answer(infer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as url:
        yield url


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """An HTTP server on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def error(status: int, message: str) -> Answer:
    """An error as Triton words it."""
    return status, json.dumps({"error": message}).encode()


def test_readiness_is_asked_first_and_then_a_real_photo_is_sent() -> None:
    seen: list[tuple[str, bytes]] = []
    with triton(READY, LABELS, seen) as url:
        found = check(url, "my ensemble")
    assert found.healthy
    assert found.report.startswith("healthy: my ensemble answered a photo in ")
    assert seen == [
        ("GET /v2/models/my%20ensemble/ready None", b""),
        ("POST /v2/models/my%20ensemble/infer 0", PHOTO.read_bytes()),
    ]


@pytest.mark.parametrize(
    "message",
    [
        "in ensemble 'ensemble', Stub process 'preprocess_0_0' is not healthy.",
        "in ensemble 'ensemble', Failed to process the request(s) for model 'x', message: Stub process ended",
        "in ensemble 'ensemble', Request for unknown model: 'resnet50_trt' is not found",
    ],
)
def test_a_broken_model_is_unhealthy_although_it_counts_as_ready(message: str) -> None:
    with triton(READY, error(500, message)) as url:
        found = check(url, "ensemble")
    assert not found.healthy
    assert found.report == f"unhealthy: ensemble is broken (HTTP 500: {message})"


@pytest.mark.parametrize(
    "answer",
    [
        error(503, "in ensemble 'ensemble', Exceeds maximum queue size"),
        error(503, "in ensemble 'ensemble', Request timeout expired"),
        error(400, "[request id: <id_unknown>] unexpected inference input 'IMAGE' for model 'yolo'"),
        (503, b"upstream is busy"),
    ],
)
def test_load_and_refusals_are_no_illness(answer: Answer) -> None:
    with triton(READY, answer) as url:
        found = check(url, "ensemble")
    assert found.healthy
    assert found.report.startswith(f"healthy: ensemble is ready, and refused a photo (HTTP {answer[0]}")


def test_a_server_that_answers_late_is_busy() -> None:
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            release.wait(30)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as url:
        found = check(url, "ensemble", timeout=0.3)
        release.set()
    assert found.healthy
    assert "busy: no answer to a photo within 0.3 s" in found.report


@pytest.mark.parametrize("answer", [(400, b""), error(404, "Request for unknown model: 'ensemble' is not found")])
def test_a_model_that_is_not_ready_is_unhealthy(answer: Answer) -> None:
    with triton(answer, LABELS) as url:
        found = check(url, "ensemble")
    assert not found.healthy
    assert found.report.startswith(f"unhealthy: ensemble is not ready (HTTP {answer[0]}")


def test_a_server_that_is_gone_or_breaks_off_is_unhealthy() -> None:
    with triton(READY, None) as url:
        assert check(url, "ensemble").report.startswith(f"unhealthy: {url} breaks off the answer to a photo")
    assert check(url, "ensemble").report == f"unhealthy: {url} does not answer (connection refused)"


def test_a_message_of_many_lines_becomes_one() -> None:
    with triton(READY, error(500, "Stub process 'x' is not healthy.\n\nAt:\n  /models/x/1/model.py(3): f\n")) as url:
        report = check(url, "ensemble").report
    assert report == "unhealthy: ensemble is broken (HTTP 500: Stub process 'x' is not healthy.)"


def test_the_command_takes_its_words_from_options_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with triton(READY, LABELS) as url:
        monkeypatch.setenv("TRITON_VISION_HEALTH_URL", url)
        monkeypatch.setenv("TRITON_VISION_HEALTH_MODEL", "ensemble_lite")
        assert main([]) == 0
        assert capsys.readouterr().out.startswith("healthy: ensemble_lite answered")
        assert main(["--model", "other"]) == 0
        assert capsys.readouterr().out.startswith("healthy: other answered")
    assert main(["--model", "other"]) == 1
    assert main(["--url", "localhost:8000"]) == 1
    assert capsys.readouterr().out.endswith("give http://HOST:PORT\n")


def test_a_proxy_of_the_environment_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with triton(READY, LABELS) as url:
        assert check(url, "ensemble").healthy


def test_it_needs_the_standard_library_only() -> None:
    """So that it starts in a fraction of a second, whatever the environment holds."""
    code = "import sys, triton_vision.server.health; print(sorted(m.split('.')[0] for m in sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("numpy", "grpc", "google", "tritonclient", "triton_vision_client"):
        assert f"'{heavy}'" not in told
