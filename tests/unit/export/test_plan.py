"""TensorRT plans: when one is stale, and the command that would build it. The building itself needs a GPU."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from triton_vision.export import artifact, plan
from triton_vision.export.weights import sha256
from triton_vision.gpu import Gpu, parse_gpus
from triton_vision.repository import read_model
from triton_vision.server import plans

L4, A100 = Gpu(0, "NVIDIA L4", "8.9"), Gpu(1, "NVIDIA A100-SXM4-40GB", "8.0")
MACHINE = plan.Machine([L4], "10.3.0")
PROFILE = plan.Profile(1, 32, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A graph and a plan made from it for MACHINE."""
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"a graph")
    write_plan(tmp_path)
    return tmp_path


def write_plan(folder: Path, **changed: Any) -> None:
    described = {
        "sha256": hashlib.sha256(b"a plan").hexdigest(),
        "weights": "random",
        "weights_source": "random numbers",
        "weights_sha256": "",
        "tools": {},
        "onnx_sha256": sha256(folder / "model.onnx"),
        "profile": asdict(PROFILE),
        "gpu": {"name": L4.name, "compute_capability": L4.compute_capability},
        "tensorrt": "10.3.0.26",
        **changed,
    }
    artifact.write(folder / "model.plan", b"a plan", described)


def why(folder: Path, machine: plan.Machine = MACHINE, profile: plan.Profile = PROFILE) -> str:
    return plan.stale(folder / "model.plan", folder / "model.onnx", profile, machine)


def test_a_plan_of_this_machine_is_used(folder: Path) -> None:
    assert why(folder) == ""
    assert why(folder, plan.Machine([L4], "")) == ""  # a version that cannot be found out is Triton's to judge
    (folder / "model.onnx").unlink()
    assert why(folder) == ""  # as in an image that brings the plan alone


def test_what_differs_is_said(folder: Path) -> None:
    assert why(folder, plan.Machine([A100], "10.3.0")) == (
        "model.plan was built for another GPU: NVIDIA L4 (compute capability 8.9), and GPU 1 is "
        "NVIDIA A100-SXM4-40GB (8.0)"
    )
    assert "another GPU" in why(folder, plan.Machine([L4, A100], "10.3.0"))
    assert why(folder, plan.Machine([L4], "11.4.0")) == (
        "model.plan was built with another TensorRT: 10.3.0.26, and this is 11.4.0"
    )
    assert why(folder, profile=plan.Profile(1, 8, 16)) == (
        "model.plan was built for another profile: batches of 1 to 32, tuned for 32, and the configuration asks for "
        "batches of 1 to 16, tuned for 8"
    )
    (folder / "model.onnx").write_bytes(b"another graph")
    assert why(folder) == "model.plan was built from another model.onnx than the one that is there"


def test_a_plan_that_is_not_whole(folder: Path) -> None:
    (folder / "model.plan").write_bytes(b"a pl")
    assert "half-written" in why(folder)
    (folder / "model.plan.json").unlink()
    assert "has none" in why(folder)
    (folder / "model.plan").unlink()
    assert why(folder) == "there is no model.plan yet"


def test_the_profile_is_the_configuration_s() -> None:
    model = read_model(ROOT / "model_repository" / "resnet50_trt", None)
    assert plan.profile_of(model.config) == plan.Profile(1, 32, 32)
    del model.config.dynamic_batching.preferred_batch_size[:]
    model.config.dynamic_batching.preferred_batch_size.extend([8, 16, 64])
    assert plan.profile_of(model.config) == plan.Profile(1, 16, 32)


@pytest.mark.parametrize(("number", "version"), [(8601, "8.6.1"), (100300, "10.3.0"), (101201, "10.12.1")])
def test_tensorrt_s_version_numbers(number: int, version: str) -> None:
    assert plan.version_of(number) == version
    assert plan.trtexec_version(f"&&&& RUNNING TensorRT.trtexec [TensorRT v{number}] [b31] # trtexec") == version


@pytest.mark.parametrize(("version", "typed"), [("10.3.0", True), ("11.4.0", False)])
def test_trtexec_s_command(version: str, typed: bool) -> None:
    command = plan.trtexec_command(
        "trtexec", Path("m.onnx"), Path("m.plan"), plan.Profile(1, 16, 32), Path("c"), version
    )
    assert command[:5] == [
        "trtexec", "--onnx=m.onnx", "--saveEngine=m.plan", "--timingCacheFile=c", "--skipInference"
    ]  # fmt: skip
    assert "--minShapes=INPUT__0:1x224x224x3" in command
    assert "--optShapes=INPUT__0:16x224x224x3" in command
    assert "--maxShapes=INPUT__0:32x224x224x3" in command
    assert ("--stronglyTyped" in command) == typed


def test_what_nvidia_smi_answers() -> None:
    assert parse_gpus("0, NVIDIA L4, 8.9\n1, NVIDIA A100-SXM4-40GB, 8.0\n") == [L4, A100]
    assert parse_gpus("No devices were found\n") == []


def test_where_nothing_can_build_a_plan_it_says_so(folder: Path) -> None:
    write_plan(folder, tensorrt="9.0.0")
    with pytest.raises(plan.PlanError, match="neither TensorRT's Python package nor trtexec"):
        plan.build(folder / "model.plan", folder / "model.onnx", PROFILE, MACHINE)
    assert (folder / "model.plan").read_bytes() == b"a plan"


def test_at_start_a_stale_plan_is_refused_with_both_reasons(tmp_path: Path) -> None:
    model = tmp_path / "repository" / "core"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "tensorrt" max_batch_size: 32')
    said: list[str] = []

    def ensure() -> dict[str, str]:
        return plans.ensure_plans(model.parent, tmp_path / "artifacts", threading.Event(), said.append)

    (model / "1" / "model.plan").write_bytes(b"somebody's own")
    assert ensure() == {}  # nobody's business but its owner's
    (model / "1" / "model.onnx").write_bytes(b"a graph")
    refused = ensure()["core"]
    assert "has none" in refused
    assert "none could be built: neither TensorRT's Python package nor trtexec" in refused
    assert "which takes some minutes" in said[0]
