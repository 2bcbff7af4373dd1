"""What the documentation shows is run: the README's code, and the new stage of docs/stages.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_vision_client
from tritonclient import grpc as triton

from tests.conftest import ROOT
from triton_vision.server import TritonServer


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_documented_stage_runs_in_a_repository(repository: Path, tmp_path: Path) -> None:
    code, config = blocks("docs/stages.md", "python")[0], blocks("docs/stages.md", "protobuf")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    folder = tmp_path / "models"
    (folder / "grey" / "1").mkdir(parents=True)
    (folder / "grey" / "1" / "model.py").write_text(code)
    (folder / "grey" / "config.pbtxt").write_text(config)
    shutil.copytree(repository / "preprocess", folder / "preprocess")
    pixels = np.random.default_rng(1).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    inputs = [triton.InferInput("PIXELS", list(pixels.shape), "UINT8"), triton.InferInput("STATUS", [3, 1], "BYTES")]
    inputs[0].set_data_from_numpy(pixels)
    inputs[1].set_data_from_numpy(np.array([[b""], [b"empty: no bytes"], [b""]], np.object_))
    with TritonServer(folder) as server, triton.InferenceServerClient(server.grpc_address) as client:
        result = client.infer("grey", inputs, parameters={"on_bad_image": "mask"})
    expected = np.rint(pixels + 0.5 * (pixels.mean(axis=3, keepdims=True) - pixels)).astype(np.uint8)
    expected[1] = 0
    np.testing.assert_array_equal(result.as_numpy("GREY"), expected)
    assert result.as_numpy("STATUS").ravel().tolist() == [b"", b"empty: no bytes", b""]


def test_the_documented_stage_runs_without_triton() -> None:
    stage, runner = blocks("docs/stages.md", "python")
    config = 'name: "grey"\n' + blocks("docs/stages.md", "protobuf")[0]
    pixels = np.full((1, 224, 224, 3), (10, 20, 60), np.uint8)
    names: dict[str, Any] = {"config_text": config, "pixels": pixels}
    exec(stage + runner, names)
    np.testing.assert_array_equal(names["answer"].outputs["GREY"][0, 0, 0], (20, 25, 45))


@pytest.mark.parametrize("document", ["README.md", "client/README.md"])
def test_the_readmes_python_runs(server: TritonServer, document: str) -> None:
    for code in blocks(document, "python"):
        code = code.replace("localhost:8001", server.grpc_address)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "espresso" in done.stdout


@pytest.mark.parametrize("number", range(len(blocks("docs/client.md", "python"))))
def test_the_client_s_recipes_run(server: TritonServer, number: int) -> None:
    code = blocks("docs/client.md", "python")[number].replace("localhost:8001", server.grpc_address)
    code = code.replace("localhost:8000", server.http_address)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_has_an_example() -> None:
    shown = "\n".join(blocks("docs/client.md", "python"))
    for name in triton_vision_client.__all__:
        assert re.search(rf"\b{name}\b", shown), name


def test_the_readmes_curl_runs(server: TritonServer) -> None:
    (script,) = (block for block in blocks("README.md", "sh") if block.startswith("curl"))
    script = script.replace("localhost:8000", server.http_address)
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "espresso" in done.stdout


def test_the_readmes_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)`", readme)) <= targets
    commands = set(re.findall(r"triton-vision ([a-z]+)", readme))
    assert commands
    for command in commands:
        subprocess.run(
            [sys.executable, "-m", "triton_vision.cli.main", command, "--help"], check=True, capture_output=True
        )
