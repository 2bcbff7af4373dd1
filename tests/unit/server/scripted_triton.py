"""A Triton that answers over HTTP what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, bytes]
READY: Answer = (200, b"")
LABELS: Answer = (200, b'{"model_name":"ensemble"}espresso')
INPUT = {"name": "IMAGE", "data_type": "TYPE_STRING", "dims": [1]}


def error(status: int, message: str) -> Answer:
    """An error as Triton words it."""
    return status, json.dumps({"error": message}).encode()


FULL = error(503, "in ensemble 'ensemble', Exceeds maximum queue size")


EXPIRED = error(503, "in ensemble 'ensemble', Request timeout expired")


CLOSED = error(403, "This API is restricted, expecting header 'triton-grpc-protocol-admin'")


BROKEN = error(500, "in ensemble 'ensemble', resnet50_trt failed on this request (ValueError)")


class Triton:
    """An HTTP server that answers as Triton does; None breaks a connection off without an answer.

    Attributes:
        infer: the answer to a photo, for one ensemble or all.
        ready: the answer to a model's readiness.
        models: name -> its configuration, as JSON has it.
        unloaded: the names of those that it had.
        closed: the APIs (``stats``, ``config``, ``ready``) that want a token.
        answers: how many requests each model has answered.
        answers_while_asked: how many more each question for them finds.
        hangs: whether a photo waits until the server ends.
        seen: the requests.
    """

    def __init__(self) -> None:
        self.infer: Answer | dict[str, Answer] | None = LABELS
        self.ready: Answer | dict[str, Answer] | None = READY
        self.models: dict[str, dict[str, Any]] = {}
        self.unloaded: set[str] = set()
        self.closed: set[str] = set()
        self.answers = 7
        self.answers_while_asked = 0
        self.hangs = False
        self.while_it_hangs: Callable[[], None] = lambda: None
        self.seen: list[tuple[str, bytes]] = []
        self.url = ""
        self._ends = threading.Event()

    def serve(self, **models: dict[str, Any]) -> None:
        self.models = models

    def answer(self, path: str) -> Answer | None:
        if path == "/v2/health/ready":
            return READY
        if path == "/v2/models/stats":
            return CLOSED if "stats" in self.closed else self._stats(list(self.models))
        _, _, _, name, what = path.split("/")
        if what in self.closed:
            return CLOSED
        if what == "stats":
            return self._stats([name])
        if what == "config" and name not in self.models:
            words = "has no available versions" if name in self.unloaded else "is not found"
            return error(404, f"Request for unknown model: '{name}' {words}")
        if what == "config":
            return 200, json.dumps({"name": name, **self.models[name]}).encode()
        if what == "infer" and self.hangs:
            self.while_it_hangs()
            self._ends.wait(30)
        found = self.infer if what == "infer" else self.ready
        unknown = error(400, f"Request for unknown model: '{name}' is not found")
        return found.get(name, unknown) if isinstance(found, dict) else found

    def _stats(self, names: Sequence[str]) -> Answer:
        self.answers += self.answers_while_asked
        count = {"inference_stats": {"success": {"count": self.answers, "ns": 1}}, "last_inference": 0}
        return 200, json.dumps({"model_stats": [{"name": name, "version": "1", **count} for name in names]}).encode()

    def end(self) -> None:
        self._ends.set()


@contextmanager
def running() -> Iterator[Triton]:
    triton = Triton()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            triton.seen.append((f"{self.command} {self.path}", body))
            found = triton.answer(self.path)
            if found is None:
                self.close_connection = True
                return
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(found[1])))
            self.end_headers()
            self.wfile.write(found[1])

        def do_GET(self) -> None:
            self.respond()

        def do_POST(self) -> None:
            self.respond()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # a check that has not waited for the answer
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        triton.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield triton
        finally:
            triton.end()
            server.shutdown()
            thread.join()


@pytest.fixture
def triton() -> Iterator[Triton]:
    with running() as server:
        yield server


def config(
    platform: str = "ensemble", batch: int = 32, outputs: Sequence[str] = ("LABELS", "STATUS")
) -> dict[str, Any]:
    return {
        "platform": platform,
        "max_batch_size": batch,
        "input": [INPUT],
        "output": [{"name": name, "data_type": "TYPE_STRING", "dims": [-1]} for name in outputs],
    }
