"""How many cores this process may use, which in a container is not how many the host has."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from triton_vision.cgroup import CGROUPS, OWN, limit_files


def visible_cores(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """The cores that the scheduler's affinity mask and the control groups' CPU quotas leave; at least 1.

    A quota (``cpu.max`` in cgroup v2, ``cpu.cfs_quota_us`` in v1) is rounded up.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(cores, _quota(cgroups, own))))


def threads_of(cores: int, instances: int) -> int:
    """Threads for each of a model's instances, so that together they use all cores; at least 1."""
    return max(1, -(-cores // max(1, instances)))


def _quota(cgroups: Path, own: Path) -> float:
    """The lowest quota in cores; infinite without one."""
    lowest = math.inf
    for unified, file in limit_files("cpu", "cpu.max", "cpu.cfs_quota_us", cgroups, own):
        with contextlib.suppress(OSError, ValueError):
            if unified:
                quota, period = file.read_text().split()
            else:
                quota, period = file.read_text(), file.with_name("cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                lowest = min(lowest, int(quota) / int(period))
    return lowest
