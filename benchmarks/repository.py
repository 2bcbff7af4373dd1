"""The benchmark's two model repositories, put together from the suite's own directories and ``models/``."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from workload import LABELS, PLACES

ROOT = Path(__file__).resolve().parent.parent
SUITE, MODELS = ROOT / "model_repository", ROOT / "benchmarks" / "models"

STAND_IN = """
name: "stand_in" backend: "python" max_batch_size: 32
input [ { name: "INPUT__0" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching {
  default_queue_policy {
    timeout_action: REJECT default_timeout_microseconds: 30000000 allow_timeout_override: true
  }
}
"""
# No instance group: Triton's default. Batching without a delay, as its documentation advises to begin with.
TUTORIAL = {
    "tutorial_preprocess": """
backend: "python" max_batch_size: 32
input [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
dynamic_batching { }
""",
    "tutorial_core": """
backend: "python" max_batch_size: 32
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
dynamic_batching { }
""",
    "tutorial_postprocess": """
backend: "python" max_batch_size: 32
input [ { name: "LOGITS" data_type: TYPE_FP32 dims: [ 1000 ] } ]
output [
  { name: "LABELS" data_type: TYPE_STRING dims: [ 5 ] },
  { name: "CLASS_IDS" data_type: TYPE_INT32 dims: [ 5 ] },
  { name: "SCORES" data_type: TYPE_FP32 dims: [ 5 ] }
]
dynamic_batching { }
""",
}
TUTORIAL_ENSEMBLE = """
platform: "ensemble" max_batch_size: 32
input [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "LABELS" data_type: TYPE_STRING dims: [ 5 ] },
  { name: "CLASS_IDS" data_type: TYPE_INT32 dims: [ 5 ] },
  { name: "SCORES" data_type: TYPE_FP32 dims: [ 5 ] }
]
ensemble_scheduling { step [
  { model_name: "tutorial_preprocess" model_version: -1
    input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "PIXELS" value: "pixels" } },
  { model_name: "tutorial_core" model_version: -1
    input_map { key: "INPUT__0" value: "pixels" } output_map { key: "OUTPUT__0" value: "logits" } },
  { model_name: "tutorial_postprocess" model_version: -1
    input_map { key: "LOGITS" value: "logits" }
    output_map { key: "LABELS" value: "LABELS" }
    output_map { key: "CLASS_IDS" value: "CLASS_IDS" }
    output_map { key: "SCORES" value: "SCORES" } }
] }
"""


def suite(folder: Path) -> Path:
    """The suite's own preprocess, postprocess and ensemble around the stand-in network.

    ``ensemble_nothing`` has a preprocess that does nothing, in as many instances: what the server itself costs.
    ``ensemble_fast`` decodes large JPEGs at a fraction of their size.
    """
    fresh(folder)
    config = (SUITE / "preprocess" / "config.pbtxt").read_text()
    head = config.partition("parameters [")[0]
    scale = 'parameters [ { key: "instances" value: { string_value: "auto" } } ]\n'
    model(folder / "preprocess", config, SUITE / "preprocess")
    model(
        folder / "preprocess_fast",
        config.replace('"preprocess"', '"preprocess_fast"').replace(
            "parameters [", 'parameters [\n  { key: "decode" value: { string_value: "fast" } },'
        ),
        SUITE / "preprocess",
    )
    model(folder / "nothing", head.replace('"preprocess"', '"nothing"') + scale, MODELS / "nothing")
    model(folder / "stand_in", STAND_IN, MODELS / "stand_in")
    np.save(folder / "stand_in" / "1" / "places.npy", PLACES)
    shutil.copytree(SUITE / "postprocess", folder / "postprocess", ignore=shutil.ignore_patterns("__pycache__"))
    chain = (SUITE / "ensemble" / "config.pbtxt").read_text().replace("resnet50_trt", "stand_in")
    for name, first in (
        ("ensemble", "preprocess"),
        ("ensemble_fast", "preprocess_fast"),
        ("ensemble_nothing", "nothing"),
    ):
        text = chain.replace('name: "ensemble"', f'name: "{name}"', 1)
        model(folder / name, text.replace('model_name: "preprocess"', f'model_name: "{first}"'), None)
    return folder


def tutorial(folder: Path) -> Path:
    """The same chain as tutorials write it."""
    fresh(folder)
    for name, config in TUTORIAL.items():
        model(folder / name, f'name: "{name}"\n{config}', MODELS / name)
    np.save(folder / "tutorial_core" / "1" / "places.npy", PLACES)
    (folder / "tutorial_postprocess" / "labels.txt").write_text("\n".join(LABELS))
    model(folder / "tutorial", f'name: "tutorial"\n{TUTORIAL_ENSEMBLE}', None)
    return folder


def fresh(folder: Path) -> None:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def model(folder: Path, config: str, source: Path | None) -> None:
    """A model directory with this configuration, and ``source``'s ``model.py``."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if source is not None:
        shutil.copy(source / "1" / "model.py", folder / "1" / "model.py")
