"""TensorRT plans at start: those that fit this machine are used, the others built anew or refused, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from triton_vision.export import plan as plans
from triton_vision.gpu import visible_gpus
from triton_vision.repository.model import Model, read_model
from triton_vision.server import launch

POLL_S = 0.2


def ensure_plans(
    repository: Path,
    artifacts: Path | None,
    stop: threading.Event,
    say: Callable[[str], None],
    *,
    build: bool = True,
) -> dict[str, str]:
    """Sees to it that every TensorRT model of the suite has a plan for this machine.

    That concerns models with a ``model.onnx`` to build from, or a plan with a sidecar. Any other plan is its owner's.

    Args:
        repository: the model repository.
        artifacts: where plans are built, as MODEL/VERSION/model.plan; None builds beside the graph.
        stop: ends a build that is under way.
        say: takes a line about what is being done.
        build: false only looks.

    Returns:
        The models whose plan must not be used -> why.
    """
    refused: dict[str, str] = {}
    machine = plans.Machine(visible_gpus(), plans.tensorrt_version())
    for folder in sorted(entry for entry in repository.iterdir() if entry.is_dir()):
        model = read_model(folder, None, artifacts)
        if model.config is None or model.backend != "tensorrt" or stop.is_set():
            continue
        for version in model.served_versions():
            why = _ensure(model, version, artifacts, machine, stop, say if build else None)
            if why:
                refused[model.name] = why
    return refused


def _ensure(
    model: Model,
    version: Path,
    artifacts: Path | None,
    machine: plans.Machine,
    stop: threading.Event,
    say: Callable[[str], None] | None,
) -> str:
    graph, plan = model.artifact(version, plans.GRAPH), model.artifact(version, plans.PLAN)
    described = plan.with_name(f"{plan.name}.json").exists()
    if not graph.exists() and not described:
        return ""
    profile = plans.profile_of(model.config)
    why = plans.stale(plan, graph, profile, machine)
    if say is None:
        return why
    if not why:
        say(f"{model.name}: {plan.name} fits this machine")
        return ""
    target = artifacts / model.name / version.name / plans.PLAN if artifacts is not None else plan
    say(f"{model.name}: {why}; building one from {graph.name}, which takes some minutes …")
    failed = _build(graph, target, profile, stop)
    if failed:
        return f"{why}, and none could be built: {failed}"
    return ""


def _build(graph: Path, plan: Path, profile: plans.Profile, stop: threading.Event) -> str:
    """Builds in a process that ends with this one, or at once when ``stop`` is set; returns why it failed."""
    batches = [str(number) for number in astuple(profile)]
    command = [sys.executable, "-m", plans.__name__, str(graph), str(plan), *batches]
    bound = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]
    with subprocess.Popen(bound, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                _, said = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if stop.is_set():
                    process.kill()
                    process.communicate()
                    return "it was ended before it was built"
    lines = said.strip().splitlines()
    return "" if process.returncode == 0 else (lines[-1] if lines else f"exit code {process.returncode}")
