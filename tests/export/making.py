"""A repository to prepare, and networks to make artifacts from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from triton_vision.export import check, graph
from triton_vision.export.networks import NETWORKS

RESNET = "resnet50_trt"


LITE = "efficientnet_lite0"


REPOSITORY = Path(__file__).parents[2] / "model_repository"


PIXELS = np.random.default_rng(5).integers(0, 256, (5, 224, 224, 3), dtype=np.uint8)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.onnx*", "*.pt", "*.pt.json", "__pycache__")
    shutil.copytree(REPOSITORY, tmp_path / "models", ignore=ignored)
    return tmp_path / "models"


@pytest.fixture(scope="module")
def random_network() -> Any:
    network = NETWORKS[RESNET]
    module, _ = network.build("random")
    return graph.FromPixels(module, network.mean, network.std).eval()


class Small(nn.Module):
    """A network of somebody's own: FP32 ``[N, 3, 224, 224]`` to ``[N, classes]``."""

    def __init__(self, classes: int = 1000, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 7, 4)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.relu(self.conv(x)).mean(dim=(2, 3)))


def logits_of(folder: Path, name: str) -> Any:
    content = (folder / RESNET / "1" / name).read_bytes()
    return (check.run_script if name == "model.pt" else check.run_graph)(content)(PIXELS)


def expected(module: nn.Module, network: str = RESNET) -> Any:
    known = NETWORKS[network]
    return check.run_module(graph.FromPixels(module, known.mean, known.std).eval())(PIXELS)


def script(path: Path, classes: int = 1000, seed: int = 1) -> str:
    """A small network as a TorchScript file."""
    torch.jit.save(torch.jit.trace(Small(classes, seed).eval(), torch.zeros(2, 3, 224, 224)), str(path))
    return str(path)


def to_onnx(module: nn.Module, path: Path, example: Any, *, dynamic: bool = True) -> None:
    axes = {"picture": {0: "n"}, "answer": {0: "n"}} if dynamic else None
    torch.onnx.export(
        module, (example,), str(path), input_names=["picture"], output_names=["answer"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
