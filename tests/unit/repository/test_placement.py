"""``--placement``: instance groups, pools, priorities and limits, as Triton's protobuf has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.conftest import ROOT
from triton_vision.repository import Model, RepositoryError, check_gpus, compose, parse_placement, read_model, select

GROUP = model_config_pb2.ModelInstanceGroup


def core(name: str | None = None) -> Model:
    return read_model(ROOT / "model_repository" / "resnet50_trt", name)


@pytest.mark.parametrize(("gpus", "numbers"), [("0", [0]), ("0-1", [0, 1]), ("0-3", [0, 1, 2, 3]), ("0,2", [0, 2])])
@pytest.mark.parametrize("variant", [None, "libtorch", "onnxruntime"])
def test_a_group_for_each_gpu(variant: str | None, gpus: str, numbers: list[int]) -> None:
    placed = parse_placement(f"gpus={gpus},instances=2").place(core(variant))
    again: Any = text_format.Parse(text_format.MessageToString(placed.config), model_config_pb2.ModelConfig())
    assert [(group.kind, group.count, list(group.gpus)) for group in again.instance_group] == [
        (GROUP.KIND_GPU, 2, [number]) for number in numbers
    ]
    del again.instance_group[:]
    original = core(variant).config
    del original.instance_group[:]
    assert again == original  # nothing else has changed


def test_host_policies_pools_and_the_rate_limit() -> None:
    placement = parse_placement(
        "gpus=0-3, instances=3, numa=0/0/1/1, cuda-pool=64M, pinned-pool=1G, limit=2, priorities=3"
    )
    config = placement.place(core()).config
    assert [group.host_policy for group in config.instance_group] == ["gpu_0", "gpu_1", "gpu_2", "gpu_3"]
    assert {(resource.name, resource.count) for group in config.instance_group
            for resource in group.rate_limiter.resources} == {("core", 1)}  # fmt: skip
    assert config.dynamic_batching.priority_levels == 3
    assert config.dynamic_batching.default_priority_level == 3
    assert placement.options() == [
        "--host-policy=gpu_0,numa-node=0", "--host-policy=gpu_1,numa-node=0",
        "--host-policy=gpu_2,numa-node=1", "--host-policy=gpu_3,numa-node=1",
        *(f"--cuda-memory-pool-byte-size={gpu}:67108864" for gpu in range(4)),
        "--pinned-memory-pool-byte-size=1073741824",
        "--rate-limit=execution_count", *(f"--rate-limit-resource=core:2:{gpu}" for gpu in range(4)),
    ]  # fmt: skip
    assert "3 instances of each core on GPU 0, 1, 2, 3" in str(placement)


def test_stages_on_the_cpu_stay_where_they_are() -> None:
    placement = parse_placement("gpus=0,priorities=2")
    for name, variant in (("preprocess", None), ("resnet50_trt", "embedded")):
        before = read_model(ROOT / "model_repository" / name, variant)
        after = placement.place(before).config
        assert list(after.instance_group) == list(before.config.instance_group)
        assert after.dynamic_batching.priority_levels == 2
    ensemble = read_model(ROOT / "model_repository" / "ensemble", None)
    assert placement.place(ensemble) is ensemble


def test_the_served_repository_has_it(tmp_path: Path) -> None:
    selection = select(ROOT / "model_repository", "embedded", backends=frozenset({"python"}), gpu=False)
    folder = compose(selection, tmp_path / "links", parse_placement("priorities=4"))
    config: Any = read_model(folder / "preprocess", None).config
    assert config.dynamic_batching.priority_levels == 4
    assert config.instance_group[0].count >= 2  # fitted to the machine, too


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus=zero", "neither a GPU's number nor a range"),
        ("gpus=3-1", "neither a GPU's number nor a range"),
        ("gpus=0,0", "named twice"),
        ("gpus=0,gpus=1", "given twice"),
        ("gpu=0", "'gpu=0' is none of gpus, instances"),
        ("instances=2", "instances needs gpus"),
        ("gpus=0,instances=0", "not a number from 1 to 64"),
        ("gpus=0-1,numa=0", "1 nodes for 2 GPUs"),
        ("gpus=0,numa=a", "not a node for each GPU"),
        ("gpus=0,cuda-pool=much", "not a size"),
        ("gpus=0,cuda-pool=9999999G", "not a size"),
        ("gpus=0,instances=2,3", "'3' is none of"),
        ("gpus=٣", "neither a GPU's number"),
        ("", "'' is none of"),
        ("priorities=99", "not a number from 1 to 16"),
        ("0,1", "'0' is none of"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(RepositoryError, match=says):
        parse_placement(text)


def test_a_gpu_that_is_not_there() -> None:
    check_gpus(parse_placement("gpus=0-1"), [0, 1])
    with pytest.raises(RepositoryError, match="no NUMA node 99"):
        check_gpus(parse_placement("gpus=0,numa=99"), [0])
    with pytest.raises(RepositoryError, match="there is no GPU 1: there are 0"):
        check_gpus(parse_placement("gpus=0-1"), [0])
    with pytest.raises(RepositoryError, match="none that can be seen"):
        check_gpus(parse_placement("gpus=0"), [])
