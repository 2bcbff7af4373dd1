"""More load than the core can do: what cannot be answered in time is turned away before it is decoded."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from tests.conftest import ROOT, jpeg
from tests.server.test_ensembles import infer
from triton_vision.server import TritonServer

pytestmark = pytest.mark.quiet

PER_SECOND = 40
CORE = f"""
import time
import numpy as np
from triton_vision.stages import BatchStage, adapt


class Slow(BatchStage):
    def process(self, pixels):
        time.sleep(len(pixels) / {PER_SECOND})
        return np.zeros((len(pixels), 1000), np.float32)


TritonPythonModel = adapt(Slow)
"""
CONFIG = """
backend: "python" max_batch_size: 32
input [ { name: "INPUT__0" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
instance_group [ { kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4 ] }
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite's chain around a core that sleeps, with a patience of one second."""
    folder = tmp_path_factory.mktemp("slow")
    for name in ("preprocess", "postprocess", "ensemble"):
        shutil.copytree(ROOT / "model_repository" / name, folder / name)
    config = folder / "preprocess" / "config.pbtxt"
    patience = 'parameters [ { key: "patience" value: { string_value: "1" } },'
    config.write_text(config.read_text().replace("parameters [", patience))
    (folder / "resnet50_trt" / "1").mkdir(parents=True)
    (folder / "resnet50_trt" / "config.pbtxt").write_text(CONFIG)
    (folder / "resnet50_trt" / "1" / "model.py").write_text(CORE)
    return folder


def done(server: TritonServer, model: str) -> int:
    with triton.InferenceServerClient(server.grpc_address) as client:
        statistics = client.get_inference_statistics(model, as_json=True)["model_stats"]
        return sum(int(entry.get("inference_count", 0)) for entry in statistics)


def test_the_core_works_for_callers_who_get_an_answer(slow: Path) -> None:
    photo, found = jpeg(1), Counter[str]()
    lock, until = threading.Lock(), 0.0

    def call(server: TritonServer) -> None:
        while time.monotonic() < until:
            try:
                infer(server, "ensemble", [photo])
                what = "answered"
            except InferenceServerException as error:
                what = re.sub(r"[0-9.]+ s;", "N s;", error.message())
                time.sleep(0.1)  # as whoever tries again later
            with lock:
                found[what] += 1

    with TritonServer(slow) as server:
        before = done(server, "resnet50_trt")
        until = time.monotonic() + 8
        with ThreadPoolExecutor(150) as pool:
            list(pool.map(call, [server] * 150))
        worked = done(server, "resnet50_trt") - before
        # Nothing of all that is left behind.
        infer(server, "ensemble", [photo])
    refused = sum(count for what, count in found.items() if "Exceeds maximum queue size" in what)
    assert refused > 0, found
    assert refused + found["answered"] == sum(found.values()), found
    # Every image that the core has seen was answered: none had been given up, none was decoded for nothing.
    assert worked == found["answered"]
    assert found["answered"] > PER_SECOND
