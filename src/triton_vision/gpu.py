"""The NVIDIA GPUs that this process can see, asked of ``nvidia-smi``, which the container toolkit brings along."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: as CUDA counts them by default, by PCI bus.
        name: such as ``NVIDIA L4``.
        compute_capability: such as ``8.9``.
    """

    index: int
    name: str
    compute_capability: str


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible to this process (its device node, as containers and hosts both have)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def visible_gpus() -> list[Gpu]:
    """The visible GPUs; empty where there is none, or no ``nvidia-smi`` to ask."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name,compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(answer)


def parse_gpus(answer: str) -> list[Gpu]:
    """Reads lines such as ``0, NVIDIA L4, 8.9``; lines that are none are skipped."""
    gpus = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdecimal():
            gpus.append(Gpu(int(fields[0]), fields[1], fields[2]))
    return gpus
