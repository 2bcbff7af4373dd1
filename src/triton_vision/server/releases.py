"""NVIDIA's Triton releases: what they are made of, how callers can crash them, and which GPU driver is new enough.

Sources. CUDA, Python, TensorRT, the least driver and the drivers of data-center GPUs: NVIDIA's release notes of each
release (https://docs.nvidia.com/deeplearning/triton-inference-server/release-notes/rel-26-07.html and its
neighbours). From 26.06 on they name no driver and refer to "CUDA Compatibility" instead, whose table of minor-version
compatibility says 580 for CUDA 13.x
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html). Python of those releases: the
compatibility matrix in the server's documentation
(https://github.com/triton-inference-server/server/blob/main/docs/introduction/compatibility.md). The server's version:
the titles of its releases on GitHub (https://github.com/triton-inference-server/server/releases). What none of them
says, or what could not be looked up, is left empty.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ASK_TIMEOUT_S = 20.0
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"
# Of several branches, the first version that runs with CUDA's forward-compatibility package on data-center GPUs.
DATA_CENTER_DRIVERS = ("470.57", "525.85", "535.86", "545.23")


@dataclass(frozen=True)
class Release:
    """A monthly release of ``nvcr.io/nvidia/tritonserver:RELEASE-py3``.

    Attributes:
        release: year and month.
        server: the version that the server itself tells.
        cuda: the CUDA toolkit in it.
        driver: the least driver branch, on any GPU that the release supports.
        data_center_drivers: older ones that do on a data-center GPU: each stands for itself and what is newer of its
            branch. Empty where the release notes name none.
        python: of the Python backend.
        tensorrt: the version; empty where it could not be looked up.
    """

    release: str
    server: str
    cuda: str
    driver: str
    python: str
    tensorrt: str = ""
    data_center_drivers: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        """The container image's name."""
        return f"nvcr.io/nvidia/tritonserver:{self.release}-py3"


# The newest first. The first is the one that Dockerfile.triton builds on, the last the one that the wheel embeds.
RELEASES = (
    Release("26.07", "2.71.0", cuda="13.3.1", driver="580", python="3.12"),
    Release("26.06", "2.70.0", cuda="13.3.0", driver="580", python="3.12"),
    Release("25.06", "2.59.0", "12.9.1", "575", "3.12", data_center_drivers=DATA_CENTER_DRIVERS),
    Release("25.01", "2.54.0", "12.8.0", "560", "3.12", "10.8.0.43", DATA_CENTER_DRIVERS),
    Release("24.10", "2.51.0", "12.6.2", "560", "3.10", "10.5.0.18", DATA_CENTER_DRIVERS),
)

# The server in each version of the wheel, which tells it nowhere.
EMBEDDED = {"0.7.0": "2.51.0"}


@dataclass(frozen=True)
class Defect:
    """Something that ends a tritonserver, and with it everybody's calls.

    Attributes:
        cause: what does it.
        signal: how the server ends.
        over: where a caller can: ``gRPC``, ``HTTP``, ``shared memory``; empty if no caller can.
        fixed: the first server version without it; empty where none is known.
        source: where that can be read.
        since: the first server version that has it; empty for all.
    """

    cause: str
    signal: str
    over: tuple[str, ...]
    fixed: str
    source: str
    since: str = ""

    def affects(self, version: str) -> bool:
        """Whether a server version has it; false where the version is not one."""
        found = _leading_numbers(version)
        if not found or found < _leading_numbers(self.since):
            return False
        return not self.fixed or found < _leading_numbers(self.fixed)


SERVER = "https://github.com/triton-inference-server/server"
# All of them were seen on 2.51.0; since when and until when is by the sources named, at their tags.
DEFECTS = (
    Defect(
        "cancelled and abandoned calls",
        "SIGSEGV",
        ("gRPC",),
        # By both pull requests; issue 8034 saw it on 2.54.0, which has the first.
        fixed="2.57.0",
        source=f"{SERVER}/pull/7840, {SERVER}/issues/8034, {SERVER}/pull/8078",
        since="2.39.0",
    ),
    Defect(
        "the classification extension on a string output",
        "SIGFPE",
        ("gRPC", "HTTP"),
        fixed="2.59.1",
        source=f"{SERVER}/pull/8267",
    ),
    Defect("a body in millions of tiny chunks", "SIGSEGV", ("HTTP",), fixed="2.59.1", source=f"{SERVER}/pull/8305"),
    Defect(
        "deeply nested JSON",
        "SIGSEGV",
        ("HTTP",),
        fixed="2.69.0",
        source="https://github.com/triton-inference-server/common/pull/156",
    ),
    Defect(
        # Its size is read when it is registered, not when it is used.
        "a registered region that its owner truncates",
        "SIGBUS",
        ("shared memory",),
        fixed="",
        source=f"{SERVER}/blob/r24.10/src/shared_memory_manager.cc",
    ),
    Defect("a pause of 2 s or more under load (SIGSTOP, docker pause)", "SIGABRT", (), fixed="", source="seen here"),
)


def find_defects(server_version: str) -> list[Defect]:
    """The known defects of a server version; none where the version is empty or not one."""
    return [defect for defect in DEFECTS if defect.affects(server_version)]


def find_release(server_version: str) -> Release | None:
    """The release with that server version; None for one that is not in the table."""
    return next((release for release in RELEASES if release.server == server_version), None)


def check_driver(server_version: str, found_driver: str, gpu: str = "") -> str:
    """Whether a driver is new enough for a server.

    Args:
        server_version: such as ``2.71.0``.
        found_driver: such as ``535.183.01``.
        gpu: its name, as ``nvidia-smi`` tells it. CUDA's forward compatibility is for data-center GPUs (and some
            RTX cards), so an older driver that NVIDIA lists for it passes unless this names a GeForce or TITAN.

    Returns:
        Empty if it is, or if the release or the driver is not known; else what was found, what is needed, what to do.
    """
    release, found = find_release(server_version), _numbers(found_driver)
    if release is None or not found or found >= _numbers(release.driver):
        return ""
    consumer = re.search(r"GeForce|TITAN", gpu, re.IGNORECASE) is not None
    if not consumer and any(_same_branch_or_newer(found, _numbers(driver)) for driver in release.data_center_drivers):
        return ""
    older = "" if consumer else _data_center_note(release)
    return (
        f"Triton {server_version} (release {release.release}) runs on CUDA {release.cuda}, which needs NVIDIA driver "
        f"{release.driver} or newer{older}, and this machine has {found_driver}: update the driver, or build the image "
        "on an older release"
    )


def _data_center_note(release: Release) -> str:
    if release.data_center_drivers:
        return f" (on a data-center GPU also {', '.join(release.data_center_drivers)} or newer of the same branch)"
    return f" (on a data-center GPU also what {COMPATIBILITY} lists)"


def _same_branch_or_newer(found: tuple[int, ...], least: tuple[int, ...]) -> bool:
    return found[0] == least[0] and found >= least


def _numbers(version: str) -> tuple[int, ...]:
    """``535.183.01`` as numbers; empty for what is not a version."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)*)\s*", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def _leading_numbers(version: str) -> tuple[int, ...]:
    """``2.54.0dev`` as numbers, without what follows them."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return _numbers(match[0]) if match else ()


def read_driver(kernel_module: Path = KERNEL_MODULE) -> str:
    """The NVIDIA driver's version, from ``nvidia-smi`` or else from the kernel module; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True).stdout
        first = next(iter(told.split("\n"))).strip()
        if _numbers(first):
            return first
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build …"
        match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", kernel_module.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def read_server_version(home: Path, *, embedded: bool = False) -> str:
    """The version of the server in ``home`` (``/opt/tritonserver``): NVIDIA's images tell it in a file and a variable.

    Empty where neither does; tritonserver itself has no option that tells it.

    Args:
        home: the folder with the server's ``bin``.
        embedded: whether it is the wheel's, whose own version tells the server's.
    """
    if embedded:
        try:
            return EMBEDDED.get(metadata.version("nvidia-pytriton"), "")
        except metadata.PackageNotFoundError:
            return ""
    try:
        told = (home / "TRITON_VERSION").read_text(errors="replace").strip()
    except OSError:
        told = ""
    return told if _numbers(told) else os.environ.get("TRITON_SERVER_VERSION", "").strip()


def table() -> str:
    """RELEASES as a Markdown table, as docs/image.md has it."""
    header = (
        "release", "server", "CUDA", "driver, at least", "on data-center GPUs also", "Python", "TensorRT",
        "callers can crash it over",
    )  # fmt: skip
    rows = [header, ("---",) * len(header)]
    for item in RELEASES:
        older = ", ".join(item.data_center_drivers) or "see below"
        crashed = {where for defect in find_defects(item.server) if defect.fixed for where in defect.over}
        over = ", ".join(sorted(crashed)) or "nothing known"
        rows.append((item.release, item.server, item.cuda, item.driver, older, item.python, item.tensorrt or "?", over))
    return _markdown(rows)


def defect_table() -> str:
    """DEFECTS as a Markdown table, as docs/security.md has it."""
    rows = [
        (defect.cause, defect.signal, ", ".join(defect.over) or "no caller can", defect.fixed or "not known")
        for defect in DEFECTS
    ]
    return _markdown([("crashed by", "ends with", "over", "fixed in"), ("---",) * 4, *rows])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
