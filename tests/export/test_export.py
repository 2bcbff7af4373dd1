"""Export, where torch is: the graph's structure and numbers, weights of every kind, and interrupted runs.

Run with the export environment's pytest.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from triton_vision.export import artifact, check, graph
from triton_vision.export.networks import NETWORKS
from triton_vision.export.prepare import Options, prepare
from triton_vision.export.resnet50 import ResNet50, random_state

RESNET, LITE = "resnet50_trt", "efficientnet_lite0"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in NETWORKS:
        (tmp_path / "models" / name).mkdir(parents=True)
    return tmp_path / "models"


@pytest.fixture(scope="module", params=list(NETWORKS))
def exported(request: pytest.FixtureRequest) -> tuple[Any, bytes]:
    network = NETWORKS[request.param]
    module, _ = network.build("random" if network.takes_weights else None)
    whole = graph.FromPixels(module, network.mean, network.std).eval()
    return whole, graph.export(whole)


def test_a_cast_is_the_only_consumer_of_the_input(exported: tuple[Any, bytes]) -> None:
    model = onnx.load_from_string(exported[1])
    assert [node.op_type for node in model.graph.node if "INPUT__0" in node.input] == ["Cast"]
    (given,), (answer,) = model.graph.input, model.graph.output
    assert (given.name, answer.name) == ("INPUT__0", "OUTPUT__0")
    assert given.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert answer.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    dims = given.type.tensor_type.shape.dim
    constants = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:  # TensorRT takes nothing else for a bias
        assert node.op_type != "Conv" or set(node.input[1:]) <= constants
    assert dims[0].dim_param
    assert [size.dim_value for size in dims[1:]] == [224, 224, 3]


@pytest.mark.parametrize("batch", [1, 5])
def test_onnx_runtime_equals_pytorch(exported: tuple[Any, bytes], batch: int) -> None:
    module, content = exported
    pixels = np.random.default_rng(1).integers(0, 256, (batch, 224, 224, 3), dtype=np.uint8)
    (found,) = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"INPUT__0": pixels})
    with torch.no_grad():
        expected = module(torch.from_numpy(pixels)).numpy()
    assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_normalisation_is_the_recipe(name: str) -> None:
    network = NETWORKS[name]
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(1, 256, 1, 3).contiguous()
    found = graph.FromPixels(torch.nn.Identity(), network.mean, network.std)(pixels)[0, :, :, 0].numpy()
    values = np.arange(256)
    if name == LITE:
        expected = np.stack([(values - 127) / 128] * 3)
    else:
        expected = (values / 255 - np.array([[0.485], [0.456], [0.406]])) / np.array([[0.229], [0.224], [0.225]])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_graph_whose_input_is_read_otherwise_is_refused() -> None:
    class TwoReaders(torch.nn.Module):
        def forward(self, pixels: Any) -> Any:
            return pixels.to(torch.float32).mean(dim=(1, 2)) + (pixels > 3).to(torch.float32).mean(dim=(1, 2))

    with pytest.raises(graph.GraphError, match="must be read by one Cast alone"):
        graph.export(TwoReaders())


def test_a_graph_with_other_numbers_is_refused(exported: tuple[Any, bytes]) -> None:
    module, content = exported

    class Skewed(torch.nn.Module):
        def forward(self, pixels: Any) -> Any:
            return module(pixels) * 1.01

    with pytest.raises(graph.GraphError, match="differ"):
        check.compare(check.run_module(Skewed()), check.run_graph(content), check.samples())


def test_the_state_dict_is_torchvisions() -> None:
    """torchvision's resnet50() has 320 entries in this order of layers, 25,557,032 parameters in all."""
    state = ResNet50().state_dict()
    assert len(state) == 320
    assert sum(parameter.numel() for parameter in ResNet50().parameters()) == 25_557_032
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["conv1.weight", *(f"bn1.{part}" for part in norm)]
    for layer, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            for number in (1, 2, 3):
                names += [f"layer{layer}.{block}.conv{number}.weight"]
                names += [f"layer{layer}.{block}.bn{number}.{part}" for part in norm]
            if block == 0:
                names += [f"layer{layer}.0.downsample.0.weight"]
                names += [f"layer{layer}.0.downsample.1.{part}" for part in norm]
    assert list(state) == [*names, "fc.weight", "fc.bias"]
    assert state["layer3.0.conv2.weight"].shape == (256, 256, 3, 3)
    assert state["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    assert ResNet50().layer2[0].conv2.stride == (2, 2)  # v1.5, as torchvision


def test_random_weights_are_seeded() -> None:
    one, two, other = random_state(10, 1), random_state(10, 1), random_state(10, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_prepare_keeps_what_is_up_to_date(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(repository, [LITE]) == 0
    path = repository / LITE / "1" / "model.onnx"
    made = path.stat().st_mtime_ns
    sidecar = json.loads((path.parent / "model.onnx.json").read_text())
    assert sidecar["weights"] == "package"
    assert sidecar["max_abs_logit_difference"] < 1e-3
    assert sidecar["tools"]["torch"] == torch.__version__
    assert prepare(repository, [LITE]) == 0
    assert path.stat().st_mtime_ns == made
    assert "up to date" in capsys.readouterr().out
    path.write_bytes(b"damaged")
    assert prepare(repository, [LITE]) == 0
    assert artifact.read(path)["sha256"] == sidecar["sha256"]


@pytest.mark.parametrize(("nested", "prefix"), [("", ""), ("state_dict", "module."), ("model", "_orig_mod.model.")])
def test_a_weights_file(repository: Path, tmp_path: Path, nested: str, prefix: str) -> None:
    state: dict[str, Any] = {prefix + name: value for name, value in random_state(1000, 3).items()}
    if nested:
        state = {"epoch": 3, nested: state}
    torch.save(state, tmp_path / "mine.pth")
    assert prepare(repository, [RESNET], Options(weights=str(tmp_path / "mine.pth"))) == 0
    description = artifact.read(repository / RESNET / "1" / "model.onnx")
    assert (description["weights"], description["weights_source"]) == ("file", "mine.pth")
    assert prepare(repository, [RESNET]) == 0  # what somebody brought is not replaced unless asked for
    assert artifact.read(repository / RESNET / "1" / "model.onnx") == description


def test_wrong_weights_are_one_sentence_and_cost_nothing(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = repository / RESNET / "1" / "model.onnx"
    kept.parent.mkdir()
    artifact.write(kept, b"old", {"sha256": "x"})
    good = random_state(1000, 1)
    bad: dict[str, Any] = {
        "junk": b"no pickle",
        "list": [1, 2],
        "few": {name: value for name, value in good.items() if not name.startswith("layer3")},
        "classes": random_state(10, 1),
        "shape": {**good, "conv1.weight": torch.zeros(64, 3, 3, 3)},
        "other": {"a": torch.zeros(1)},
    }
    for name, content in bad.items():
        path = tmp_path / f"{name}.pth"
        path.write_bytes(content) if name == "junk" else torch.save(content, path)
        assert prepare(repository, [RESNET], Options(weights=str(path))) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{RESNET}: not made: {path.name}"), line
        assert kept.read_bytes() == b"old"


def test_weights_that_cannot_be_had_do_not_stop_the_rest(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triton_vision.export.networks.imagenet_checkpoint", _unreachable)
    assert prepare(repository, []) == 1
    out = capsys.readouterr().out
    assert "resnet50_trt: not made: the sky cannot be downloaded" in out
    assert "efficientnet_lite0: made 1/model.onnx" in out


def _unreachable() -> Any:
    from triton_vision.export.weights import WeightsError

    raise WeightsError("the sky cannot be downloaded")


def test_unknown_models_and_weights_for_nobody(repository: Path) -> None:
    assert prepare(repository, ["nonesuch"]) == 2
    assert prepare(repository, [LITE], Options(weights="random")) == 2
    shutil.rmtree(repository / LITE)
    assert prepare(repository, [LITE]) == 2


def test_a_killed_prepare_leaves_nothing_that_breaks_the_next(repository: Path) -> None:
    command = [sys.executable, "-m", "triton_vision.export", str(repository), RESNET, "--weights", "random"]
    folder = repository / RESNET / "1"
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not list(folder.glob(".model.onnx*.tmp")) and not (folder / "model.onnx").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert subprocess.run(command, check=False).returncode == 0
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "model.onnx", "model.onnx.json", "model.pt", "model.pt.json"
    ]  # fmt: skip
    for name in ("model.onnx", "model.pt"):
        assert artifact.read(folder / name)["weights"] == "random"
