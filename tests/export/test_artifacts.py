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
from torch import nn

from triton_vision.export import artifact, check, graph
from triton_vision.export import script as torchscript
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


def script(path: Path, classes: int = 1000, seed: int = 1) -> str:
    """A small network as a TorchScript file."""
    torch.jit.save(torch.jit.trace(Small(classes, seed).eval(), torch.zeros(2, 3, 224, 224)), str(path))
    return str(path)


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
        "lies in the repository": Options(weights, labels=ten, into=repository / "mine"),
        "is a file; --into names a directory": Options(weights, labels=ten, into=ten),
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


@pytest.mark.parametrize(("given", "answer"), [("INPUT__0", "OUTPUT__0"), ("OUTPUT__0", "INPUT__0")])
def test_an_onnx_file_with_the_contract_s_own_names(repository: Path, tmp_path: Path, given: str, answer: str) -> None:
    module = Small().eval()
    torch.onnx.export(
        module, (torch.zeros(1, 3, 224, 224),), str(tmp_path / "mine.onnx"), input_names=[given],
        output_names=[answer], dynamic_axes={given: {0: "n"}, answer: {0: "n"}}, opset_version=17, dynamo=False,
        keep_initializers_as_inputs=True,
    )  # fmt: skip
    assert prepare(repository, [RESNET], Options(weights=str(tmp_path / "mine.onnx"))) == 0
    np.testing.assert_allclose(logits_of(repository, "model.onnx"), expected(module), atol=1e-4)


def test_an_onnx_file_whose_weights_lie_beside_it(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.onnx"
    found = []
    for seed in (1, 2):
        module = Small().eval()
        with torch.no_grad():
            module.fc.bias.fill_(seed)
        to_onnx(module, path, torch.zeros(1, 3, 224, 224))
        onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="mine.data", size_threshold=0)
        assert prepare(repository, [RESNET], Options(weights=str(path))) == 0
        found.append(logits_of(repository, "model.onnx"))
    assert np.abs(found[0] - found[1]).min() > 0.5  # the second training is not taken for the first


def test_a_copy_that_was_cut_short_is_made_anew(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "ten.txt").write_text("".join(f"kind {number}\n" for number in range(10)))
    own = tmp_path / "own"
    (own / f".{RESNET}.half").mkdir(parents=True)
    options = Options(script(tmp_path / "own.pt", 10), labels=tmp_path / "ten.txt", into=own)
    assert prepare(repository, [], options) == 0
    assert sorted(entry.name for entry in own.iterdir()) == ["ensemble", "postprocess", "preprocess", RESNET]


def test_an_onnx_file_of_tomorrow_is_taken_with_a_note(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Small().eval()
    to_onnx(module, tmp_path / "mine.onnx", torch.zeros(1, 3, 224, 224))
    onnx.save(onnx.version_converter.convert_version(onnx.load(str(tmp_path / "mine.onnx")), 22), tmp_path / "new.onnx")
    assert prepare(repository, [RESNET], Options(weights=str(tmp_path / "new.onnx"))) == 0
    assert "note: new.onnx has opset 22" in capsys.readouterr().out


def test_a_failed_prepare_changes_nothing_in_a_repository_of_its_own(repository: Path, tmp_path: Path) -> None:
    for classes in (10, 12):
        script(tmp_path / f"{classes}.pt", classes)
        (tmp_path / f"{classes}.txt").write_text("".join(f"{classes}-{number}\n" for number in range(classes)))
    own = tmp_path / "own"

    def options(classes: int, **more: Any) -> Options:
        return Options(str(tmp_path / f"{classes}.pt"), labels=tmp_path / f"{classes}.txt", into=own, **more)

    def state() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in own.rglob("*") if file.is_file()}

    assert prepare(repository, [], options(10)) == 0
    before = state()
    np.save(tmp_path / "bad.npy", np.zeros((2, 3), np.uint8))
    assert prepare(repository, [], options(12, precision="int8", calibration=tmp_path / "bad.npy")) == 2
    assert state() == before
    assert prepare(repository, [], options(12)) == 0
    assert "dims: [ 12 ]" in (own / "postprocess" / "config.pbtxt").read_text()
    assert artifact.read(own / RESNET / "1" / "model.pt")["tensors"]["output"][0]["dims"] == [12]
    (tmp_path / "12.txt").write_text("".join(f"other {number}\n" for number in range(12)))
    assert prepare(repository, [], options(12)) == 0  # other names for the same network
    assert (own / RESNET / "1" / "model.onnx").exists()
    assert "other 3" in (own / "postprocess" / "labels.txt").read_text()


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

    class Double(Small):
        def forward(self, x: Any) -> Any:
            return super().forward(x).double()

    example = torch.zeros(1, 3, 224, 224)
    (tmp_path / "junk.onnx").write_bytes(b"no protobuf")
    (tmp_path / "text.pt").write_text("no zip")
    to_onnx(Planes(), tmp_path / "planes.onnx", example)
    to_onnx(Fixed().eval(), tmp_path / "fixed.onnx", example, dynamic=False)
    to_onnx(Small(), tmp_path / "big.onnx", torch.zeros(1, 3, 256, 256))
    torch.jit.save(torch.jit.trace(Planes(), example), str(tmp_path / "planes.pt"))
    torch.save({}, tmp_path / "empty.pt")
    torch.save(Small(), tmp_path / "module.pt")
    to_onnx(nn.Sequential(Small().eval(), nn.Softmax(1)), tmp_path / "softmax.onnx", example)
    two = example.repeat(2, 1, 1, 1)
    torch.jit.save(torch.jit.trace(Double().eval(), two), str(tmp_path / "double.pt"))
    torch.jit.save(torch.jit.trace(Fixed().eval(), example), str(tmp_path / "fixed.pt"))
    torch.jit.save(torch.jit.trace(nn.Sequential(Small().eval(), nn.Softmax(1)), two), str(tmp_path / "softmax.pt"))
    tried = {
        "junk.onnx": "junk.onnx cannot be read as ONNX",
        "text.pt": "text.pt cannot be read as a PyTorch state dict",
        "planes.onnx": "planes.onnx answers FLOAT with 3 dimensions",
        "fixed.onnx": "export it with a dynamic batch",
        "big.onnx": "big.onnx takes FLOAT ['?', 3, 256, 256]; it must take",
        "planes.pt": "to two images it answers float32 [2, 224, 224]",
        "double.pt": "to two images it answers float64 [2, 1000]",
        "fixed.pt": "fixed.pt works for one batch size alone; save it with a dynamic batch",
        "softmax.pt": "softmax.pt answers probabilities; save it without its final softmax",
        "softmax.onnx": "softmax.onnx answers probabilities; save it without its final softmax",
        "module.pt": "save one with torch.save(model.state_dict(), …)",
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
