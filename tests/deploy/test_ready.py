"""What counts as a server that serves, asked of servers that answer as Triton does."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deploy.script import SCRIPT

pytestmark = pytest.mark.quiet  # one deploy-triton.sh keeps out another

Answer = tuple[int, str]
LABELS: Answer = (200, '{"model_name":"cats","outputs":[]}')


def error(status: int, message: str) -> Answer:
    return status, json.dumps({"error": message})


@contextmanager
def triton(infer: Mapping[str, Answer], closed: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A server of these ensembles and of one other model, with some APIs closed; yields its URL and the photos."""
    photos: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def find(self, body: bytes) -> Answer:
            name, _, what = self.path.removeprefix("/v2/models/").partition("/")
            if "index" in self.path:
                return error(403, "This API is restricted")
            if self.path == "/v2/models/stats":
                names = [*infer, "core"]
                listed = [{"name": one, "version": "1", "response_stats": {"name": {}}} for one in names]
                return error(403, "restricted") if "stats" in closed else (200, dump({"model_stats": listed}))
            if name in infer and what == "infer":
                photos[name] = body
                return infer[name]
            if name in infer and not what:
                inputs = [{"name": "IMAGE", "datatype": "BYTES", "shape": [-1, 1]}]
                told = {
                    "name": name,
                    "versions": ["1"],
                    "platform": "ensemble",
                    "inputs": inputs,
                    "outputs": [{"name": "STATUS"}],
                }
                return error(403, "restricted") if "metadata" in closed else (200, dump(told))
            known = name in infer or name == "core" or "health" in self.path
            return (200, "{}") if known else error(400, f"Request for unknown model: '{name}' is not found")

        def do_GET(self) -> None:
            status, text = self.find(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", photos
        finally:
            server.shutdown()
            thread.join()


def dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def serves(url: str, **options: str) -> tuple[int, str]:
    """The script's own verdict, and what it says."""
    told = " ".join(f"[{name}]={shlex.quote(value)}" for name, value in options.items())
    program = f"set -Eeuo pipefail; declare -A OPTION=({told}); DEPLOY_DIR={shlex.quote(str(SCRIPT.parent))}; "
    program += f'. "$DEPLOY_DIR/lib/ready.sh"; code=0; serves {url} || code=$?; exit $code'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip() + done.stderr


def test_every_ensemble_is_asked_whatever_its_name_and_with_a_closed_index() -> None:
    with triton({"cats": LABELS, "dogs": LABELS}) as (url, photos):
        assert serves(url) == (0, "cats\ndogs")
        assert sorted(photos) == ["cats", "dogs"]
        assert serves(url, ensemble="dogs") == (0, "dogs")
        code, why = serves(url, ensemble="fish")
        assert code == 2
        assert why == "it does not serve the ensemble fish, only: cats, dogs"


@pytest.mark.parametrize("closed", ["stats", "metadata"])
def test_a_server_that_does_not_tell_its_models_is_asked_for_the_suites_own(closed: str) -> None:
    with triton({"ensemble_lite": LABELS, "cats": LABELS}, (closed,)) as (url, photos):
        assert serves(url) == (0, "ensemble_lite")
        assert serves(url, ensemble="cats") == (0, "cats")
        assert sorted(photos) == ["cats", "ensemble_lite"]


@pytest.mark.parametrize(
    ("answer", "serving"),
    [
        (error(400, "in ensemble 'cats', image 0: no_face: nobody is to be seen"), True),
        (error(403, "This API is restricted, expecting header 'triton-grpc-protocol-inference'"), True),
        (error(503, "in ensemble 'cats', Exceeds maximum queue size"), True),
        (error(503, "in ensemble 'cats', Request timeout expired"), True),
        (error(500, "in ensemble 'cats', core failed on this request (ValueError)"), False),
        (error(503, "Server is stopping"), False),
        (error(400, "in ensemble 'cats', core says no"), False),
        (error(400, "in ensemble 'cats', Request for unknown model: 'core' is not found"), False),
    ],
)
def test_a_refusal_is_an_answer_and_a_failure_is_none(answer: Answer, serving: bool) -> None:
    with triton({"cats": answer}) as (url, _):
        code, told = serves(url)
    assert code == (0 if serving else 3)
    if not serving:
        assert told == f"cats does not answer an image: {answer[1]} (HTTP {answer[0]})"


def test_an_ensemble_has_a_photo_of_its_own(tmp_path: Path) -> None:
    repository = tmp_path / "my models"
    (repository / "cats").mkdir(parents=True)
    (repository / "cats" / "probe.jpg").write_bytes(b"a cat")
    with triton({"cats": LABELS, "dogs": LABELS}) as (url, photos):
        assert serves(url, repository=str(repository))[0] == 0
    assert photos == {"cats": b"a cat", "dogs": (SCRIPT.parent / "probe.jpg").read_bytes()}
