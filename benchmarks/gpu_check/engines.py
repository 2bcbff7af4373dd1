"""The ways to run ResNet-50: the suite's own artifacts, made on the spot from seeded random weights.

As a program, ``engines.py GRAPH PLAN N``: builds a TensorRT plan for batches of 1 to N.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
LAUNCH = SOURCE / "triton_vision" / "server" / "launch.py"
CORE, CLASSES = "resnet50_trt", 1000

Network = Callable[[Any], Any]


class CheckError(Exception):
    """One engine cannot be run; the text is one sentence."""


class OutOfTime(CheckError):
    """There was no time for it, which says nothing about it."""


@dataclass(frozen=True)
class Engine:
    """One way to run the network.

    Attributes:
        name: such as ``TorchScript``.
        precision: ``FP32``, ``TF32`` or ``FP16``.
        open: makes one more instance of it, UINT8 ``[N, 224, 224, 3]`` on the device to FP32 ``[N, 1000]`` there.
    """

    name: str
    precision: str
    open: Callable[[], Network]

    def __str__(self) -> str:
        return f"{self.name} {self.precision}"


def import_suite() -> list[str]:
    """Makes the suite's export modules importable from the checkout, where nothing is installed.

    ``export.graph`` imports ONNX's packages for functions that TorchScript does not need: where they are missing, empty
    modules take their place.

    Returns:
        Which of the packages that a plan needs are missing.
    """
    missing = [name for name in ("tensorrt", "onnx") if importlib.util.find_spec(name) is None]
    sys.path.insert(0, str(SOURCE))
    for name in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    return missing


def make_module(*, half: bool) -> Any:
    """ResNet-50 with seeded random weights, from pixels to logits, on the CPU."""
    from triton_vision.export.graph import FromPixels
    from triton_vision.export.networks import NETWORKS

    network = NETWORKS[CORE]
    module, _ = network.build("random")
    return FromPixels(module, network.mean, network.std, half=half).eval()


def torchscript(device: str, *, half: bool) -> Engine:
    """The artifact that Triton's PyTorch backend loads: traced and frozen on the CPU, then loaded on the device."""
    import torch

    from triton_vision.export import script

    content = script.export(make_module(half=half))

    def load() -> Network:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated
            loaded: Network = torch.jit.load(io.BytesIO(content), map_location=device)
            return loaded

    return Engine("TorchScript", "FP16" if half else "FP32", load)


def tensorrt_engine(*, half: bool, most: int, budget: float) -> Engine:
    """A strongly typed plan from the ONNX graph, for batches of 1 to ``most``, built within ``budget`` seconds.

    Raises:
        CheckError: it cannot be built, or not in time.
    """
    from triton_vision.export import graph

    if budget <= 0:
        raise OutOfTime("no time was left to build the plan: allow a larger --budget")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        source, plan = Path(folder, "model.onnx"), Path(folder, "model.plan")
        source.write_bytes(graph.export(make_module(half=half)))
        # A build is one call that takes minutes: in a process of its own it can be ended, and ends with this one.
        bound = [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid())]
        own = [sys.executable, str(Path(__file__).resolve()), str(source), str(plan), str(most)]
        try:
            done = subprocess.run([*bound, *own], stderr=subprocess.PIPE, text=True, timeout=budget)
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"the plan was not built within {budget:.0f} s: allow a larger --budget") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise CheckError(f"the plan was not built: {said[-1] if said else f'exit code {done.returncode}'}")
        content = plan.read_bytes()
    return Engine("TensorRT", "FP16" if half else "TF32", lambda: open_plan(content))


def build_plan(source: Path, plan: Path, most: int) -> None:
    """Builds the plan file; called in a process of its own."""
    from triton_vision.export.plan import Profile, build_with_package

    content, _ = build_with_package(source, Profile(1, most, most), plan.with_name("timing.cache"))
    plan.write_bytes(content)


def open_plan(content: bytes) -> Network:
    """An engine and a context of its own, as each of Triton's instances has."""
    import torch

    tensorrt = importlib.import_module("tensorrt")
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise CheckError("TensorRT cannot load the plan that it has built")
    context = engine.create_execution_context()

    # The context needs the other two for as long as it lives.
    def run(pixels: Any, *, needed: tuple[Any, Any] = (runtime, engine)) -> Any:
        del needed
        logits = torch.empty(len(pixels), CLASSES, device=pixels.device)
        accepted = (
            context.set_input_shape("INPUT__0", tuple(pixels.shape)),
            context.set_tensor_address("INPUT__0", pixels.data_ptr()),
            context.set_tensor_address("OUTPUT__0", logits.data_ptr()),
            context.execute_async_v3(torch.cuda.current_stream().cuda_stream),
        )
        if not all(accepted):
            raise CheckError(f"TensorRT refused a batch of {len(pixels)}")
        return logits

    return run


if __name__ == "__main__":
    import_suite()
    build_plan(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
