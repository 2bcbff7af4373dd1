"""Networks of one's own: other classes, TorchScript and ONNX files, and what speaks against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import pytest
import torch
from torch import nn

from tests.export.making import PIXELS, RESNET, Small, expected, logits_of, repository, script, to_onnx
from triton_vision.export import artifact, graph
from triton_vision.export.networks import NETWORKS
from triton_vision.export.prepare import Options, prepare
from triton_vision.export.resnet50 import ResNet50, random_state

__all__ = ["repository"]  # fixtures


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
