"""From an ONNX graph to a TensorRT plan, and whether a plan that is there fits this machine.

A plan belongs to the GPU model, the TensorRT version, the optimization profile and the graph that it was built from:
its sidecar holds all four. Networks are strongly typed: the precision is the graph's own. No PyTorch is needed: the
container builds its plan when it starts.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton_vision.export import artifact
from triton_vision.export.weights import sha256
from triton_vision.gpu import Gpu, visible_gpus

PLAN, GRAPH, TIMING_CACHE = "model.plan", "model.onnx", "timing.cache"
INPUT, IMAGE = "INPUT__0", (224, 224, 3)
# By path: the package around it needs what this environment may not have.
LAUNCH = Path(__file__).parents[1] / "server" / "launch.py"
# NVIDIA's own images keep the tool here.
TRTEXEC = "/usr/src/tensorrt/bin/trtexec"
# TensorRT 11 has strongly typed networks only; 10 has to be told.
ALWAYS_TYPED = 11


class PlanError(Exception):
    """A plan cannot be built or used; its text is one plain sentence."""


@dataclass(frozen=True)
class Profile:
    """The batch sizes that a plan is made for: it runs any from ``min`` to ``max``, and is tuned for ``opt``."""

    min: int
    opt: int
    max: int


def profile_of(config: Any) -> Profile:
    """From 1 to the configuration's ``max_batch_size``, tuned for the largest of its ``preferred_batch_size``."""
    most = max(1, config.max_batch_size)
    preferred = [size for size in config.dynamic_batching.preferred_batch_size if size <= most]
    return Profile(1, max(preferred, default=most), most)


@dataclass(frozen=True)
class Machine:
    """What a plan depends on beside its graph.

    Attributes:
        gpus: the GPUs that it shall run on.
        tensorrt: the version that Triton will load it with, such as ``10.3.0``; empty if that cannot be found out.
    """

    gpus: Sequence[Gpu]
    tensorrt: str


def tensorrt_version() -> str:
    """The version of the TensorRT library that the loader finds; empty without one."""
    name = ctypes.util.find_library("nvinfer")
    if name is None:
        return ""
    try:
        number = int(ctypes.CDLL(name).getInferLibVersion())
    except (OSError, AttributeError):
        return ""
    return version_of(number)


def version_of(number: int) -> str:
    """``100300`` -> ``10.3.0``, and ``8601`` -> ``8.6.1``, as TensorRT counted before version 10."""
    base = 10000 if number >= 100000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def stale(plan: Path, graph: Path, profile: Profile, machine: Machine) -> str:
    """Why the plan must not be used here: one sentence that names what differs; empty if it may be."""
    if not plan.exists():
        return f"there is no {plan.name} yet"
    stated = artifact.read(plan)
    if not stated:
        return f"{plan.name} is not what its sidecar says, or has none (half-written, swapped or copied alone)"
    built_for = stated.get("gpu") or {}
    for gpu in machine.gpus:
        here = {"name": gpu.name, "compute_capability": gpu.compute_capability}
        if here != built_for:
            return (
                f"{plan.name} was built for another GPU: {built_for.get('name')} (compute capability "
                f"{built_for.get('compute_capability')}), and GPU {gpu.index} is {gpu.name} ({gpu.compute_capability})"
            )
    built_with = str(stated.get("tensorrt", ""))
    if machine.tensorrt and built_with.split(".")[:3] != machine.tensorrt.split(".")[:3]:
        return f"{plan.name} was built with another TensorRT: {built_with}, and this is {machine.tensorrt}"
    if stated.get("profile") != asdict(profile):
        return (
            f"{plan.name} was built for another profile: {_shown(stated.get('profile'))}, "
            f"and the configuration asks for {_shown(asdict(profile))}"
        )
    if graph.exists() and stated.get("onnx_sha256") != sha256(graph):
        return f"{plan.name} was built from another {graph.name} than the one that is there"
    return ""


def _shown(profile: Any) -> str:
    if not isinstance(profile, dict):
        return "none"
    return f"batches of {profile.get('min')} to {profile.get('max')}, tuned for {profile.get('opt')}"


def builder() -> str:
    """What can build a plan here: ``tensorrt`` (its Python package) or the path of ``trtexec``; empty if nothing."""
    if importlib.util.find_spec("tensorrt") is not None:
        return "tensorrt"
    return shutil.which("trtexec") or (TRTEXEC if os.access(TRTEXEC, os.X_OK) else "")


def build(plan: Path, graph: Path, profile: Profile, machine: Machine) -> None:
    """Builds the plan for the machine's first GPU and replaces ``plan`` and its sidecar; takes minutes.

    TensorRT's timings are kept beside it, so that the next build on the same GPU is faster.

    Raises:
        PlanError: nothing here can build it, the graph is missing, or TensorRT refused it; nothing is changed then.
    """
    with_what = builder()
    if not with_what:
        raise PlanError("neither TensorRT's Python package nor trtexec is here to build a plan")
    if not machine.gpus:
        raise PlanError("nvidia-smi names no GPU to build a plan for")
    if not graph.exists():
        raise PlanError(f"there is no {graph.name} to build it from: run triton-vision prepare")
    try:
        plan.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{plan.parent} cannot be written ({error.strerror}); name another with --artifacts") from None
    if not os.access(plan.parent, os.W_OK):
        raise PlanError(f"{plan.parent} cannot be written; name another with --artifacts")
    artifact.remove_stale(plan)
    gpu = machine.gpus[0]
    cache = plan.with_name(TIMING_CACHE)
    if with_what == "tensorrt":
        content, version = build_with_package(graph, profile, cache)
    else:
        content, version = _build_with_trtexec(with_what, graph, profile, cache)
    origin = artifact.read(graph)
    description = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "weights": origin.get("weights", "unknown"),
        "weights_source": origin.get("weights_source", graph.name),
        "weights_sha256": origin.get("weights_sha256", ""),
        "precision": origin.get("precision", "unknown"),
        "tensors": origin.get("tensors"),
        "max_abs_logit_difference": origin.get("max_abs_logit_difference"),
        "onnx_sha256": sha256(graph),
        "profile": asdict(profile),
        "gpu": {"name": gpu.name, "compute_capability": gpu.compute_capability},
        "tensorrt": machine.tensorrt or version,
        "tools": {"tensorrt": version, "builder": os.path.basename(with_what)},
    }
    artifact.write(plan, content, description)


def build_with_package(graph: Path, profile: Profile, cache: Path) -> tuple[bytes, str]:
    """The plan's bytes and TensorRT's version, through TensorRT's Python API.

    Raises:
        PlanError: TensorRT cannot read the graph, or finds no way to run it.
    """
    import tensorrt

    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    maker = tensorrt.Builder(logger)
    network = maker.create_network(network_flags(tensorrt))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(graph.read_bytes()):
        first = parser.get_error(0).desc() if parser.num_errors else "no reason given"
        raise PlanError(f"TensorRT cannot read {graph.name}: {first}")
    config = maker.create_builder_config()
    kept = cache.read_bytes() if cache.exists() else b""
    timing = config.create_timing_cache(kept)
    # A cache of another GPU or version is refused here, and a new one begun.
    if not config.set_timing_cache(timing, ignore_mismatch=False):
        timing = config.create_timing_cache(b"")
        config.set_timing_cache(timing, ignore_mismatch=False)
    shapes = maker.create_optimization_profile()
    shapes.set_shape(INPUT, *((batch, *IMAGE) for batch in (profile.min, profile.opt, profile.max)))
    config.add_optimization_profile(shapes)
    plan = maker.build_serialized_network(network, config)
    if plan is None:
        raise PlanError(f"TensorRT could not build a plan from {graph.name}; its log says why")
    artifact.replace(cache, bytes(config.get_timing_cache().serialize()))
    return bytes(plan), str(tensorrt.__version__)


def network_flags(tensorrt: Any) -> int:
    """The creation flags of a strongly typed network in this version of TensorRT."""
    if int(str(tensorrt.__version__).split(".")[0]) >= ALWAYS_TYPED:
        return 0
    return 1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _build_with_trtexec(tool: str, graph: Path, profile: Profile, cache: Path) -> tuple[bytes, str]:
    version = trtexec_version(_run([tool, "--help"])[1])
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=".plan-") as folder:
        made = Path(folder, PLAN)
        code, said = _run(trtexec_command(tool, graph, made, profile, cache, version))
        if code or not made.exists():
            errors = [line for line in said.splitlines() if "[E]" in line] or said.splitlines()[-1:]
            raise PlanError(f"trtexec could not build a plan from {graph.name}: {' '.join(errors[:1])[:300]}")
        return made.read_bytes(), version


def trtexec_command(tool: str, graph: Path, made: Path, profile: Profile, cache: Path, version: str) -> list[str]:
    """trtexec's command line for the same build."""
    command = [tool, f"--onnx={graph}", f"--saveEngine={made}", f"--timingCacheFile={cache}", "--skipInference"]
    for which, batch in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
        command.append(f"--{which}Shapes={INPUT}:{'x'.join(map(str, (batch, *IMAGE)))}")
    if version and int(version.split(".")[0]) < ALWAYS_TYPED:
        command.append("--stronglyTyped")
    return command


def trtexec_version(said: str) -> str:
    """The version in trtexec's first line, ``… [TensorRT v100300] …``; empty if there is none."""
    match = re.search(r"TensorRT v(\d+)", said)
    return version_of(int(match[1])) if match else ""


def _run(command: list[str]) -> tuple[int, str]:
    # Bound to this process's life: a build that nobody waits for must not go on.
    bound = [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), *command]
    done = subprocess.run(bound, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m triton_vision.export.plan GRAPH PLAN MIN OPT MAX``: builds one plan for this machine's first GPU.

    A process of its own, since a build takes minutes within one call of TensorRT, and whoever waits may have to leave.
    """
    parser = argparse.ArgumentParser(prog="python -m triton_vision.export.plan")
    parser.add_argument("graph", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("batches", type=int, nargs=3, metavar="N")
    args = parser.parse_args(arguments)
    machine = Machine(visible_gpus(), tensorrt_version())
    try:
        build(args.plan, args.graph, Profile(*args.batches), machine)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
