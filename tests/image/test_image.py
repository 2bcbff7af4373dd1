"""Dockerfile.triton, really built and really run on a local base: what is in the image, and what it does."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import numpy as np
import pytest
from triton_vision_client import ImageClient
from tritonclient import grpc as triton

from tests.conftest import ROOT, SAMPLES, jpeg
from tests.image.conftest import CANARY
from tests.image.container import EXPOSE, SAFE, Container
from tests.image.engine import KEPT, Engine

LITE = "ensemble_lite"
# Above the base: packages for serving (OpenVINO is half of them) and two networks, of ResNet-50 its TorchScript, too.
MOST_BYTES = 620e6
# Finds the Python stub of one model in the container and kills it as the container's user may.
KILL_STUB = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    words = (entry / "cmdline").read_bytes().decode().split("\\0")
    if words[0].endswith("triton_python_backend_stub") and f"/{sys.argv[1]}/" in words[1]:
        os.kill(int(entry.name), signal.SIGKILL)
        print("killed", entry.name)
"""


# -- What is in it -------------------------------------------------------------------------------------------------


def test_the_configuration_is_that_of_a_service_without_rights(engine: Engine, image: str, base: str) -> None:
    config = engine.inspect(image)["Config"]
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert set(config["Volumes"]) == {"/artifacts", "/tmp"}
    assert config["Entrypoint"][:4] == ["env", "--block-signal=TERM", "triton-vision", "serve"]
    assert config["Entrypoint"][-2:] == ["--host", "0.0.0.0"]
    assert not config["Cmd"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "triton_vision.server.health"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert labels["title"] == "Triton Vision Suite"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["base.name"] == base
    assert re.fullmatch(r"[0-9a-f]{40}", labels["revision"])
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert labels["version"] == version[1]


def test_no_layer_holds_a_secret_a_cache_or_what_only_the_build_needs(engine: Engine, image: str, base: str) -> None:
    unwanted = re.compile(
        r"(^|/)\.cache/|site-packages/(pip|setuptools|torch|openvino_telemetry)/|^(build|tmp|root|run)/."
        r"|\.whl$|(^|/)(pip\.conf|ca\.crt)$"
    )
    names: list[str] = []
    for name, content in added_files(engine, image, base):
        names.append(name)
        assert not unwanted.search(name), name
        assert not name.startswith("models/") or "__pycache__" not in name, name
        assert not contains(content, CANARY.encode()), f"{name} holds what pip was given as a secret"
    assert "models/efficientnet_lite0/1/model.onnx" in names
    assert {f"models/resnet50_trt/1/model.{kind}" for kind in ("onnx", "onnx.json", "pt", "pt.json")} <= set(names)
    history = engine.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert CANARY not in history
    assert not re.search(r"password|token|credential", history, re.IGNORECASE)
    config = json.dumps(engine.inspect(image)["Config"])
    assert not re.search(r"pip|proxy|password|token", config, re.IGNORECASE)


def test_its_own_layers_are_no_larger_than_serving_needs(engine: Engine, image: str, base: str) -> None:
    added = engine.inspect(image)["Size"] - engine.inspect(base)["Size"]
    assert added < MOST_BYTES


def test_packages_are_installed_and_torch_is_not(engine: Engine, image: str) -> None:
    code = (
        "import importlib.util as u, triton_vision, triton_vision_client;"
        "print([n for n in ('torch', 'pip', 'setuptools', 'pytriton') if u.find_spec(n)], triton_vision.__file__)"
    )
    inside = engine.docker("run", "--rm", *SAFE, "--network", "none", "--entrypoint", "python3", image, "-c", code)
    # Debian's own pip and setuptools are the base's, beside the environment that the image adds and uses.
    assert re.fullmatch(r"\[\] /opt/venv/lib/python3\.\d+/site-packages/triton_vision/__init__\.py\s*", inside)


def test_the_volume_belongs_to_the_user_and_nothing_else_does(engine: Engine, image: str) -> None:
    script = "id -u; touch /artifacts/kept && ls /artifacts; for p in /models /opt/venv /etc /; do test ! -w $p; done"
    volume = engine.docker("volume", "create").strip()
    try:
        mounted = ("--volume", f"{volume}:/artifacts")
        shell = ("run", "--rm", *SAFE, *mounted, "--entrypoint", "sh", image, "-ec")
        assert engine.docker(*shell, script).split() == ["10001", "kept"]
        assert engine.docker(*shell, "ls /artifacts").split() == ["kept"]
    finally:
        engine.docker("volume", "rm", volume)


def test_arguments_after_the_image_are_those_of_serve(engine: Engine, image: str) -> None:
    done = engine.try_docker("run", "--rm", *SAFE, image, EXPOSE, "--config-name", "no_such_variant")
    assert done.returncode == 2
    assert "no_such_variant" in done.stderr


def test_a_base_that_strangers_can_crash_is_not_exposed_unasked(engine: Engine, image: str) -> None:
    done = engine.try_docker("run", "--rm", *SAFE, image)
    assert done.returncode == 2
    assert "error: everyone who reaches gRPC on 0.0.0.0 could crash Triton 2.51.0 by " in done.stderr
    assert "--expose" in done.stderr


# -- What it does --------------------------------------------------------------------------------------------------


def test_it_is_healthy_and_says_what_it_serves(container: Container) -> None:
    log = container.logs()
    assert re.search(r"^ready: .*models: .*ensemble, ensemble_lite", log, re.MULTILINE), log
    health = container.wait_health("healthy")
    assert re.fullmatch(r"healthy: ensemble answered a photo in \d+ ms\s*", health["Log"][-1]["Output"])
    code, told = container.execute("python3", "-m", "triton_vision.server.health", "--model", "no_such_ensemble")
    assert code == 1
    assert told.startswith("unhealthy: no_such_ensemble is not ready")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("photo", "label"), [("coffee", "espresso"), ("cat", "cat"), ("rocket", "missile"), ("palace", "palace")]
)
def test_a_photo_gets_its_label_through_the_published_port(container: Container, photo: str, label: str) -> None:
    with ImageClient(container.address(8001), model=LITE) as client:
        result = client.classify(SAMPLES / f"{photo}.jpg")
    assert label in result.predictions[0].label


def test_random_weights_answer_and_every_start_says_what_they_are_worth(container: Container) -> None:
    with ImageClient(container.address(8001)) as client:
        assert len(client.classify(SAMPLES / "cat.jpg").predictions) == 5
    assert "made from random weights" in container.logs()


def test_batches_of_32_fit_into_64_mb_of_shared_memory(container: Container) -> None:
    """Several at once, since the stages hold their requests' tensors at the same time."""
    images = np.array([jpeg(seed, (640, 480)) for seed in range(32)], np.object_).reshape(-1, 1)

    def send(model: str) -> list[bytes]:
        tensor = triton.InferInput("IMAGE", [32, 1], "BYTES")
        tensor.set_data_from_numpy(images)
        with triton.InferenceServerClient(container.address(8001)) as client:
            answer = client.infer(model, [tensor])
        assert answer.as_numpy("LABELS").shape == (32, 5)
        status: list[bytes] = answer.as_numpy("STATUS").ravel().tolist()
        return status

    with ThreadPoolExecutor(4) as pool:
        for status in pool.map(send, [LITE, "ensemble"] * 6):
            assert status == [b""] * 32
    code, free = container.execute("df", "-k", "--output=size", "/dev/shm")
    assert (code, free.split()[-1]) == (0, str(64 * 1024))


def test_metrics_are_published(container: Container) -> None:
    with urllib.request.urlopen(f"http://{container.address(8002)}/metrics", timeout=10) as answer:
        assert b"triton_vision_images_total" in answer.read()


def test_no_process_has_a_right_or_root(container: Container) -> None:
    code, told = container.execute("sh", "-c", "cat /proc/[0-9]*/status | grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs)'")
    assert code == 0
    assert set(re.findall(r"Uid:\s+(\d+)", told)) == {"10001"}
    assert set(re.findall(r"Cap(?:Eff|Bnd):\s+(\w+)", told)) == {"0" * 16}
    assert set(re.findall(r"NoNewPrivs:\s+(\d)", told)) == {"1"}


@pytest.mark.parametrize("model", ["preprocess", "postprocess"])
def test_a_dead_stub_is_replaced_and_where_it_is_not_makes_it_unhealthy(engine: Engine, image: str, model: str) -> None:
    with Container(engine, image) as running:
        running.wait_ready()
        # A keeper that does nothing, as long as it is stopped.
        serve = running.state()["Pid"]
        os.kill(serve, signal.SIGSTOP)
        code, told = running.execute("python3", "-c", KILL_STUB, model)
        assert code == 0, told
        assert "killed" in told
        health = running.wait_health("unhealthy")
        assert re.search(r"unhealthy: ensemble is broken \(HTTP \d+: .*not healthy", health["Log"][-1]["Output"])
        assert health["FailingStreak"] >= 3
        # Triton's own readiness has noticed nothing, which is why the health check asks for an answer.
        with urllib.request.urlopen(f"http://{running.address(8000)}/v2/models/ensemble/ready", timeout=10) as answer:
            assert answer.status == 200
        os.kill(serve, signal.SIGCONT)
        running.wait_health("healthy")
        assert re.search(rf"^error: {model}: .* died; replacing the model's processes$", running.logs(), re.MULTILINE)
        assert running.logs().count("\nready: ") == 1


def test_another_port_and_another_ensemble_are_watched_where_told(engine: Engine, image: str) -> None:
    told = ("--env", "TRITON_VISION_HEALTH_URL=http://127.0.0.1:9000", "--env", f"TRITON_VISION_HEALTH_MODEL={LITE}")
    with Container(engine, image, "--http-port", "9000", options=told) as running:
        health = running.wait_health("healthy")
        assert f"healthy: {LITE} answered" in health["Log"][-1]["Output"]


def test_artifacts_in_the_volume_serve_a_repository_that_has_none(engine: Engine, image: str) -> None:
    ignored = shutil.ignore_patterns("model.onnx*", "model.pt*", "model.plan*", "__pycache__")
    volume = engine.docker("volume", "create").strip()
    try:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "model_repository", folder, dirs_exist_ok=True, ignore=ignored)
            os.chmod(folder, 0o755)
            copy = "mkdir -p /artifacts/efficientnet_lite0/1 && cp /models/efficientnet_lite0/1/model.onnx* $_"
            mounted = ("--volume", f"{volume}:/artifacts")
            engine.docker("run", "--rm", *SAFE, *mounted, "--entrypoint", "bash", image, "-ec", copy)
            told = (*mounted, "--volume", f"{folder}:/models:ro", "--env", f"TRITON_VISION_HEALTH_MODEL={LITE}")
            with Container(engine, image, options=told) as running:
                running.wait_ready()
                assert "left out: resnet50_trt" in running.logs()
                with ImageClient(running.address(8001), model=LITE) as client:
                    assert client.classify(SAMPLES / "coffee.jpg").predictions[0].label == "espresso"
    finally:
        engine.docker("volume", "rm", volume)


def test_it_ends_within_10_s_of_docker_stop_while_it_works(engine: Engine, image: str) -> None:
    with Container(engine, image) as running:
        running.wait_ready()
        address = running.address(8001)

        def call() -> int:
            answered = 0
            with ImageClient(address, model=LITE, retry=None) as client:
                for result in client.classify_many([SAMPLES / "coffee.jpg"] * 100_000):
                    assert result.error is None
                    answered += 1
            return answered

        with ThreadPoolExecutor(2) as pool:
            callers = [pool.submit(call) for _ in range(2)]
            # Work is under way once the server has counted some.
            wait_for_images(running.address(8002), 50)
            began = time.monotonic()
            engine.docker("stop", "--time", "20", running.name)
            took = time.monotonic() - began
            for caller in callers:
                assert caller.exception() is not None  # the server has left in the middle of it
        state = running.state()
        assert took < 10
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.3])
def test_an_end_as_soon_as_it_has_begun_is_clean(engine: Engine, image: str, after_s: float) -> None:
    """At moments before and after ``serve`` has its signal handlers."""
    with Container(engine, image) as running:
        time.sleep(after_s)  # the moment itself is what is tested
        began = time.monotonic()
        engine.docker("stop", "--time", "20", running.name)
        assert time.monotonic() - began < 10
        assert "ready: " not in running.logs()
        assert running.state()["ExitCode"] == 0


def test_an_end_while_it_starts_is_clean(engine: Engine, image: str) -> None:
    with Container(engine, image) as running:
        deadline = time.monotonic() + 60
        while "scale: " not in running.logs():  # serve has told what it will start
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "ready: " not in running.logs()
        began = time.monotonic()
        engine.docker("stop", "--time", "20", running.name)
        assert time.monotonic() - began < 10
        assert running.state()["ExitCode"] == 0


# -- Helpers -------------------------------------------------------------------------------------------------------


def wait_for_images(metrics: str, count: int) -> None:
    """Until the server's counter of images has grown by ``count``."""

    def images() -> float:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            rows = re.findall(r"^triton_vision_images_total\{.*\} (\S+)", answer.read().decode(), re.MULTILINE)
        return sum(map(float, rows))

    first, deadline = images(), time.monotonic() + 60
    while images() < first + count:
        assert time.monotonic() < deadline, "the server answers no images"
        time.sleep(0.1)


def added_files(engine: Engine, image: str, base: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each regular file in the layers that ``image`` has above ``base``."""
    skip = len(engine.inspect(base)["RootFS"]["Layers"])
    with tempfile.NamedTemporaryFile(dir=KEPT, suffix=".tar") as file:
        engine.docker("save", "--output", file.name, image, timeout=300)
        with tarfile.open(file.name) as saved:
            manifest = saved.extractfile("manifest.json")
            assert manifest is not None
            for layer in json.load(manifest)[0]["Layers"][skip:]:
                packed = saved.extractfile(layer)
                assert packed is not None
                with tarfile.open(fileobj=packed) as entries:
                    for entry in entries:
                        content = entries.extractfile(entry) if entry.isfile() else None
                        if content is not None:
                            yield entry.name, content


def contains(content: IO[bytes], word: bytes) -> bool:
    """Whether a file holds ``word``, read in pieces that overlap."""
    tail = b""
    while chunk := content.read(1 << 20):
        if word in tail + chunk:
            return True
        tail = chunk[-len(word) :]
    return False
