"""TorchScript, precisions, and networks that somebody brings along."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from triton_vision.export import artifact, check, graph, script
from triton_vision.export.networks import NETWORKS
from triton_vision.export.prepare import Options, prepare
from triton_vision.export.resnet50 import ResNet50, random_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch on its own exporters
RESNET, LITE = "resnet50_trt", "efficientnet_lite0"
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

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(1)
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


# -- TorchScript ----------------------------------------------------------------------------------------------------


def test_torchscript_is_frozen_and_holds_plain_operators(random_network: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(script.export(random_network))
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


def test_an_artifact_that_was_damaged_or_swapped_is_made_again_alone(repository: Path) -> None:
    folder = repository / RESNET / "1"
    assert prepare(repository, [RESNET], Options(weights="random")) == 0
    before = {name: (folder / name).stat().st_mtime_ns for name in ("model.onnx", "model.pt")}
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:-1000])
    assert prepare(repository, [RESNET], Options(weights="random")) == 0
    assert artifact.read(folder / "model.pt")
    assert (folder / "model.onnx").stat().st_mtime_ns == before["model.onnx"]


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


def test_other_classes_get_a_repository_of_their_own(repository: Path, tmp_path: Path) -> None:
    state = random_state(10, 4)
    torch.save(state, tmp_path / "ten.pth")
    (tmp_path / "ten.txt").write_text("".join(f"kind {number}\n" for number in range(10)))
    options = Options(weights=str(tmp_path / "ten.pth"), labels=tmp_path / "ten.txt", into=tmp_path / "own")
    assert prepare(repository, [], options) == 0
    own = tmp_path / "own"
    assert sorted(entry.name for entry in own.iterdir()) == ["ensemble", "postprocess", "preprocess", RESNET]
    for file in (own / RESNET).glob("**/*.pbtxt"):
        assert "dims: [ 10 ]" in file.read_text()
    assert "dims: [ 10 ]" in (own / "postprocess" / "config.pbtxt").read_text()
    assert (own / "postprocess" / "labels.txt").read_text().splitlines()[9] == "kind 9"
    module = ResNet50(10)
    module.load_state_dict(state)
    for name in ("model.onnx", "model.pt"):
        np.testing.assert_allclose(logits_of(own, name), expected(module.eval()), atol=1e-3)
    assert not (repository / RESNET / "1" / "model.onnx").exists()
    (own / "preprocess" / "config.pbtxt").write_text("# mine\n")
    assert prepare(repository, [], options) == 0  # again: up to date, and what was changed by hand stays
    assert (own / "preprocess" / "config.pbtxt").read_text() == "# mine\n"


def test_what_speaks_against_a_repository_of_its_own(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(random_state(10, 4), tmp_path / "ten.pth")
    weights = str(tmp_path / "ten.pth")
    (tmp_path / "nine.txt").write_text("label\n" * 9)
    (tmp_path / "gap.txt").write_text("label\n" * 4 + "\n" + "label\n" * 5)
    (tmp_path / "ten.txt").write_text("label\n" * 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    ten = tmp_path / "ten.txt"
    tried = {
        "has 10 classes, and resnet50_trt/config.pbtxt declares 1000; make a repository": Options(weights=weights),
        "has 9 lines; the network has 10 classes": Options(weights, labels=tmp_path / "nine.txt", into=tmp_path / "a"),
        "has an empty line (5)": Options(weights, labels=tmp_path / "gap.txt", into=tmp_path / "a"),
        "name its --weights FILE and its --labels FILE": Options(weights, into=tmp_path / "a"),
        "name a directory for it with --into": Options(weights, labels=ten),
        "is not empty and holds no": Options(weights, labels=ten, into=tmp_path / "full"),
        "must name another directory": Options(weights, labels=ten, into=repository),
    }
    for says, options in tried.items():
        assert prepare(repository, [RESNET], options) == 2
        said = capsys.readouterr()
        assert says in said.out + said.err
    assert not (tmp_path / "a").exists()
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("pixels", [False, True])
def test_a_torchscript_file(repository: Path, tmp_path: Path, pixels: bool) -> None:
    module: nn.Module = Small().eval()
    known = NETWORKS[RESNET]
    given: nn.Module = graph.FromPixels(module, known.mean, known.std).eval() if pixels else module
    example = torch.zeros(2, 224, 224, 3, dtype=torch.uint8) if pixels else torch.zeros(2, 3, 224, 224)
    torch.jit.save(torch.jit.trace(given, example), str(tmp_path / "mine.pt"))
    assert prepare(repository, [RESNET], Options(weights=str(tmp_path / "mine.pt"))) == 0
    for name in ("model.onnx", "model.pt"):
        np.testing.assert_allclose(logits_of(repository, name), expected(module), atol=1e-4)
        assert artifact.read(repository / RESNET / "1" / name)["weights_source"] == "mine.pt"


def to_onnx(module: nn.Module, path: Path, example: Any, *, dynamic: bool = True) -> None:
    axes = {"picture": {0: "n"}, "answer": {0: "n"}} if dynamic else None
    torch.onnx.export(
        module, (example,), str(path), input_names=["picture"], output_names=["answer"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip


@pytest.mark.parametrize("pixels", [False, True])
def test_an_onnx_file(repository: Path, tmp_path: Path, pixels: bool, capsys: pytest.CaptureFixture[str]) -> None:
    module: nn.Module = Small().eval()
    known = NETWORKS[RESNET]
    if pixels:
        example: Any = torch.zeros(1, 224, 224, 3, dtype=torch.uint8)
        to_onnx(graph.FromPixels(module, known.mean, known.std).eval(), tmp_path / "mine.onnx", example)
    else:
        to_onnx(module, tmp_path / "mine.onnx", torch.zeros(1, 3, 224, 224))
    assert prepare(repository, [RESNET], Options(weights="random")) == 0
    assert (repository / RESNET / "1" / "model.pt").exists()
    assert prepare(repository, [RESNET], Options(weights=str(tmp_path / "mine.onnx"))) == 0
    np.testing.assert_allclose(logits_of(repository, "model.onnx"), expected(module), atol=1e-4)
    # Two networks under one name would answer differently by variant.
    assert not (repository / RESNET / "1" / "model.pt").exists()
    assert "removed model.pt" in capsys.readouterr().out
    assert prepare(repository, [RESNET]) == 0  # it stays
    assert artifact.read(repository / RESNET / "1" / "model.onnx")["weights_source"] == "mine.onnx"


def test_a_normalisation_of_one_s_own(repository: Path, tmp_path: Path) -> None:
    module = Small().eval()
    to_onnx(module, tmp_path / "mine.onnx", torch.zeros(1, 3, 224, 224))
    options = Options(str(tmp_path / "mine.onnx"), mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 0.125))
    assert prepare(repository, [RESNET], options) == 0
    planes = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
    planes = (planes - torch.tensor([0.5, 0.25, 0.0]).view(3, 1, 1)) / torch.tensor([0.5, 1.0, 0.125]).view(3, 1, 1)
    np.testing.assert_allclose(logits_of(repository, "model.onnx"), module(planes).detach().numpy(), atol=1e-4)


def test_files_that_cannot_be_used_say_why(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Planes(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(dim=1)

    class Fixed(Small):
        def forward(self, x: Any) -> Any:
            return super().forward(x).reshape(1, 1000)

    example = torch.zeros(1, 3, 224, 224)
    (tmp_path / "junk.onnx").write_bytes(b"no protobuf")
    (tmp_path / "text.pt").write_text("no zip")
    to_onnx(Planes(), tmp_path / "planes.onnx", example)
    to_onnx(Fixed().eval(), tmp_path / "fixed.onnx", example, dynamic=False)
    to_onnx(Small(), tmp_path / "big.onnx", torch.zeros(1, 3, 256, 256))
    torch.jit.save(torch.jit.trace(Planes(), example), str(tmp_path / "planes.pt"))
    torch.save({}, tmp_path / "empty.pt")
    tried = {
        "junk.onnx": "junk.onnx cannot be read as ONNX",
        "text.pt": "text.pt cannot be read as a PyTorch state dict",
        "planes.onnx": "planes.onnx answers FLOAT with 3 dimensions",
        "fixed.onnx": "export it with a dynamic batch",
        "big.onnx": "big.onnx takes FLOAT [0, 3, 256, 256]; it must take",
        "planes.pt": "to two images it answers [2, 224, 224]",
        "empty.pt": "empty.pt holds no state dict",
        "none.pt": "there is no weights file",
    }
    for name, says in tried.items():
        assert prepare(repository, [RESNET], Options(weights=str(tmp_path / name))) == 2
        assert says in capsys.readouterr().out, name
    assert not list((repository / RESNET / "1").glob("model.[!p]*"))
    torch.jit.save(torch.jit.trace(Small().eval(), example), str(tmp_path / "own.pt"))
    assert prepare(repository, [RESNET], Options(str(tmp_path / "own.pt"), precision="fp16")) == 2
    assert "FP16 needs a state dict" in capsys.readouterr().out


def test_the_sidecars_are_json_that_names_the_tools(repository: Path) -> None:
    assert prepare(repository, [LITE]) == 0
    stated = json.loads((repository / LITE / "1" / "model.onnx.json").read_text())
    assert stated["tools"]["onnxruntime"] == onnxruntime.__version__
    assert len(stated["weights_sha256"]) == 64
