"""``--placement`` on a real Triton: its options are taken, and a higher priority overtakes a queue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc as triton

from tests.conftest import SAMPLES
from triton_vision.repository import parse_placement
from triton_vision.server import TritonServer

pytestmark = pytest.mark.quiet


def images(count: int) -> list[triton.InferInput]:
    photo = (SAMPLES / "coffee.jpg").read_bytes()
    given = triton.InferInput("IMAGE", [count, 1], "BYTES")
    given.set_data_from_numpy(np.array([[photo]] * count, np.object_))
    return [given]


def test_a_higher_priority_overtakes_the_queue(repository: Path) -> None:
    with TritonServer(repository, placement=parse_placement("priorities=2")) as server:
        client = triton.InferenceServerClient(server.grpc_address)
        with ThreadPoolExecutor(31) as pool:
            crowd = [pool.submit(client.infer, "ensemble_lite", images(8)) for _ in range(30)]
            wait(crowd, return_when="FIRST_COMPLETED")  # all the others are queued by now
            urgent = pool.submit(client.infer, "ensemble_lite", images(1), priority=1)
            assert urgent.result().as_numpy("LABELS").shape == (1, 5)
            waiting = sum(not one.done() for one in crowd)
            assert waiting > len(crowd) / 3
            for one in crowd:
                assert one.result().as_numpy("LABELS").shape == (8, 5)


def test_tritonserver_takes_the_options_and_the_groups(repository: Path) -> None:
    """All but the GPU groups themselves, which a server without GPU support refuses."""
    placement = parse_placement("gpus=0-1,instances=2,cuda-pool=64M,pinned-pool=16M,limit=2,priorities=2")
    with TritonServer(repository, placement=placement) as server:
        client = triton.InferenceServerClient(server.grpc_address)
        assert client.infer("ensemble_lite", images(2)).as_numpy("LABELS").shape == (2, 5)
        config = client.get_model_config("preprocess_lite").config
        assert config.dynamic_batching.priority_levels == 2
