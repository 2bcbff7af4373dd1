"""Models fitted to the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from triton_vision.repository import RepositoryError, compose, read_model, scaled, select


def model(folder: Path, config: str) -> Path:
    (folder / "one" / "1").mkdir(parents=True)
    (folder / "one" / "1" / "model.py").touch()
    (folder / "one" / "notes.txt").touch()
    (folder / "one" / "config.pbtxt").write_text('backend: "python"\n' + config)
    return folder / "one"


def ask(**parameters: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}\n' for key, text in parameters.items()
    )


@pytest.mark.parametrize(("cores", "instances", "threads"), [(1, 2, 1), (2, 3, 1), (6, 7, 1), (40, 16, 3)])
def test_instances_and_threads_come_from_the_cores(tmp_path: Path, cores: int, instances: int, threads: int) -> None:
    fitted = scaled(read_model(model(tmp_path, ask(instances="auto", queue_size="auto")), None), cores)
    assert fitted is not None
    config, scale = fitted[0].config, fitted[1]
    assert (scale.instances, scale.threads, scale.queue_size) == (instances, threads, 128 * cores)
    assert config.instance_group[0].count == instances
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 128 * cores


@pytest.mark.parametrize(("shm", "instances"), [(16, 1), (64, 2), (128, 5), (1024, 9)])
def test_a_small_dev_shm_gets_fewer_instances(shm: int, instances: int) -> None:
    fitted = scaled(read_model(ROOT / "model_repository" / "preprocess", None), 8, shm << 20)
    assert fitted is not None
    assert fitted[1].instances == instances


def test_numbers_are_taken_as_they_are_and_the_rest_of_the_configuration_stays(tmp_path: Path) -> None:
    text = "max_batch_size: 8 instance_group { kind: KIND_CPU count: 7 }" + ask(instances="3", threads="5")
    fitted = scaled(read_model(model(tmp_path, text), None), 4)
    assert fitted is not None
    assert str(fitted[1]) == "3 instances"
    assert fitted[0].config.max_batch_size == 8
    assert fitted[0].config.instance_group[0].kind == fitted[0].config.instance_group[0].KIND_CPU


@pytest.mark.parametrize(
    ("shm", "more", "batch"),
    [
        (64, {}, 1),
        (512, {}, 2),
        (24_000, {}, 4),
        (24_000, {"max_bytes": "1048576"}, None),
        (24_000, {"max_bytes": "x"}, 0),
    ],
)
def test_a_batch_of_the_largest_images_fits_into_shared_memory(
    tmp_path: Path, shm: int, more: dict[str, str], batch: int | None
) -> None:
    asked = read_model(model(tmp_path, "max_batch_size: 32 " + ask(instances="3", largest_batch="auto", **more)), None)
    if batch == 0:
        with pytest.raises(RepositoryError, match="one: parameters max_bytes"):
            scaled(asked, 2, shm << 20)
        return
    fitted = scaled(asked, 2, shm << 20)
    assert fitted is not None
    assert list(fitted[0].config.dynamic_batching.preferred_batch_size) == ([] if batch is None else [batch])
    assert f"batches of at most {batch}" in str(fitted[1]) or batch is None


def test_a_queue_alone_says_nothing_of_instances(tmp_path: Path) -> None:
    fitted = scaled(read_model(model(tmp_path, ask(queue_size="9")), None), 2)
    assert fitted is not None
    assert str(fitted[1]) == "9 requests may wait"


def test_who_does_not_ask_is_left_alone(tmp_path: Path) -> None:
    assert scaled(read_model(model(tmp_path, "max_batch_size: 8"), None), 4) is None


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_a_wrong_number_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(RepositoryError, match="one: parameters instances"):
        scaled(read_model(model(tmp_path, ask(instances=text)), None), 4)


def test_the_served_folder_has_the_fitted_configuration_and_the_model_s_files(tmp_path: Path) -> None:
    source = model(tmp_path / "theirs", ask(instances="5"))
    before = (source / "config.pbtxt").read_text()
    folder = compose(
        select(tmp_path / "theirs", None, backends=frozenset({"python"}), gpu=False), tmp_path / "composed"
    )
    assert read_model(folder / "one", None).config.instance_group[0].count == 5
    assert (folder / "one" / "1" / "model.py").exists()
    assert (folder / "one" / "notes.txt").exists()
    assert (source / "config.pbtxt").read_text() == before


@pytest.mark.parametrize("name", ["preprocess", "preprocess_lite"])
def test_shipped_preprocessing_fits_itself_to_the_machine(name: str) -> None:
    assert scaled(read_model(ROOT / "model_repository" / name, None), 8) is not None


def test_onnx_runtime_gets_the_threads_that_this_process_may_use(tmp_path: Path) -> None:
    folder = model(tmp_path, "instance_group { count: 2 }")
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("python", "onnxruntime"))
    fitted = scaled(read_model(folder, None), 8)
    assert fitted is not None
    assert fitted[0].config.parameters["intra_op_thread_count"].string_value == "4"
    assert str(fitted[1]) == "4 threads"
    config.write_text(config.read_text() + ask(intra_op_thread_count="1"))
    assert scaled(read_model(folder, None), 8) is None
