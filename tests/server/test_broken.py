"""What serve does with models that are broken: each takes down its own pipeline only, and says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from triton_vision_client import ImageClient

from tests.conftest import SAMPLES
from tests.server.serving import Serve, echo, regions, serve

__all__ = ["echo", "serve"]  # fixtures


def test_a_model_that_does_not_load_is_named_with_its_reason(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "echo" / "broken").touch()
    one = serve(echo, "--log-level", "error", "--shm-prefix", "tv_test_broken_")
    _, error = one.process.communicate(timeout=60)
    assert one.process.returncode == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: echo does not load: ")
    assert "the sky is green" in last
    assert "(echo/1/model.py, line " in last
    assert "/dev/shm" not in last
    assert len([line for line in error.splitlines() if "the sky is green" in line]) == 1
    assert not regions("tv_test_broken_")


def test_a_broken_model_takes_down_its_own_pipeline_only(serve: Callable[..., Serve], echo: Path) -> None:
    shutil.copytree(echo / "echo", echo / "bad")
    (echo / "bad" / "broken").touch()
    config = echo / "bad" / "config.pbtxt"
    config.write_text(config.read_text().replace('"echo"', '"bad"'))
    one = serve(echo, "--log-level", "error", "--require", "echo")
    assert one.until_ready().startswith("ready: 1 of 2 pipelines: echo | gRPC ")
    one.process.terminate()
    _, error = one.process.communicate(timeout=60)
    complaints = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1
    assert complaints[0].startswith("error: bad does not load: ")


def test_without_a_pipeline_there_is_nothing_to_serve(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "chain").mkdir()
    (echo / "chain" / "config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step [ { model_name: "echo" }, { model_name: "gone" } ] }'
    )
    for options, told in (
        ((), "there is nothing to serve: chain left out, as said above"),
        (("--require", "chain"), "chain, which --require names, chains gone, which is not in the repository"),
    ):
        one = serve(echo, *options)
        said, error = one.process.communicate(timeout=60)
        assert one.process.returncode == 2
        assert "left out: chain: chains gone, which is not in the repository" in said
        assert error.strip() == f"error: {told}"
    shutil.rmtree(echo / "chain")
    (echo / "stray").mkdir()
    one = serve(echo, "--strict")
    _, error = one.process.communicate(timeout=60)
    assert (one.process.returncode, error.strip()) == (2, "error: --strict: left out: stray")


def test_a_model_whose_process_dies_while_loading_is_named(serve: Callable[..., Serve], echo: Path) -> None:
    (echo / "echo" / "1" / "model.py").write_text("import os, time\ntime.sleep(1)\nos._exit(3)\n")
    one = serve(echo)
    _, error = one.process.communicate(timeout=60)
    assert one.process.returncode == 2
    assert error.strip().splitlines()[-1] == "error: echo does not load: its Python process died while loading it"


def test_models_without_artifacts_are_left_out_with_the_reason(
    serve: Callable[..., Serve], repository: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    shutil.copytree(repository, part)
    (part / "resnet50_trt" / "1" / "model.onnx").unlink()
    one = serve(part)
    line = one.until_ready()
    said = "\n".join(one.lines)
    mend = f"make it: triton-vision prepare resnet50_trt --repository {part}"
    assert f"left out: resnet50_trt: has no 1/model.onnx ({mend})" in said
    assert "left out: ensemble: chains resnet50_trt, which is left out" in said
    assert "ensemble_lite" in line
    with ImageClient(one.grpc, model="ensemble_lite") as client:
        assert "espresso" in client.classify(SAMPLES / "coffee.jpg").predictions[0].label


def test_random_weights_are_said_at_every_start(serve: Callable[..., Serve], repository: Path) -> None:
    one = serve(repository)
    one.until_ready()
    assert "warning: resnet50_trt, ensemble: made from random weights, so the answers mean nothing" in one.lines
