"""Placing the cores on GPUs, and dividing them among tenants: instance groups, memory pools, priorities, a rate limit.

One text says it all, the option ``--placement`` of ``triton-vision serve``::

    gpus=0-3,instances=2,numa=0/0/1/1,cuda-pool=256M,pinned-pool=512M,limit=3,priorities=2
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from triton_vision.repository.model import Model, RepositoryError

# The backends whose models run on a GPU. The Python backend's stages stay where their configuration puts them.
ON_GPU = frozenset({"tensorrt", "pytorch", "onnxruntime"})
# The rate limiter's resource: each core instance takes one for the length of a batch.
RESOURCE = "core"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_PRIORITIES = 16
MOST_BYTES = 1 << 40
NUMA_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Placement:
    """Where the cores run, and for whom first.

    Attributes:
        gpus: the GPUs' numbers as CUDA counts them; none leaves the instance groups as they are.
        instances: of each core on each GPU.
        numa: each GPU's NUMA node, in the order of ``gpus``; empty for none. The instances' threads and their pinned
            memory stay on that node (Triton's host policy).
        cuda_pool: bytes of CUDA memory per GPU that Triton keeps for the tensors between models; None is its default.
        pinned_pool: bytes of pinned host memory, on each NUMA node where these are given; None is its default.
        limit: how many core instances of each GPU may run at once, of all models together; None is all.
        priorities: levels that a request's ``priority`` may name, 1 first; requests without one get the last level.
            0 leaves the queues as they are.
    """

    gpus: tuple[int, ...] = ()
    instances: int = 1
    numa: tuple[int, ...] = ()
    cuda_pool: int | None = None
    pinned_pool: int | None = None
    limit: int | None = None
    priorities: int = 0

    def place(self, model: Model) -> Model:
        """The model with its configuration changed accordingly; itself if nothing changes."""
        if model.config is None or model.is_ensemble:
            return model
        config = copy.deepcopy(model.config)
        if self.gpus and model.backend in ON_GPU:
            del config.instance_group[:]
            config.instance_group.extend(self._group(index) for index in range(len(self.gpus)))
        if self.priorities and config.HasField("dynamic_batching"):
            config.dynamic_batching.priority_levels = self.priorities
            config.dynamic_batching.default_priority_level = self.priorities
        return model if config == model.config else replace(model, config=config)

    def options(self) -> list[str]:
        """tritonserver's command-line options that belong to it."""
        options = []
        if self.numa:
            options += [
                f"--host-policy={_policy(gpu)},numa-node={node}" for gpu, node in zip(self.gpus, self.numa, strict=True)
            ]
        if self.cuda_pool is not None:
            options += [f"--cuda-memory-pool-byte-size={gpu}:{self.cuda_pool}" for gpu in self.gpus]
        if self.pinned_pool is not None:
            options.append(f"--pinned-memory-pool-byte-size={self.pinned_pool}")
        if self.limit is not None:
            options.append("--rate-limit=execution_count")
            options += [f"--rate-limit-resource={RESOURCE}:{self.limit}:{gpu}" for gpu in self.gpus]
        return options

    def _group(self, index: int) -> Any:
        gpu = self.gpus[index]
        group = model_config_pb2.ModelInstanceGroup(
            kind=model_config_pb2.ModelInstanceGroup.KIND_GPU, count=self.instances, gpus=[gpu]
        )
        if self.numa:
            group.host_policy = _policy(gpu)
        if self.limit is not None:
            group.rate_limiter.resources.add(name=RESOURCE, count=1)
        return group

    def __str__(self) -> str:
        parts = []
        if self.gpus:
            each = "1 instance" if self.instances == 1 else f"{self.instances} instances"
            parts.append(f"{each} of each core on GPU {', '.join(map(str, self.gpus))}")
        if self.numa:
            parts.append(f"NUMA nodes {', '.join(map(str, self.numa))}")
        if self.limit is not None:
            parts.append(f"at most {self.limit} at once on each GPU")
        if self.priorities:
            parts.append(f"{self.priorities} priority levels")
        return "; ".join(parts) or "nothing changed"


def parse_placement(text: str) -> Placement:
    """Reads the text of ``--placement``.

    Raises:
        RepositoryError: with what is wrong in one sentence.
    """
    values: dict[str, Any] = {}
    last = ""
    for part in (part.strip() for part in text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        # `gpus=0,1` is split at its comma: a bare number goes on with the list right before it.
        if not equals and last == "gpus" and re.fullmatch(r"[0-9]+(-[0-9]+)?", key):
            values["gpus"] += _gpus(key)
            continue
        if key not in _READERS:
            raise RepositoryError(f"--placement: {part!r} is none of {', '.join(_READERS)}, each as NAME=VALUE")
        if key in values:
            raise RepositoryError(f"--placement: {key} is given twice")
        values[key] = _READERS[key](value)
        last = key
    placement = Placement(**{key.replace("-", "_"): value for key, value in values.items()})
    if len(set(placement.gpus)) != len(placement.gpus):
        raise RepositoryError("--placement: a GPU is named twice")
    if placement.numa and len(placement.numa) != len(placement.gpus):
        raise RepositoryError(
            f"--placement: numa has {len(placement.numa)} nodes for {len(placement.gpus)} GPUs; give one for each"
        )
    needs_gpus = [key for key in ("instances", "numa", "cuda-pool", "limit") if key in values]
    if needs_gpus and not placement.gpus:
        raise RepositoryError(f"--placement: {needs_gpus[0]} needs gpus, such as gpus=0 or gpus=0-3")
    return placement


def _policy(gpu: int) -> str:
    return f"gpu_{gpu}"


def _gpus(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"([0-9]{1,2})(?:-([0-9]{1,2}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise RepositoryError(f"--placement: gpus={text!r} is neither a GPU's number nor a range such as 0-3")
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1))


def _numa(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,3}(/[0-9]{1,3})*", text):
        raise RepositoryError(f"--placement: numa={text!r} is not a node for each GPU, such as 0/0/1/1")
    return tuple(int(node) for node in text.split("/"))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)", text.upper())
    size = int(match[1]) * UNITS[match[2]] if match else MOST_BYTES + 1
    if size > MOST_BYTES:
        raise RepositoryError(f"--placement: {text!r} is not a size up to 1024G, such as 268435456, 256M or 1G")
    return size


def _count(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= most:
            raise RepositoryError(f"--placement: {text!r} is not a number from 1 to {most}")
        return int(text)

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "gpus": _gpus,
    "instances": _count(64),
    "numa": _numa,
    "cuda-pool": _bytes,
    "pinned-pool": _bytes,
    "limit": _count(64),
    "priorities": _count(MOST_PRIORITIES),
}


def check_gpus(placement: Placement, present: Sequence[int]) -> None:
    """Raises RepositoryError if the placement names a GPU that is not among those ``present``, or no NUMA node."""
    missing = [gpu for gpu in placement.gpus if gpu not in present]
    if missing:
        have = f"there are {', '.join(map(str, present))}" if present else "this machine has none that can be seen here"
        raise RepositoryError(f"--placement: there is no GPU {missing[0]}: {have}")
    unknown = [node for node in placement.numa if not (NUMA_NODES / f"node{node}").exists()]
    if unknown:
        raise RepositoryError(f"--placement: this machine has no NUMA node {unknown[0]}")
