"""TorchScript, precisions, and networks that somebody brings along."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
import pytest
import torch

from tests.export.making import LITE, PIXELS, RESNET, logits_of, random_network, repository, script
from triton_vision.export import artifact, check, graph
from triton_vision.export import script as torchscript
from triton_vision.export.prepare import Options, prepare

__all__ = ["random_network", "repository"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch on its own exporters


# -- TorchScript ----------------------------------------------------------------------------------------------------


def test_torchscript_is_frozen_and_holds_plain_operators(random_network: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(torchscript.export(random_network))
    loaded = torch.jit.load(str(path))
    for batch in (1, 3):
        found = loaded(torch.from_numpy(PIXELS[:batch]))
        assert found.dtype == torch.float32
        assert list(found.shape) == [batch, 1000]
        np.testing.assert_allclose(found.numpy(), check.run_module(random_network)(PIXELS[:batch]), atol=1e-4)
    assert not list(loaded.parameters())  # frozen
    kinds = {node.kind() for node in loaded.inlined_graph.nodes()}
    assert kinds <= {"prim::Constant", "prim::ListConstruct"} | {
        f"aten::{name}" for name in
        ("to", "permute", "mul", "add", "_convolution", "relu", "max_pool2d", "mean", "linear")
    }  # fmt: skip
    with zipfile.ZipFile(path) as archive:
        (version,) = [name for name in archive.namelist() if name.endswith("/version")]
        # The oldest archive version, which every LibTorch since 1.4 reads.
        assert int(archive.read(version)) == 3


def test_prepare_makes_both_from_one_module(repository: Path, random_network: Any) -> None:
    assert prepare(repository, [RESNET], Options(weights="random")) == 0
    for name in ("model.onnx", "model.pt"):
        np.testing.assert_allclose(logits_of(repository, name), check.run_module(random_network)(PIXELS), atol=1e-3)
        stated = artifact.read(repository / RESNET / "1" / name)
        assert stated["precision"] == "fp32"
        assert stated["tensors"] == {
            "input": [{"name": "INPUT__0", "datatype": "UINT8", "dims": [224, 224, 3]}],
            "output": [{"name": "OUTPUT__0", "datatype": "FP32", "dims": [1000]}],
        }
        assert stated["max_abs_logit_difference"] < 1e-3
        assert re.fullmatch(r"8 of 8", stated["label_agreement"])
        assert stated["tools"]["torch"] == torch.__version__


def test_an_artifact_that_was_damaged_or_swapped_is_made_again_alone(repository: Path, tmp_path: Path) -> None:
    folder = repository / RESNET / "1"
    options = Options(weights=script(tmp_path / "own.pt"))
    assert prepare(repository, [RESNET], options) == 0
    before = (folder / "model.onnx").stat().st_mtime_ns
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:-1000])
    assert prepare(repository, [RESNET], options) == 0
    assert artifact.read(folder / "model.pt")
    assert (folder / "model.onnx").stat().st_mtime_ns == before


def test_somebody_s_own_is_not_replaced_by_published_weights(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository / RESNET / "1"
    monkeypatch.setattr("triton_vision.export.networks.imagenet_checkpoint", pytest.fail)
    assert prepare(repository, [RESNET], Options(script(tmp_path / "own.pt"))) == 0
    assert prepare(repository, [RESNET]) == 0
    kept = {
        name: (folder / name).read_bytes() for name in ("model.onnx", "model.pt", "model.onnx.json", "model.pt.json")
    }

    def restored() -> None:
        for name, content in kept.items():
            (folder / name).write_bytes(content)

    def says(words: str, options: Options | None = None) -> None:
        assert prepare(repository, [RESNET], options) == 2
        assert words in capsys.readouterr().out
        restored()

    says("make it otherwise", Options(mean=(0.1, 0.1, 0.1)))
    says("make it otherwise", Options(precision="fp16"))
    (folder / "model.onnx.json").unlink()
    says("model.onnx is there without a sidecar, so it is somebody's own")
    (folder / "model.onnx").write_bytes(b"half")
    says("model.onnx of own.pt is damaged: name that again with --weights")
    (folder / "model.pt").unlink()
    says("model.pt of own.pt is damaged")
    (folder / "model.pt").unlink()
    (folder / "model.pt.json").unlink()
    says("there is no model.pt beside model.onnx of own.pt")
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    assert prepare(other, [RESNET], Options(script(tmp_path / "new.pt", seed=2))) == 0
    for name in ("model.pt", "model.pt.json"):
        shutil.copy(other / RESNET / "1" / name, folder / name)
    says("model.pt is of new.pt and model.onnx of own.pt, so the variants answer differently")
    assert prepare(repository, [RESNET]) == 0


def test_a_full_disk_costs_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    known = {"weights": "file", "weights_source": "a", "weights_sha256": "", "tools": {}}
    artifact.write(path, b"old", {"sha256": hashlib.sha256(b"old").hexdigest(), **known})

    def full(descriptor: int) -> None:  # noqa: ARG001 - fsync's
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        artifact.write(path, b"new", {"sha256": hashlib.sha256(b"new").hexdigest(), **known})
    assert artifact.read(path)["weights"] == "file"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "model.onnx.json"]


# -- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_precisions(repository: Path, tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "pixels.npy", check.samples())
    calibration = tmp_path / "pixels.npy" if precision == "int8" else None
    options = Options(precision=precision, calibration=calibration)
    assert prepare(repository, [LITE], options) == 0
    assert "the best label agrees on" in capsys.readouterr().out
    path = repository / LITE / "1" / "model.onnx"
    stated = artifact.read(path)
    assert stated["precision"] == precision
    content = path.read_bytes()
    graph.check_structure(content)  # the cast, the tensors and the dynamic batch are the same
    model = onnx.load_from_string(content)
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert (onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.INT8) in kinds
    if precision == "int8":
        assert [entry.domain for entry in model.opset_import] == [""]
        quantized = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
        assert quantized
        points = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):  # TensorRT takes symmetric ranges alone
                assert not points[node.input[2]].any()
        producers = {node.output[0]: node.op_type for node in model.graph.node}
        for node in model.graph.node:
            if node.op_type == "Conv":
                assert [producers[source] for source in node.input[:2]] == ["DequantizeLinear"] * 2
    assert prepare(repository, [LITE], options) == 0
    assert "up to date" in capsys.readouterr().out
    assert prepare(repository, [LITE]) == 0  # fp32 again
    assert artifact.read(path)["precision"] == "fp32"


def test_int8_without_images_says_what_to_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(repository, [LITE], Options(precision="int8")) == 2
    assert "--calibration FOLDER" in capsys.readouterr().err


def test_an_artifact_that_is_too_far_off_is_not_kept() -> None:
    def run(pixels: Any) -> Any:
        return pixels.reshape(len(pixels), -1)[:, :10].astype(np.float32)

    def skewed(by: float) -> Any:
        return lambda pixels: run(pixels) + by * run(pixels).std() * np.arange(10, dtype=np.float32)

    check.compare(run, skewed(0.01), check.samples(), "int8")
    for precision, by in (("fp32", 0.001), ("fp16", 0.1), ("int8", 1.0), ("fp32", float("nan"))):
        with pytest.raises(graph.GraphError, match="differ too much"):
            check.compare(run, skewed(by), check.samples(), precision)
    with pytest.raises(graph.GraphError, match="answers"):
        check.compare(run, lambda pixels: run(pixels)[:, :9], check.samples())


# -- networks of one's own ------------------------------------------------------------------------------------------


def test_the_sidecars_are_json_that_names_the_tools(repository: Path) -> None:
    assert prepare(repository, [LITE]) == 0
    stated = json.loads((repository / LITE / "1" / "model.onnx.json").read_text())
    assert stated["tools"]["onnxruntime"] == onnxruntime.__version__
    assert len(stated["weights_sha256"]) == 64
