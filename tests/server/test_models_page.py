"""docs/models.md: its own network, from the checkpoint to the labels, as the page says it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from tests.conftest import COMMAND, ROOT
from tests.server.serving import Serve
from tests.server.test_docs import blocks


def test_from_a_checkpoint_to_labels(tmp_path: Path) -> None:
    (training,) = blocks("docs/models.md", "python")
    labels, prepare, serve, classify = blocks("docs/models.md", "sh")
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    (tmp_path / "model_repository").symlink_to(ROOT / "model_repository")
    export = str(ROOT / ".venv-export" / "bin" / "python")
    environment = {**os.environ, "TRITON_VISION_EXPORT_PYTHON": export}
    subprocess.run([export, "-c", training], cwd=tmp_path, check=True)
    subprocess.run(["bash", "-euc", labels], cwd=tmp_path, check=True)

    def run(line: str, *more: str) -> str:
        command = [*COMMAND, *shlex.split(line)[1:], *more]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    said = run(prepare)
    for name in ("model.onnx", "model.pt"):
        assert f"resnet50_trt: made 1/{name}" in said
    page = (ROOT / "docs" / "models.md").read_text().splitlines()
    (assumed,) = (line for line in page if line.startswith("ensemble: "))
    assert assumed in said.splitlines()
    words = shlex.split(serve)
    assert words[:3] == ["triton-vision", "serve", "--repository"]
    server = Serve(tmp_path / words[3])
    try:
        server.until_ready()
        assert not [line for line in server.lines if line.startswith("left out")]
        (row,) = run(classify, "--url", server.grpc).splitlines()
    finally:
        server.process.terminate()
        server.process.communicate(timeout=10)
    known = set((tmp_path / "flowers.txt").read_text().split())
    path, *answers = row.split()
    assert path == "samples/coffee.jpg"
    assert len(known) == 10
    assert len(answers) == 6
    assert set(answers[::2]) <= known
