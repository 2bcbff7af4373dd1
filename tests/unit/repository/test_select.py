"""Reading repositories: what is served, what is left out and why, and the links to it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
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
    for text in ("no json", "[]", "{}", json.dumps({"weights": "package"})):
        sidecar.write_text(text)
        assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == ((), ("core",))
    sidecar.write_text(json.dumps({"weights": "random", "sha256": digest}))
    assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == (("core",), ())
    sidecar.write_text(json.dumps({"weights": "package", "sha256": digest}))
    assert (chosen(tmp_path).meaningless, chosen(tmp_path).unvouched) == ((), ())
    assert chosen(tmp_path).ensembles_over("core") == ["chain"]


TENSORS = {
    "input": [{"name": "INPUT__0", "datatype": "UINT8", "dims": [224, 224, 3]}],
    "output": [{"name": "OUTPUT__0", "datatype": "FP32", "dims": [1000]}],
}


def core(repository: Path, *artifacts: str, tensors: dict[str, Any] = TENSORS) -> Path:
    """The shipped core's directory with artifacts that hold nothing, and sidecars that describe them."""
    folder = repository / "resnet50_trt"
    shutil.copytree(ROOT / "model_repository" / "resnet50_trt", folder, ignore=shutil.ignore_patterns("1"))
    (folder / "1").mkdir()
    (folder / "1" / "model.py").touch()
    for name in artifacts:
        (folder / "1" / name).touch()
        stated = {"weights": "file", "sha256": hashlib.sha256(b"").hexdigest(), "tensors": tensors}
        (folder / "1" / f"{name}.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize(
    ("backends", "gpu", "artifacts", "variant"),
    [
        (ALL, True, ("model.plan", "model.pt", "model.onnx"), None),
        (ALL, True, ("model.pt", "model.onnx"), "libtorch"),
        (ALL, True, ("model.onnx",), "onnxruntime"),
        (ALL - {"tensorrt"}, True, ("model.plan", "model.pt", "model.onnx"), "libtorch"),
        (PYTHON, True, ("model.plan", "model.pt", "model.onnx"), "embedded"),
        (ALL, False, ("model.plan", "model.pt", "model.onnx"), "embedded"),
        (ALL, False, ("model.plan", "model.pt"), "libtorch"),
        (PYTHON, False, ("model.plan", "model.pt", "model.onnx"), "embedded"),
    ],
)
def test_the_variant_that_server_machine_and_artifacts_can_run(
    tmp_path: Path, backends: frozenset[str], gpu: bool, artifacts: tuple[str, ...], variant: str | None
) -> None:
    core(tmp_path, *artifacts)
    selection = chosen(tmp_path, backends, gpu=gpu)
    assert selection.config_name == variant
    assert "resnet50_trt" in selection.served


def test_a_variant_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    folder = core(tmp_path, "model.onnx", "model.pt")
    (folder / "1" / "model.onnx").write_text("damaged")
    selection = chosen(tmp_path, ALL)
    assert selection.config_name == "libtorch"
    (doubt,) = selection.doubts
    assert doubt.startswith("resnet50_trt: passed over embedded and onnxruntime: 1/model.onnx is not the file")
    # What is simply not there needs no word, nor what the server has no backend for.
    (doubt,) = chosen(tmp_path, ALL - {"onnxruntime"}).doubts
    assert doubt.startswith("resnet50_trt: passed over embedded: ")
    (folder / "1" / "model.onnx").unlink()
    assert chosen(tmp_path, ALL).doubts == ()


def test_artifacts_of_different_weights_are_told(tmp_path: Path) -> None:
    folder = core(tmp_path, "model.onnx", "model.pt")
    for name in ("onnx", "pt"):
        sidecar = folder / "1" / f"model.{name}.json"
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"weights_sha256": name}))
    (doubt,) = chosen(tmp_path, ALL).doubts
    assert doubt == "resnet50_trt: 1/model.onnx and 1/model.pt were made from different weights: make one of them again"


@pytest.mark.parametrize("backends", [ALL, PYTHON])
def test_an_artifact_without_a_sidecar_is_told_under_every_variant(tmp_path: Path, backends: frozenset[str]) -> None:
    folder = core(tmp_path, "model.onnx")
    (folder / "1" / "model.onnx.json").unlink()
    assert chosen(tmp_path, backends).unvouched == ("resnet50_trt",)


def test_without_artifacts_the_machine_s_own_variant_says_what_is_missing(tmp_path: Path) -> None:
    core(tmp_path)
    model(tmp_path, "other", 'backend: "python"', "1/model.py")
    assert chosen(tmp_path, ALL, gpu=True).left_out == {"resnet50_trt": "has no 1/model.plan"}
    assert chosen(tmp_path, ALL).left_out == {"resnet50_trt": "has no 1/model.onnx"}


@pytest.mark.parametrize("name", [None, "libtorch", "onnxruntime", "embedded"])
def test_every_variant_of_the_core_agrees_on_what_callers_see(name: str | None) -> None:
    config: Any = read_model(ROOT / "model_repository" / "resnet50_trt", name).config
    (given,), (answer,) = config.input, config.output
    assert (given.name, given.data_type, list(given.dims)) == ("INPUT__0", model_config_pb2.TYPE_UINT8, [224, 224, 3])
    assert (answer.name, answer.data_type, list(answer.dims)) == ("OUTPUT__0", model_config_pb2.TYPE_FP32, [1000])
    assert config.dynamic_batching.max_queue_delay_microseconds > 0
    assert config.dynamic_batching.default_queue_policy.default_timeout_microseconds > 0
    assert config.version_policy.WhichOneof("policy_choice") == "latest"
    assert config.instance_group
    for sample in config.model_warmup:
        (name_of, value), *rest = sample.inputs.items()
        assert not rest
        assert (name_of, value.data_type, list(value.dims)) == (given.name, given.data_type, list(given.dims))
        assert 1 <= sample.batch_size <= config.max_batch_size
    assert len(config.model_warmup) >= 1
    kind = config.instance_group[0].kind
    group = model_config_pb2.ModelInstanceGroup
    assert kind == {None: group.KIND_GPU, "embedded": group.KIND_CPU}.get(name, group.KIND_AUTO)


def test_an_artifact_that_is_not_its_sidecar_s_is_left_out(tmp_path: Path) -> None:
    folder = core(tmp_path, "model.pt")
    model(tmp_path, "other", 'backend: "python"', "1/model.py")
    assert chosen(tmp_path, ALL, "libtorch").left_out == {}
    (folder / "1" / "model.pt").write_bytes(b"half")
    assert "1/model.pt is not the file that 1/model.pt.json describes" in chosen(tmp_path, ALL, "libtorch").left_out[
        "resnet50_trt"
    ]  # fmt: skip
    (folder / "1" / "model.pt.json").unlink()  # somebody's own file
    assert chosen(tmp_path, ALL, "libtorch").left_out == {}


@pytest.mark.parametrize(
    ("field", "entry", "says"),
    [
        ("output", {"name": "OUTPUT__0", "datatype": "FP32", "dims": [10]}, "its outputs are OUTPUT__0 FP32 [10]"),
        ("output", {"name": "logits", "datatype": "FP32", "dims": [1000]}, "its outputs are logits FP32 [1000]"),
        ("input", {"name": "INPUT__0", "datatype": "FP32", "dims": [3, 224, 224]}, "its inputs are INPUT__0 FP32"),
    ],
)
def test_tensors_that_the_backend_would_not_check(tmp_path: Path, field: str, entry: Any, says: str) -> None:
    core(tmp_path, "model.pt", tensors={**TENSORS, field: [entry]})
    model(tmp_path, "other", 'backend: "python"', "1/model.py")
    why = chosen(tmp_path, ALL, "libtorch").left_out["resnet50_trt"]
    assert says in why
    assert "configs/libtorch.pbtxt" in why


def test_artifacts_in_a_directory_beside_the_repository(tmp_path: Path) -> None:
    core(tmp_path / "r", "model.onnx")
    beside = tmp_path / "artifacts" / "resnet50_trt" / "1"
    beside.mkdir(parents=True)
    (beside / "model.plan").write_bytes(b"a plan")
    (beside / "weights.data").write_bytes(b"what the plan refers to")

    def selected(artifacts: Path | None) -> Selection:
        return select(tmp_path / "r", None, backends=ALL, gpu=True, artifacts=artifacts)

    assert selected(None).config_name == "onnxruntime"
    selection = selected(tmp_path / "artifacts")
    assert selection.config_name is None
    folder = compose(selection, tmp_path / "links")
    assert (folder / "resnet50_trt" / "1" / "model.plan").read_bytes() == b"a plan"
    assert (folder / "resnet50_trt" / "1" / "weights.data").read_bytes() == b"what the plan refers to"
    assert (folder / "resnet50_trt" / "1" / "model.onnx").is_file()
    assert (folder / "resnet50_trt" / "configs" / "libtorch.pbtxt").is_file()
    refused = {"resnet50_trt": "its plan was built for another GPU"}
    again = select(tmp_path / "r", None, backends=ALL, gpu=True, artifacts=tmp_path / "artifacts", refused=refused)
    assert again.config_name == "onnxruntime"
    named = select(tmp_path / "r", "onnxruntime", backends=ALL, gpu=True, refused=refused)
    assert named.left_out == {}


def test_what_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core(tmp_path / "r", "model.pt")
    model(tmp_path / "r", "other", 'backend: "python"', "1/model.py")

    def forbidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("triton_vision.repository.sidecar.sha256", forbidden)  # the tests may run as root
    left_out = chosen(tmp_path / "r", ALL, "libtorch").left_out
    assert left_out["resnet50_trt"].endswith("model.pt cannot be read (Permission denied)")

    def closed(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(RepositoryError, match=r"cannot be read \(Permission denied\)"):
        chosen(tmp_path / "r", ALL)


def test_a_directory_is_no_torchscript_file(tmp_path: Path) -> None:
    folder = core(tmp_path)
    (folder / "1" / "model.pt").mkdir()
    with pytest.raises(RepositoryError, match=r"resnet50_trt has no 1/model\.pt"):
        chosen(tmp_path, ALL, "libtorch")


def test_a_repository_without_variants_has_none(tmp_path: Path) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    assert chosen(tmp_path).config_name is None


def test_a_slip_in_a_field_s_name_is_told_with_what_was_meant(tmp_path: Path) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    model(tmp_path, "slip", 'backend: "python"\nmax_batchsize: 8', "1/model.py")
    model(tmp_path, "v1", 'backend: "python"', "v1/model.py")
    assert chosen(tmp_path).left_out == {
        "slip": "config.pbtxt cannot be read: line 2: there is no max_batchsize; did you mean max_batch_size?",
        "v1": "has no version directory: v1 must be a plain number, 1",
    }


def test_strays_are_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, "good", 'backend: "python"', "1/model.py")
    model(tmp_path, "good.bak", 'name: "good" backend: "python"', "1/model.py")
    model(tmp_path, "old_experiments", None, "1/notes.txt")
    model(tmp_path, "lost+found", None)
    iterdir = Path.iterdir

    def closed(self: Path) -> Iterator[Path]:
        if self.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", closed)  # the tests may run as root
    selection = chosen(tmp_path)
    assert list(selection.served) == ["good"]
    assert selection.left_out == {
        "good.bak": "is called 'good' by its config.pbtxt: rename one of the two",
        "lost+found": "cannot be read: Permission denied",
        "old_experiments": "is not a model: it has no config.pbtxt and no file whose name Triton recognizes",
    }


def test_what_is_found_broken_takes_down_its_own_pipeline(tmp_path: Path) -> None:
    for name in ("one", "two"):
        model(tmp_path, f"core_{name}", 'backend: "python"', "1/model.py")
        model(tmp_path, name, ensemble(f"core_{name}"))
    selection = chosen(tmp_path)
    assert selection.pipelines == ("one", "two")
    rest = selection.without({"core_two": "does not load: why"})
    assert (rest.served_pipelines(), sorted(rest.served)) == (["one"], ["core_one", "one"])
    assert rest.left_out == {"core_two": "does not load: why", "two": "chains core_two, which is left out"}


def test_links_hold_just_what_is_served(tmp_path: Path) -> None:
    model(tmp_path / "r", "good", 'backend: "python"', "1/model.py")
    model(tmp_path / "r", "bare", 'backend: "python"')
    model(tmp_path / "r", "chain", ensemble("good"))
    folder = compose(chosen(tmp_path / "r"), tmp_path / "links")
    assert sorted(entry.name for entry in folder.iterdir()) == ["chain", "good"]
    assert (folder / "good" / "1" / "model.py").is_file()
    assert (folder / "chain" / "1").is_dir()  # Triton insists on a version, and git keeps no empty directory
    assert (folder / "chain" / "config.pbtxt").is_file()
