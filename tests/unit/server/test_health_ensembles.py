"""Which ensembles the health check asks, and with which photo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.server.scripted_triton import BROKEN, INPUT, LABELS, READY, Triton, config, error, triton
from triton_vision.probe import PHOTO
from triton_vision.server.health import check_all

__all__ = ["triton"]  # fixtures


def photos(triton: Triton) -> list[str]:
    return sorted(path.split("/")[3] for path, body in triton.seen if path.endswith("/infer"))


def test_every_image_ensemble_of_the_server_is_asked(triton: Triton) -> None:
    triton.serve(
        cats=config(),
        faces=config(outputs=["BOXES", "STATUS"]),
        core=config("onnxruntime_onnx"),
        foreign=config(outputs=["LABELS"]),
        single=config(batch=0),
        pair={**config(), "input": [INPUT, {**INPUT, "name": "MASK"}]},
        text={**config(), "input": [{**INPUT, "name": "TEXT"}]},
    )
    assert check_all(triton.url).healthy
    assert photos(triton) == ["cats", "faces"]
    triton.infer = {"cats": LABELS, "faces": BROKEN}
    assert check_all(triton.url).report.startswith("unhealthy: faces is broken")


def test_a_server_without_an_image_ensemble_has_to_be_ready(triton: Triton) -> None:
    triton.serve(core=config("onnxruntime_onnx"))
    triton.infer = BROKEN
    found = check_all(triton.url)
    assert found.healthy
    assert found.report == "healthy: the server is ready, and has no ensemble that takes a photo"
    triton.serve()
    triton.ready = error(400, "nothing is loaded")
    assert not check_all(triton.url).healthy


def test_a_server_that_has_unloaded_an_ensemble_is_unhealthy(triton: Triton, tmp_path: Path) -> None:
    triton.serve(core=config("onnxruntime_onnx"), cats=config())
    for name in ("cats", "dogs", "left_out", "old_core"):
        (tmp_path / name).mkdir()
        kind = "onnxruntime" if name == "old_core" else "ensemble"
        (tmp_path / name / "config.pbtxt").write_text(f'platform: "{kind}" input {{ name: "IMAGE" }} "STATUS"')
    triton.unloaded = {"dogs", "old_core"}
    assert check_all(triton.url, repository=tmp_path).report == "unhealthy: dogs has been unloaded"
    assert check_all(triton.url).healthy  # nothing says that dogs was an ensemble
    del triton.models["cats"]
    triton.unloaded = {"ensemble"}
    assert check_all(triton.url).report == "unhealthy: ensemble has been unloaded"


def test_what_is_loaded_and_cannot_be_asked_is_named(triton: Triton) -> None:
    triton.serve(cats=config(), **{"my pipe": config()})
    assert check_all(triton.url).report == (
        "unhealthy: my pipe is loaded, but cannot be asked over HTTP "
        "(HTTP 404: Request for unknown model: 'my%20pipe' is not found)"
    )


@pytest.mark.parametrize("closed", [{"stats"}, {"config"}, {"stats", "config", "ready"}])
def test_the_known_names_are_asked_where_the_server_does_not_tell_its_own(triton: Triton, closed: set[str]) -> None:
    triton.closed = closed
    triton.serve(cats=config())
    triton.ready = {"ensemble_lite": READY}
    triton.infer = {"ensemble_lite": LABELS}
    assert check_all(triton.url).report.startswith("healthy: ensemble_lite answered")
    triton.ready = {"cats": READY}
    triton.infer = {"cats": LABELS}
    found = check_all(triton.url)
    assert not found.healthy
    assert found.report.endswith("name it with --model or $TRITON_VISION_HEALTH_MODEL")
    assert check_all(triton.url, ["cats"]).healthy


def test_of_the_names_given_those_that_are_served_are_asked(triton: Triton) -> None:
    triton.serve(cats=config(), dogs=config(), birds=config())
    triton.ready = {"cats": READY, "dogs": READY, "birds": READY}
    triton.infer = {"cats": LABELS, "dogs": LABELS, "birds": BROKEN}
    assert check_all(triton.url, ["fish", "cats", "dogs"]).healthy
    assert photos(triton) == ["cats", "dogs"]
    assert not check_all(triton.url, ["cats", "birds"]).healthy
    assert check_all(triton.url, ["fish"]).report.startswith("unhealthy: fish is not ready (HTTP 400")


def test_an_ensemble_has_a_photo_of_its_own(triton: Triton, tmp_path: Path) -> None:
    triton.serve(cats=config(), dogs=config())
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "probe.jpg").write_bytes(b"a cat")
    assert check_all(triton.url, repository=tmp_path).healthy
    sent = dict(triton.seen)
    assert sent["POST /v2/models/cats/infer"] == b"a cat"
    assert sent["POST /v2/models/dogs/infer"] == PHOTO.read_bytes()
    (tmp_path / "dogs" / "probe.jpg").mkdir(parents=True)
    assert check_all(triton.url, repository=tmp_path).report == (
        f"unhealthy: {tmp_path}/dogs/probe.jpg cannot be read (must be a file of at most 33554432 bytes)"
    )


def test_no_file_outside_the_repository_is_sent(triton: Triton, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "probe.jpg").write_bytes(b"a secret")
    for name in ("..", "../", ".", "a/.."):
        (tmp_path / "repository" / "probe.jpg").write_bytes(b"a secret")
        check_all(triton.url, [name], repository=tmp_path / "repository")
    assert not [body for _, body in triton.seen if b"secret" in body]
