"""The health check against servers that answer as Triton does, each in its own plight."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.unit.server.scripted_triton import (
    BROKEN,
    CLOSED,
    EXPIRED,
    FULL,
    Answer,
    Triton,
    config,
    error,
    running,
    triton,
)
from triton_vision.probe import PHOTO
from triton_vision.server import health
from triton_vision.server.health import check, check_all, main

__all__ = ["triton"]  # fixtures


def test_readiness_is_asked_first_and_then_a_real_photo_is_sent(triton: Triton) -> None:
    found = check(triton.url, "my ensemble")
    assert found.healthy
    assert found.report.startswith("healthy: my ensemble answered a photo in ")
    assert triton.seen[0] == ("GET /v2/models/my%20ensemble/ready", b"")
    assert ("POST /v2/models/my%20ensemble/infer", PHOTO.read_bytes()) in triton.seen


@pytest.mark.parametrize(
    "answer",
    [
        error(500, "in ensemble 'ensemble', Stub process 'preprocess_0_0' is not healthy."),
        error(
            500, "in ensemble 'ensemble', Failed to process the request(s) for model 'x', message: Stub process ended"
        ),
        BROKEN,
        error(500, "in ensemble 'ensemble', core: TimeoutError: timeout expired"),
        error(501, "in ensemble 'ensemble', no such thing"),
        error(503, "in ensemble 'ensemble', out of memory"),
        error(400, "in ensemble 'ensemble', core says no"),
        error(400, "in ensemble 'ensemble', core: image 0: no_face: nobody is to be seen"),
        error(400, "in ensemble 'ensemble', image 0: nobody is to be seen"),
        error(404, "in ensemble 'ensemble', image 0: no_face: nobody is to be seen"),
        error(
            400, "in ensemble 'ensemble', [request id: <id_unknown>] unexpected shape for input 'LOGITS' for model 'x'"
        ),
        error(400, "in ensemble 'ensemble', Request for unknown model: 'resnet50_trt' is not found"),
        error(400, "in ensemble 'ensemble', Request for unknown model: 'resnet50_trt' has no available versions"),
        (503, b"nobody is here"),
    ],
)
def test_a_model_that_fails_on_the_photo_is_unhealthy_although_it_counts_as_ready(
    triton: Triton, answer: Answer
) -> None:
    triton.infer = answer
    triton.answers_while_asked = 1  # what it answers to others does not help
    found = check(triton.url, "ensemble")
    assert not found.healthy
    assert found.report.startswith(f"unhealthy: ensemble is broken (HTTP {answer[0]}")


@pytest.mark.parametrize(
    "answer",
    [
        error(400, "image 0: no_face: nobody is to be seen"),
        error(400, "in ensemble 'faces', image 0: no-face: nobody is to be seen"),
        error(400, "in ensemble 'bob's', in ensemble 'plants', image 0: wilted: the leaf is not healthy"),
    ],
)
def test_a_refusal_is_an_answer(triton: Triton, answer: Answer) -> None:
    triton.infer = answer
    found = check(triton.url, "ensemble")
    assert found.healthy
    assert found.report.startswith(f"healthy: ensemble is ready, and refused a photo (HTTP {answer[0]}: ")


def test_a_named_model_that_takes_no_photo_has_to_be_ready(triton: Triton) -> None:
    triton.serve(yolo=config("onnxruntime_onnx"))
    triton.infer = error(400, "[request id: <id_unknown>] unexpected inference input 'IMAGE' for model 'yolo'")
    assert check_all(triton.url, ["yolo"]).report == "healthy: yolo is ready, and takes no photo"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (CLOSED, "cannot be tried without the inference token: set $TRITON_VISION_INFERENCE_TOKEN"),
        (error(405, "no"), "is broken"),
    ],
)
def test_what_could_not_be_tried_is_not_taken_for_healthy(triton: Triton, answer: Answer, words: str) -> None:
    triton.infer = answer
    found = check(triton.url, "ensemble")
    assert not found.healthy
    assert words in found.report


@pytest.mark.parametrize("answer", [FULL, EXPIRED])
def test_a_server_that_only_turns_photos_away_is_stuck(
    triton: Triton, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.01)
    triton.infer = answer
    found = check(triton.url, "ensemble", timeout=0.3)
    assert not found.healthy
    assert found.report.startswith("unhealthy: ensemble is stuck: turned a photo away (HTTP 503")
    triton.answers_while_asked = 1
    assert check(triton.url, "ensemble").report.startswith("healthy: ensemble is ready, and busy: turned a photo away")
    triton.closed = {"stats"}  # nothing says that it is not as busy as it says
    assert check(triton.url, "ensemble", timeout=0.3).healthy


def test_a_photo_without_an_answer_is_load_only_if_others_are_answered(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.05)
    triton.hangs = True

    for now in (7, 8, 10):  # nobody, the photo of an earlier check, a batch of several
        triton.while_it_hangs = partial(setattr, triton, "answers", now)
        found = check(triton.url, "ensemble", timeout=0.3)
        assert not found.healthy
        assert "is stuck: no answer to a photo within " in found.report
        assert found.report.endswith(", and the server answers nobody else")
    triton.while_it_hangs = partial(setattr, triton, "answers", 0)  # as a model that is loaded again begins
    triton.answers_while_asked = 1
    found = check(triton.url, "ensemble", timeout=25.0)  # the server would answer after 30 s
    assert found.report.startswith("healthy: ensemble is ready, and busy: no answer to a photo within ")
    triton.closed = {"stats"}
    found = check(triton.url, "ensemble", timeout=0.3)
    assert not found.healthy
    assert found.report.endswith("and the server does not tell whether it answers others")


def test_the_timeout_bounds_all_of_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        began = time.monotonic()
        found = check_all(f"http://127.0.0.1:{frozen.getsockname()[1]}", timeout=0.3)
        assert time.monotonic() - began < 2
    assert found.report.endswith("does not answer (timed out)")


@pytest.mark.parametrize("answer", [(400, b""), error(404, "Request for unknown model: 'ensemble' is not found")])
def test_a_model_that_is_not_ready_is_unhealthy(triton: Triton, answer: Answer) -> None:
    triton.ready = answer
    found = check(triton.url, "ensemble")
    assert not found.healthy
    assert found.report.startswith(f"unhealthy: ensemble is not ready (HTTP {answer[0]}")


def test_a_server_that_is_gone_or_breaks_off_is_unhealthy() -> None:
    with running() as triton:
        triton.infer = None
        assert check(triton.url, "ensemble").report.startswith(
            f"unhealthy: {triton.url} breaks off the answer to a photo"
        )
    for found in (check(triton.url, "ensemble"), check_all(triton.url)):
        assert found.report == f"unhealthy: {triton.url} does not answer (connection refused)"


def test_a_message_of_many_lines_becomes_one(triton: Triton) -> None:
    triton.infer = error(500, "Stub process 'x' is not healthy.\n\nAt:\n  /models/x/1/model.py(3): f\n")
    report = check(triton.url, "ensemble").report
    assert report == "unhealthy: ensemble is broken (HTTP 500: Stub process 'x' is not healthy.)"


# -- which ensembles --------------------------------------------------------------------------------------------------


def test_the_command_takes_its_words_from_options_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with running() as triton:
        triton.serve(cats=config())
        monkeypatch.setenv("TRITON_VISION_HEALTH_URL", triton.url)
        assert main([]) == 0
        assert capsys.readouterr().out.startswith("healthy: cats answered")
        monkeypatch.setenv("TRITON_VISION_HEALTH_MODEL", "ensemble_lite")
        assert main([]) == 0
        assert capsys.readouterr().out.startswith("healthy: ensemble_lite answered")
        (tmp_path / "ensemble_lite").mkdir()
        (tmp_path / "ensemble_lite" / "probe.jpg").write_bytes(b"own")
        monkeypatch.setenv("TRITON_VISION_HEALTH_REPOSITORY", str(tmp_path))
        assert main([]) == 0
        assert dict(triton.seen)["POST /v2/models/ensemble_lite/infer"] == b"own"
        capsys.readouterr()
        assert main(["--model", "other"]) == 0
        assert capsys.readouterr().out.startswith("healthy: other answered")
    assert main(["--model", "other"]) == 1
    assert main(["--model", ","]) == 1
    assert main(["--url", "localhost:8000"]) == 1
    assert capsys.readouterr().out.endswith("give http://HOST:PORT\n")


def test_a_proxy_of_the_environment_is_not_taken(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert check(triton.url, "ensemble").healthy


def test_it_needs_the_standard_library_only() -> None:
    """So that it starts in a fraction of a second, whatever the environment holds."""
    code = "import sys, triton_vision.server.health; print(sorted(m.split('.')[0] for m in sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("numpy", "grpc", "google", "tritonclient", "triton_vision_client"):
        assert f"'{heavy}'" not in told


@pytest.mark.parametrize(
    "url",
    ["x:8000", "http://", "http://:8000", "http://x:99999", "http://x:abc", "http://x:0", "http://[::1", "http://x..y:1",
     "http://x:8000/ü", "http://x\n:8000"],
)  # fmt: skip
def test_what_is_no_address_is_one_line_that_says_how_to_write_one(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", url]) == 1
    assert capsys.readouterr().out == f"unhealthy: {url!r} is not an address: give http://HOST:PORT\n"


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0", "1e99"])
def test_a_timeout_that_is_none_is_one_line(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--timeout", timeout]) == 1
    assert capsys.readouterr().out == f"unhealthy: --timeout {float(timeout):g}: give seconds, at most 3600\n"


def test_a_name_that_commands_a_terminal_is_told_in_one_line(
    triton: Triton, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.ready = {}
    for name, shown in (("a\r\nb", "a\\r\\nb"), ("a\udcff", "a\\xff")):
        assert main(["--url", triton.url, "--model", name]) == 1
        assert capsys.readouterr().out.startswith(f"unhealthy: {shown} is not ready (HTTP 400: ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_report_that_cannot_be_written_is_one_sentence(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", health.__name__, "--url", "x"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"
