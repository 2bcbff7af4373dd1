"""Fitting a model to the machine: how many instances it gets, how long its queue may grow, how large its batches.

A model asks for it with parameters in its ``config.pbtxt``, the one place where they are set::

    parameters [
      { key: "instances" value: { string_value: "auto" } },
      { key: "queue_size" value: { string_value: "auto" } },
      { key: "largest_batch" value: { string_value: "auto" } }
    ]

Each may be a number instead. A server that is started without ``triton-vision serve`` takes what the
configuration's own fields say.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import triton_to_np_dtype

from triton_vision.cpu import threads_of, visible_cores
from triton_vision.repository.model import Model, RepositoryError

AUTO = "auto"
ASKED = ("instances", "queue_size", "largest_batch")
# One more than there are cores: while one hands over its results, another has work for the core; and while some are
# busy with a request of 32 large images, one answers small ones. An instance is a process of some 60 MB, so beyond
# this many each gets several threads instead.
MOST = 16
# An instance of a Python model has a region of shared memory of its own, which grows to what the tensors of a whole
# batch take, and this for the rest (requests, strings). All instances of a model shall fit into this share of /dev/shm,
# since other models have theirs.
REGION_BYTES, SHM_SHARE = 1024 * 1024, 4
# Requests that may wait, for each core: well under a second of work.
QUEUE_PER_CORE = 128
# Bytes of encoded images in a batch of several requests, if they are as large as they may be: a batch is copied into
# its instance's shared memory at once, and where that does not fit, all of its requests fail.
BATCH_BYTES = 128 * 1024 * 1024
# Of an encoded image, where the parameter `max_bytes` does not say otherwise (stages.limits).
IMAGE_BYTES = 32 * 1024 * 1024
SHM = Path("/dev/shm")
# ONNX Runtime's own count is the machine's cores, and it pins its threads to them, also to those that this process may
# not use (parameters of Triton's onnxruntime backend).
RUNTIME_THREADS = "intra_op_thread_count"


@dataclass(frozen=True)
class Scale:
    """What a model gets on this machine.

    Attributes:
        instances: processes of the model; 0 where it does not ask for a number.
        threads: of each instance; None where the configuration sets them itself.
        queue_size: requests that may wait; 0 is any number.
        largest_batch: images of several requests in one batch; 0 is as many as the model takes.
    """

    instances: int
    threads: int | None
    queue_size: int
    largest_batch: int = 0

    def __str__(self) -> str:
        threads = "" if self.threads is None else _count(self.threads, "thread")
        parts = [_count(self.instances, "instance")] if self.instances else []
        parts = [" of ".join([*parts, threads])] if threads else parts
        parts += [f"{self.queue_size} requests may wait"] if self.queue_size else []
        parts += [f"batches of at most {self.largest_batch}"] if self.largest_batch else []
        return ", ".join(parts)


def scaled(model: Model, cores: int | None = None, shm: int | None = None) -> tuple[Model, Scale] | None:
    """The model with its configuration fitted to the machine, or None if it does not ask for that.

    Args:
        cores: by default those visible to this process, in a container not the host's.
        shm: bytes of shared memory; by default what /dev/shm can hold.

    Raises:
        RepositoryError: a parameter is neither ``auto`` nor a number of at least 1.
    """
    parameters = {} if model.config is None else model.config.parameters
    wanted = {key: parameters[key].string_value.strip() for key in ASKED if key in parameters}
    runtime = model.config is not None and model.backend == "onnxruntime" and RUNTIME_THREADS not in parameters
    if not wanted and not runtime:
        return None
    cores, shm = cores or visible_cores(), _shm_bytes() if shm is None else shm
    config = copy.deepcopy(model.config)
    if "instances" in wanted:
        count = _number(model.name, "instances", wanted["instances"], min(cores + 1, MOST, _affordable(model, shm)))
        groups = config.instance_group
        if len(groups) > 1:
            raise RepositoryError(f"{model.name}: parameters instances: there are several instance groups; set one")
        group = groups[0] if groups else groups.add()
        group.count = count
    queue = config.dynamic_batching.default_queue_policy
    if "queue_size" in wanted:
        queue.max_queue_size = _number(model.name, "queue_size", wanted["queue_size"], QUEUE_PER_CORE * cores)
    instances = sum(max(1, group.count) for group in config.instance_group) or 1
    largest = 0
    if "largest_batch" in wanted:
        auto = _largest_batch(model, parameters, instances, shm)
        largest = _number(model.name, "largest_batch", wanted["largest_batch"], auto)
        if largest < config.max_batch_size:
            # The batcher stops at the largest preferred size (a single request may hold more).
            config.dynamic_batching.preferred_batch_size[:] = [largest]
        else:
            largest = 0
    threads = threads_of(cores, instances) if "instances" in wanted and "threads" not in parameters else None
    if runtime:
        threads = threads_of(cores, instances)
        config.parameters[RUNTIME_THREADS].string_value = str(threads)
    scale = Scale(instances if "instances" in wanted else 0, threads, queue.max_queue_size, largest)
    return replace(model, config=config), scale


def _affordable(model: Model, shm: int) -> int:
    """How many instances' regions fit into the shared memory, however large the batches are."""
    if model.backend != "python":
        return MOST
    image = 0  # bytes
    for tensor in (*model.config.input, *model.config.output):
        dtype = triton_to_np_dtype(DataType.Name(tensor.data_type).removeprefix("TYPE_"))
        if dtype not in (None, object) and min(tensor.dims, default=0) > 0:
            image += math.prod(tensor.dims) * np.dtype(dtype).itemsize
    batch = max(1, int(model.config.max_batch_size)) * image
    return max(1, shm // SHM_SHARE // (REGION_BYTES + batch))


def _largest_batch(model: Model, parameters: Mapping[str, Any], instances: int, shm: int) -> int:
    image = str(IMAGE_BYTES)
    if "max_bytes" in parameters:
        image = parameters["max_bytes"].string_value.strip()
    # Half of the shared memory for the batches of this model's instances: other models have their own.
    return max(1, min(BATCH_BYTES, shm // 2 // instances) // _number(model.name, "max_bytes", image, IMAGE_BYTES))


def _shm_bytes() -> int:
    info = os.statvfs(SHM)
    return info.f_blocks * info.f_frsize


def _number(model: str, key: str, text: str, auto: int) -> int:
    if text == AUTO:
        return auto
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise RepositoryError(f"{model}: parameters {key}: {text!r} is neither auto nor a number of at least 1")
    return int(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
