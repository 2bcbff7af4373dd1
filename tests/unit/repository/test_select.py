"""Reading repositories: what is served, what is left out and why, and the links to it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.conftest import ROOT
from triton_vision.repository import RepositoryError, Selection, compose, read_model, select

PYTHON = frozenset({"python"})
ALL = frozenset({"python", "tensorrt", "onnxruntime", "pytorch"})
CONFIGS = sorted((ROOT / "model_repository").glob("*/config.pbtxt")) + sorted(
    (ROOT / "model_repository").glob("*/configs/*.pbtxt")
)


def model(repository: Path, name: str, config: str | None, *files: str) -> Path:
    folder = repository / name
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


def ensemble(*steps: str) -> str:
    chain = ", ".join(f'{{ model_name: "{step}" model_version: -1 }}' for step in steps)
    return f'platform: "ensemble" ensemble_scheduling {{ step [ {chain} ] }}'


def chosen(
    repository: Path, backends: frozenset[str] = PYTHON, name: str | None = None, gpu: bool = False
) -> Selection:
    return select(repository, name, backends=backends, gpu=gpu)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "-".join(path.relative_to(ROOT).parts[1:]))
def test_every_config_parses_with_the_official_protobuf(path: Path) -> None:
    config: Any = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    folder = path.parents[1] if path.parent.name == "configs" else path.parent
    assert config.name == folder.name
    assert config.max_batch_size == 32
    if config.platform != "ensemble":  # admission control on every step
        policy = config.dynamic_batching.default_queue_policy
        assert policy.default_timeout_microseconds > 0
        assert policy.allow_timeout_override
        if config.name.startswith("preprocess"):
            assert policy.max_queue_size >= 256


def test_the_gpu_config_is_tensorrt() -> None:
    config: Any = read_model(ROOT / "model_repository" / "resnet50_trt", None).config
    assert config.backend == "tensorrt"
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    embedded = read_model(ROOT / "model_repository" / "resnet50_trt", "embedded").config
    for field in ("input", "output"):
        ours, theirs = getattr(config, field)[0], getattr(embedded, field)[0]
        assert (ours.name, ours.data_type, list(ours.dims)) == (theirs.name, theirs.data_type, list(theirs.dims))


def test_missing_artifacts_and_what_chains_them_are_left_out(tmp_path: Path) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    model(tmp_path, "bare", 'backend: "python"', "1/other.py")
    model(tmp_path, "more", 'backend: "python" parameters { key: "artifacts" value { string_value: "a.onnx, b.bin" } }',
          "1/model.py", "1/a.onnx")  # fmt: skip
    model(tmp_path, "named", 'backend: "python" default_model_filename: "stage.py"', "1/model.py")
    model(tmp_path, "unversioned", 'backend: "python"')
    model(tmp_path, "chain", ensemble("good", "bare"))
    model(tmp_path, "chain_of_chains", ensemble("chain"))
    model(tmp_path, "lost", ensemble("nobody"))
    model(tmp_path, "fine", ensemble("good"))
    selection = chosen(tmp_path)
    assert sorted(selection.served) == ["fine", "good"]
    assert selection.left_out == {
        "bare": "has no 1/model.py",
        "more": "has no 1/b.bin",
        "named": "has no 1/stage.py",
        "unversioned": "has no 1/model.py",
        "chain": "chains bare, which is left out",
        "chain_of_chains": "chains chain, which is left out",
        "lost": "chains nobody, which is not in the repository",
    }


def test_a_backend_that_is_not_there(tmp_path: Path) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    model(tmp_path, "onnx", 'platform: "onnxruntime_onnx"', "1/model.onnx")
    model(tmp_path, "unnamed", None, "1/model.onnx")
    model(tmp_path, "theirs", None, "1/model.py")
    assert set(chosen(tmp_path).left_out) == {"onnx", "unnamed"}
    assert "the backend 'onnxruntime'" in chosen(tmp_path).left_out["onnx"]
    assert chosen(tmp_path, ALL).left_out == {}


def test_the_variant_for_the_machine(tmp_path: Path) -> None:
    folder = model(tmp_path, "core", 'backend: "tensorrt"', "1/model.plan", "1/model.py")
    (folder / "configs").mkdir()
    (folder / "configs" / "embedded.pbtxt").write_text('backend: "python"')
    assert chosen(tmp_path).config_name == "embedded"
    assert chosen(tmp_path, ALL).config_name == "embedded"
    assert chosen(tmp_path, ALL, gpu=True).config_name is None
    assert chosen(tmp_path, ALL, "embedded", gpu=True).config_name == "embedded"
    with pytest.raises(RepositoryError, match=r"configs/other\.pbtxt; there are: embedded"):
        chosen(tmp_path, ALL, "other")


@pytest.mark.parametrize(
    ("policy", "missing"),
    [("", []), ("version_policy: { all {} }", ["1/model.py"]), ("version_policy: { latest { num_versions: 2 } }", []),
     ("version_policy: { specific { versions: [ 1 ] } }", ["1/model.py"])],
)  # fmt: skip
def test_only_the_versions_that_load_need_their_artifacts(tmp_path: Path, policy: str, missing: list[str]) -> None:
    folder = model(tmp_path, "m", f'backend: "python" {policy}', "1/none", "2/model.py", "10/model.py")
    assert read_model(folder, None).missing_artifacts() == missing


def test_a_broken_config_costs_its_model_only(tmp_path: Path) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    model(tmp_path, "bad", "backend python", "1/model.py")
    assert "config.pbtxt cannot be read" in chosen(tmp_path).left_out["bad"]


def test_fields_that_only_a_newer_server_knows_are_its_business(tmp_path: Path) -> None:
    model(tmp_path, "new", 'backend: "python" field_of_next_year: 3', "1/model.py")
    assert "new" in chosen(tmp_path).served


def test_what_cannot_be_served_at_all(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="no model repository"):
        chosen(tmp_path / "missing")
    with pytest.raises(RepositoryError, match="no model directories"):
        chosen(tmp_path)
    model(tmp_path, "bare", 'backend: "python"')
    with pytest.raises(RepositoryError, match=r"nothing in .* can be served: bare has no 1/model\.py"):
        chosen(tmp_path)


def test_weights_are_known_by_a_sidecar_of_that_very_artifact(tmp_path: Path) -> None:
    config = 'backend: "python" parameters { key: "artifacts" value { string_value: "model.onnx" } }'
    folder = model(tmp_path, "core", config, "1/model.py", "1/model.onnx")
    model(tmp_path, "chain", ensemble("core"))
    sidecar, digest = folder / "1" / "model.onnx.json", hashlib.sha256(b"").hexdigest()
    assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == ((), ("core",))
    for text in ("no json", "[]", "{}", json.dumps({"weights": "package", "sha256": "of another"})):
        sidecar.write_text(text)
        assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == ((), ("core",))
    sidecar.write_text(json.dumps({"weights": "random", "sha256": digest}))
    assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == (("core",), ())
    sidecar.write_text(json.dumps({"weights": "package", "sha256": digest}))
    assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == ((), ())
    assert chosen(tmp_path).ensembles_over("core") == ["chain"]


def test_links_hold_just_what_is_served(tmp_path: Path) -> None:
    model(tmp_path / "r", "good", 'backend: "python"', "1/model.py")
    model(tmp_path / "r", "bare", 'backend: "python"')
    model(tmp_path / "r", "chain", ensemble("good"))
    folder = compose(chosen(tmp_path / "r"), tmp_path / "links")
    assert sorted(entry.name for entry in folder.iterdir()) == ["chain", "good"]
    assert (folder / "good" / "1" / "model.py").is_file()
    assert (folder / "chain" / "1").is_dir()  # Triton insists on a version, and git keeps no empty directory
    assert (folder / "chain" / "config.pbtxt").is_file()
