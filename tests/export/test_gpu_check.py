"""``benchmarks/gpu_check`` as far as it goes without a GPU: the same code on the CPU, and what fails on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu_check"
sys.path.insert(0, str(FOLDER.parent))

from gpu_check import engines, gpu_check, lanes  # noqa: E402
from gpu_check.engines import CheckError, Engine, OutOfTime  # noqa: E402


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The script; ``code`` runs before it."""
    script = str(FOLDER / "gpu_check.py")
    start = (
        [script]
        if not code
        else [
            "-c",
            f"import runpy, sys; {code}; sys.argv[1:] = sys.argv[2:]; RUN".replace(
                "RUN", f"sys.path[0] = {str(FOLDER)!r}; runpy.run_path({script!r}, run_name='__main__')"
            ),
            script,
        ]
    )
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, timeout=200)


def test_the_script_on_the_cpu_without_onnx(tmp_path: Path) -> None:
    """As in a bare PyTorch environment: neither ONNX package can be imported."""
    file = tmp_path / "found.json"
    options = ("--batches", "1,3", "--instances", "1,2", "--seconds", "0.1", "--json", str(file))
    done = run("--device", "cpu", "--quick", *options, code="sys.modules.update(onnx=None, onnxruntime=None)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS: TorchScript FP32 on cpu as the CPU module")
    found = json.loads(file.read_text())
    assert found["passed"]
    (parity,) = found["parity"]
    assert parity["holds"]
    assert parity["relative"] < 1e-4
    assert parity["same_best"] == parity["images"] == 16
    assert [(rate["batch"], rate["instances"]) for rate in found["rates"]] == [(1, 1), (3, 1), (1, 2), (3, 2)]
    for rate in found["rates"]:
        assert rate["images_per_second"] > 0
        assert 0 < rate["p50_ms"] <= rate["p99_ms"]
    assert found["left_out"] == ["TensorRT: it runs on a GPU alone"]


def test_without_a_gpu_it_is_one_sentence() -> None:
    done = run()
    assert done.returncode == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert "finds no NVIDIA GPU here" in done.stderr


def logits_of(pixels: Any) -> Any:
    """A stand-in for the network: a thousand of the pixels."""
    return pixels.reshape(len(pixels), -1)[:, : engines.CLASSES].to(torch.float32)


@pytest.fixture
def images() -> Any:
    return lanes.make_images()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Precision -> what runs in place of the network that would be exported; the CPU module is ``logits_of``."""
    networks: dict[str, Any] = {"FP32": logits_of, "FP16": logits_of}

    def module(*, half: bool) -> Any:
        assert not half
        return logits_of

    def torchscript(device: str, *, half: bool) -> Engine:
        assert device == "cpu"
        precision = "FP16" if half else "FP32"
        return Engine("TorchScript", precision, lambda: networks[precision])

    monkeypatch.setattr(engines, "make_module", module)
    monkeypatch.setattr(engines, "torchscript", torchscript)
    return networks


@pytest.mark.usefixtures("made")
def test_what_the_budget_has_no_time_for_is_listed_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--quick", "--budget", "0"]) == 0
    said = capsys.readouterr().out
    assert "not run: TorchScript FP32: 1 instances, batch 1 and what follows: the time was up" in said
    assert said.splitlines()[-1].startswith("PASS: ")


def test_an_engine_that_differs_is_a_failure_and_costs_no_other(
    made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made["FP32"] = lambda pixels: logits_of(pixels).flip(1)
    small = ("--batches", "1", "--instances", "1", "--seconds", "0.05")
    assert gpu_check.main(["--device", "cpu", *small]) == 1
    said = capsys.readouterr().out
    assert "failed: TorchScript FP32: the logits differ by" in said
    assert "TorchScript FP16: agrees with" in said
    assert said.splitlines()[-1].startswith("FAIL: TorchScript FP16 on cpu")


def test_fp16_is_compared_with_the_fp32_module(images: Any) -> None:
    engine = engines.torchscript("cpu", half=True)
    with torch.inference_mode():
        expected = engines.make_module(half=False)(torch.from_numpy(images[::8])).numpy()
    parity = lanes.check_parity(engine, "cpu", images[::8], expected)
    assert parity.holds
    assert 1e-6 < parity.relative < 2e-2


def test_the_images_are_of_several_kinds(images: Any) -> None:
    assert images.shape == (16, 224, 224, 3)
    assert images.dtype == np.uint8
    assert len({int(np.unique(image).size > 100) for image in images}) == 2
    np.testing.assert_array_equal(images, lanes.make_images())


@pytest.mark.parametrize(("error", "holds"), [(0.0, True), (0.5e-4, True), (2e-4, False), (float("nan"), False)])
def test_parity(images: Any, error: float, holds: bool) -> None:
    expected = logits_of(torch.from_numpy(images[8:])).numpy()
    wrong = float(expected.std(axis=1).mean()) * error
    engine = Engine("it", "FP32", lambda: lambda pixels: logits_of(pixels) + wrong)
    parity = lanes.check_parity(engine, "cpu", images[8:], expected)
    assert parity.holds is holds
    assert ("agrees with" if holds else "DIFFERS from") in str(parity)


def test_every_instance_works_and_every_answer_is_its_own(images: Any) -> None:
    expected = logits_of(torch.from_numpy(images)).numpy()
    seen: set[int] = set()

    def spy(pixels: Any) -> Any:
        seen.add(threading.get_ident())
        return logits_of(pixels)

    engine = Engine("it", "FP32", lambda: spy)
    rate = lanes.measure(engine, [spy] * 3, "cpu", 5, 0.2, images, expected)
    assert (rate.batch, rate.instances, len(seen)) == (5, 3, 3)
    assert rate.batches >= 3
    assert rate.images_per_second > 0


def test_what_goes_wrong_under_load_is_noticed(images: Any) -> None:
    expected = logits_of(torch.from_numpy(images)).numpy()
    engine = Engine("it", "FP32", lambda: logits_of)

    def mixed(pixels: Any) -> Any:
        return logits_of(pixels.flip(0))

    with pytest.raises(CheckError, match=r"batch 4, 2 instances: the logits differ by .* under load"):
        lanes.measure(engine, [logits_of, mixed], "cpu", 4, 0.05, images, expected)
    calls = iter(range(1000))

    def failing(pixels: Any) -> Any:
        if next(calls) > 7:
            raise RuntimeError("out of memory")
        return logits_of(pixels)

    with pytest.raises(CheckError, match="RuntimeError: out of memory"):
        lanes.measure(engine, [logits_of, failing], "cpu", 2, 0.5, images, expected)


def test_percentiles() -> None:
    assert [lanes.percentile([1.0, 2.0, 3.0, 4.0], share) for share in (1, 50, 75, 99, 100)] == [1, 2, 3, 4, 4]
    assert lanes.percentile([5.0], 99) == 5


def test_a_build_that_fails_or_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a TensorRT that raises, and one that hangs, in place of the real one."""
    before = set(Path(os.environ.get("TMPDIR", "/tmp")).glob("gpu-check-*"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer is not there')\n")
    with pytest.raises(CheckError, match="the plan was not built: ImportError: libnvinfer is not there"):
        engines.tensorrt_engine(half=True, most=8, budget=60)
    (tmp_path / "tensorrt.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(OutOfTime, match="not built within 3 s"):
        engines.tensorrt_engine(half=True, most=8, budget=3)
    with pytest.raises(OutOfTime, match="no time was left"):
        engines.tensorrt_engine(half=True, most=8, budget=0)
    assert set(Path(os.environ.get("TMPDIR", "/tmp")).glob("gpu-check-*")) == before


def test_a_plan_is_given_shapes_addresses_and_the_stream(images: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT's calls by their names in its Python API; a stand-in records them."""
    calls: dict[str, Any] = {}
    refuses: list[str] = []

    class Context:
        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            calls[name] = shape
            return "shape" not in refuses

        def set_tensor_address(self, name: str, address: int) -> bool:
            calls[f"{name} at"] = address
            return True

        def execute_async_v3(self, stream: int) -> bool:
            calls["stream"] = stream
            return True

    class Logger:
        WARNING = 2

        def __init__(self, level: int) -> None:
            assert level == self.WARNING

    plan = types.SimpleNamespace(create_execution_context=Context)
    runtime = types.SimpleNamespace(deserialize_cuda_engine=lambda content: plan if content == b"plan" else None)
    stand_in = types.SimpleNamespace(Runtime=lambda _: runtime, Logger=Logger)
    monkeypatch.setitem(sys.modules, "tensorrt", stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=77))
    pixels = torch.from_numpy(images[:3])
    logits = engines.open_plan(b"plan")(pixels)
    assert logits.shape == (3, 1000)
    assert calls == {
        "INPUT__0": (3, 224, 224, 3),
        "INPUT__0 at": pixels.data_ptr(),
        "OUTPUT__0 at": logits.data_ptr(),
        "stream": 77,
    }
    refuses.append("shape")
    with pytest.raises(CheckError, match="refused a batch of 3"):
        engines.open_plan(b"plan")(pixels)
    with pytest.raises(CheckError, match="cannot load the plan"):
        engines.open_plan(b"other")
