"""Proves the GPU side on one machine: ResNet-50's artifacts answer on it as the module does on the CPU, and how fast.

    python gpu_check.py [--quick] [--json FILE] [--budget SECONDS]

Needs a checkout, PyTorch with CUDA and numpy; TensorRT's Python package and onnx where the plan is to be checked too.
Nothing is installed, downloaded or left behind. Exit code 0: all that ran agrees; 1: something does not; 2: there is
nothing to run on.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# In place of this folder, whose modules are the package gpu_check: nothing need be installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu_check import engines, lanes  # noqa: E402
from gpu_check.engines import CheckError, Engine, Network, OutOfTime  # noqa: E402
from gpu_check.lanes import Parity, Rate  # noqa: E402

# Seconds of the budget that are kept for measuring when a plan is built.
FOR_MEASURING_S = 60.0


class Check:
    """The whole run: what was found, and what was left out and why."""

    def __init__(self, args: argparse.Namespace, missing: list[str]) -> None:
        self._args, self._missing = args, missing
        self._ends: float = time.monotonic() + args.budget
        self.parities: list[Parity] = []
        self.rates: list[Rate] = []
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._ends - time.monotonic()

    def run(self) -> None:
        """Opens, compares and measures one engine after the other."""
        images = lanes.make_images()
        expected = self._expected(images)
        for name, make in self._engines():
            try:
                say(f"{name}: making it ({self.left():.0f} s left) …")
                engine = make()
                parity = lanes.check_parity(engine, self._args.device, images, expected)
                self.parities.append(parity)
                say(str(parity))
                if not parity.holds:
                    raise CheckError(f"the logits differ by {parity.relative:.2g}, {parity.allowed:g} is allowed")
                self._measure(engine, images, expected)
            except OutOfTime as error:
                self.left_out.append(f"{name}: {error}")
            except CheckError as error:
                self.failed.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001 - one engine's failure must not cost the others
                self.failed.append(f"{name}: {type(error).__name__}: {error}"[:400])

    def _expected(self, images: Any) -> Any:
        import torch

        with torch.inference_mode():
            return engines.make_module(half=False)(torch.from_numpy(images)).numpy()

    def _engines(self) -> list[tuple[str, Callable[[], Engine]]]:
        device, quick = self._args.device, self._args.quick
        chosen: list[tuple[str, Callable[[], Engine]]] = [
            ("TorchScript FP32", lambda: engines.torchscript(device, half=False)),
            ("TorchScript FP16", lambda: engines.torchscript(device, half=True)),
        ]
        if device != "cuda":
            self.left_out.append("TensorRT: it runs on a GPU alone")
            return chosen[: 1 if quick else 2]  # CPUs are slow in FP16
        if self._missing:
            self.left_out.append(f"TensorRT: this Python has no {' and no '.join(self._missing)}")
            return chosen
        most = max(self._args.batches)

        def plan(*, half: bool) -> Engine:
            return engines.tensorrt_engine(half=half, most=most, budget=self.left() - FOR_MEASURING_S)

        chosen.append(("TensorRT FP16", lambda: plan(half=True)))
        if quick:
            self.left_out.append("TensorRT TF32: --quick")
        else:
            chosen.append(("TensorRT TF32", lambda: plan(half=False)))
        return chosen

    def _measure(self, engine: Engine, images: Any, expected: Any) -> None:
        networks: list[Network] = []
        for instances in self._args.instances:
            networks += [engine.open() for _ in range(instances - len(networks))]
            for batch in self._args.batches:
                if self.left() < 2 * self._args.seconds:
                    raise OutOfTime(f"{instances} instances, batch {batch} and what follows: the time was up")
                self.rates.append(
                    lanes.measure(engine, networks, self._args.device, batch, self._args.seconds, images, expected)
                )


def table(rates: Sequence[Rate]) -> str:
    """The measurements, a line each."""
    lines = [f"{'engine':<17}{'batch':>6}{'instances':>11}{'images/s':>11}{'P50 ms':>10}{'P99 ms':>10}{'batches':>9}"]
    lines += [
        f"{rate.engine:<17}{rate.batch:>6}{rate.instances:>11}{rate.images_per_second:>11.1f}"
        f"{rate.p50_ms:>10.2f}{rate.p99_ms:>10.2f}{rate.batches:>9}"
        for rate in rates
    ]
    return "\n".join(lines)


def machine(device: str) -> dict[str, str]:
    """What it ran on."""
    import torch

    found = {"device": device, "torch": str(torch.__version__)}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
        if importlib.util.find_spec("tensorrt") is not None:
            found["tensorrt"] = str(importlib.import_module("tensorrt").__version__)
    return found


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    """``1,8,16`` as numbers of at least 1, ascending."""
    values = sorted({int(part) for part in text.split(",")})
    if values[0] < 1:
        raise ValueError
    return values


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what --quick changes."""
    parser = argparse.ArgumentParser(
        description="Checks ResNet-50 on this machine's GPU against the CPU, and measures it."
    )
    parser.add_argument(
        "--quick", action="store_true", help="batches of 1 and 8, 1 and 2 instances, TensorRT in FP16 alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument(
        "--budget", type=float, default=450.0, metavar="S", help="seconds in all (default: %(default)g)"
    )
    parser.add_argument("--batches", type=numbers, metavar="N,…", help="default: 1,8,16,32")
    parser.add_argument("--instances", type=numbers, metavar="N,…", help="default: 1,2,4; a stream and a thread each")
    parser.add_argument("--seconds", type=float, metavar="S", help="of each measurement (default: 2; --quick: 0.5)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the same code without a GPU, to test it"
    )
    args = parser.parse_args(arguments)
    args.batches = args.batches or ([1, 8] if args.quick else [1, 8, 16, 32])
    args.instances = args.instances or ([1, 2] if args.quick else [1, 2, 4])
    args.seconds = args.seconds or (0.5 if args.quick else 2.0)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; prints a table and a verdict."""
    args = parse(arguments)
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("numpy") is None:
        say("not run: this Python has no PyTorch and numpy")
        return 2
    missing = engines.import_suite()

    import torch

    if args.device == "cuda":
        if not torch.cuda.is_available():
            say(f"not run: PyTorch {torch.__version__} finds no NVIDIA GPU here")
            return 2
        # FP32 means FP32: by default cuDNN takes TF32 for it.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    check = Check(args, missing)
    check.run()
    took = time.monotonic() - began
    passed = bool(check.parities) and not check.failed
    here = machine(args.device)
    print(", ".join(f"{name} {value}" for name, value in here.items()))
    for parity in check.parities:
        print(parity)
    print(table(check.rates))
    for why in check.left_out:
        print(f"not run: {why}")
    for why in check.failed:
        print(f"failed: {why}")
    agreeing = ", ".join(parity.engine for parity in check.parities if parity.holds) or "nothing"
    verdict = f"{'PASS' if passed else 'FAIL'}: {agreeing} on {args.device} as the CPU module; {took:.0f} s"
    print(verdict)
    if args.json:
        found = {
            "passed": passed,
            "seconds": took,
            "machine": here,
            "parity": [{**asdict(parity), "holds": parity.holds} for parity in check.parities],
            "rates": [asdict(rate) for rate in check.rates],
            "left_out": check.left_out,
            "failed": check.failed,
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
