"""The side-by-side run: the suite, plain loops without a server, FastAPI, LitServe and a tutorial-style Triton.

``make compare`` runs it. Contestants take turns, so that a noisy minute hits all of them; each figure is the median
of the rounds, and ratios are medians of ratios within a round. Prints a table; writes results.json, table.md and
plot.svg into build/benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import repository

from triton_vision.server import TritonServer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "benchmark"
SUITE_PYTHON, PEER_PYTHON = sys.executable, str(ROOT / ".venv-bench" / "bin" / "python")
# What the suite's own server sets for its allocator, so that no contestant pays page faults that another is spared.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(32 * 1024 * 1024)}
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Contestant:
    """How it is measured, and the process group of its server, which sleeps while others have their turn."""

    command: list[str]
    group: int | None = None


def environment(tuned: bool = True) -> dict[str, str]:
    """One BLAS thread for each process; ``tuned``: with the allocator's settings."""
    return {**os.environ, **(MALLOC if tuned else {}), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def wake(group: int | None, awake: bool) -> None:
    """Continues or stops a server's processes."""
    if group is not None:
        os.killpg(group, signal.SIGCONT if awake else signal.SIGSTOP)


def output_of(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints last."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=HERE)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[1:4])}: {(done.stderr or done.stdout).strip()[-600:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def http_peer(command: list[str], port: int, protocol: str, tuned: bool) -> Iterator[tuple[str, int]]:
    """A peer in a process group of its own, waited for, ended: its address and group."""
    log = (BUILD / f"peer-{port}.log").open("wb")
    process = subprocess.Popen(
        command, env=environment(tuned), cwd=HERE / "peers", stdout=log, stderr=log, start_new_session=True
    )
    try:
        # Ready is who answers a call of the load generator's.
        address = f"127.0.0.1:{port}"
        probe = [SUITE_PYTHON, "load.py", protocol, address, "--images", str(BUILD / "images"), "--callers", "1"]
        probe += ["--seconds", "0.2", "--warm", "0"]
        deadline = time.monotonic() + 60
        while subprocess.run(probe, cwd=HERE, capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: {command[1:]} does not serve; see {log.name}")
        yield address, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            wake(process.pid, True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        log.close()


@contextlib.contextmanager
def triton(folder: Path, warm: bool) -> Iterator[TritonServer]:
    """A Triton on a repository, awake again when it is to end."""
    with TritonServer(folder, warm=warm) as server:
        try:
            yield server
        finally:
            wake(server.pid, True)


def contestants(stack: contextlib.ExitStack, kind: str, which: set[str]) -> dict[str, Contestant]:
    """By name; servers are started here and end with ``stack``."""
    common = ["--images", str(BUILD / "images"), "--kind", kind]

    def loop(python: str, name: str) -> Contestant:
        return Contestant([python, "loops.py", name, *common])

    load = [SUITE_PYTHON, "load.py"]
    served = ["--images", str(BUILD / "images"), "--kind", kind]
    if kind == "large":
        # They take tenths of a second each: fewer callers and a longer warm-up make a short measurement steady.
        served += ["--callers", "8", "--warm", "4"]

    made = {"reference loop": loop(PEER_PYTHON, "reference"), "kit loop": loop(SUITE_PYTHON, "kit")}
    if kind == "large":
        made["kit loop, decode: fast"] = loop(SUITE_PYTHON, "kit-fast")
    server = stack.enter_context(triton(repository.suite(BUILD / "suite"), warm=True))
    suite = [*load, "grpc", server.grpc_address, *served]
    made["suite"] = Contestant(suite, server.pid)
    unchecked = ["--tolerance", "-1", "--model"]
    if kind == "large":
        made["suite, decode: fast"] = Contestant([*suite, *unchecked, "ensemble_fast"], server.pid)
    else:
        made["suite, no preprocessing"] = Contestant([*suite, *unchecked, "ensemble_nothing"], server.pid)
        made["suite, one caller"] = Contestant([*suite, "--callers", "1"], server.pid)
    tutorial = stack.enter_context(triton(repository.tutorial(BUILD / "tutorial"), warm=False))
    made["tutorial Triton"] = Contestant(
        [*load, "grpc", tutorial.grpc_address, *served, "--model", "tutorial"], tutorial.pid
    )
    wake(tutorial.pid, False)
    wake(server.pid, False)
    uvicorn = ["-m", "uvicorn", "fastapi_app:app", "--log-level", "error", "--no-access-log", "--workers", str(CORES)]
    peers: dict[str, tuple[list[str], str, bool]] = {
        "FastAPI": (uvicorn, "http", False),
        "FastAPI, allocator tuned": (uvicorn, "http", True),
        f"LitServe, {CORES} workers": (["litserve_app.py", "--workers", str(CORES)], "json", False),
        f"LitServe, {2 * CORES} workers": (["litserve_app.py", "--workers", str(2 * CORES)], "json", False),
    }
    for name, (command, protocol, tuned) in peers.items():
        if which and name not in which:
            continue
        port = free_port()
        address, group = stack.enter_context(
            http_peer([PEER_PYTHON, *command, "--port", str(port)], port, protocol, tuned)
        )
        made[name] = Contestant([*load, protocol, address, *served], group)
        wake(group, False)
    return {name: contestant for name, contestant in made.items() if not which or name in which}


def measure(kind: str, rounds: int, seconds: float, which: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Each contestant's results, one of every round."""
    results: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        ready = contestants(stack, kind, which)
        for turn in range(rounds):
            for name, contestant in ready.items():
                wake(contestant.group, True)
                results.setdefault(name, []).append(output_of([*contestant.command, "--seconds", str(seconds)]))
                wake(contestant.group, False)
            done = {name: round(values[-1]["rate"], 1) for name, values in results.items()}
            print(f"{kind}, round {turn + 1} of {rounds}: {done}", file=sys.stderr, flush=True)
    return results


def ratios(results: dict[str, list[dict[str, Any]]], over: str) -> dict[str, float]:
    """Each contestant's rate over another's, the median of the rounds."""
    base = [value["rate"] for value in results[over]]
    return {
        name: statistics.median(value["rate"] / rate for value, rate in zip(values, base, strict=True))
        for name, values in results.items()
    }


def report(kind: str, results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table, in Markdown."""
    what = {"small": "500x375, about 65 kB", "large": "4000x3000, about 3.5 MB"}[kind]
    lines = [f"### {what}", "", "| | images/s | of the reference loop | P50 ms | P99 ms |", "|---|---:|---:|---:|---:|"]
    relative = ratios(results, "reference loop")
    for name, values in results.items():
        median = {key: statistics.median(value[key] for value in values) for key in values[0]}
        times = f"{median['p50']:.1f} | {median['p99']:.1f}" if "p50" in median else "|"
        lines.append(f"| {name} | {median['rate']:.0f} | {relative[name]:.2f} | {times} |")
    lines.append("")
    if kind == "small":
        lines += small_facts(results)
    else:
        over = ratios(results, "tutorial Triton")
        lines.append(
            f"Over the tutorial's rate: exact {over['suite']:.2f}, decode: fast {over['suite, decode: fast']:.2f}."
        )
    return [*lines, ""]


def small_facts(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What bounds the served rate, and how far it is from there."""
    rounds = zip(
        *(results[name] for name in ("kit loop", "suite, no preprocessing", "suite", "suite, one caller")), strict=True
    )
    bounds, shares, over = [], [], []
    for loop, nothing, served, single in rounds:
        bound = 1 / (1 / loop["rate"] + 1 / nothing["rate"])
        bounds.append(bound)
        shares.append(served["rate"] / bound)
        over.append(single["p50"] - 1e3 * CORES / loop["rate"])
    lines = [
        f"B, where 1/B = 1/(kit loop) + 1/(no preprocessing): {statistics.median(bounds):.0f} images/s; "
        f"served: {statistics.median(shares):.2f} of it.",
        f"One caller: {statistics.median(over):.2f} ms (P50) over the kit loop's time for an image.",
    ]
    peers = [name for name in results if name.startswith(("FastAPI", "LitServe", "tutorial"))]
    return lines + [f"Over {peer}: {ratios(results, peer)['suite']:.2f}." for peer in peers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--kind", choices=("small", "large"), help="one size of image only")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these contestants only")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    images.make(BUILD / "images", small=200, large=6)
    load = os.getloadavg()[0]
    everything, lines = {}, []
    for kind in [args.kind] if args.kind else ["small", "large"]:
        everything[kind] = measure(kind, args.rounds, args.seconds, set(args.only))
        if not args.only:
            lines += report(kind, everything[kind])
    machine = f"{CORES} cores, {platform.processor() or platform.machine()}, load {load:.2f} before the run"
    lines.append(f"{args.rounds} rounds of {args.seconds:g} s each, 32 callers (8 for the large images); {machine}.")
    print("\n".join(lines))
    (BUILD / "results.json").write_text(json.dumps({"machine": machine, "results": everything}, indent=1))
    (BUILD / "table.md").write_text("\n".join(lines) + "\n")
    if not args.only:
        subprocess.run([PEER_PYTHON, str(HERE / "plot.py"), str(BUILD)], check=True)


if __name__ == "__main__":
    main()
