"""How many cores this process may use, which in a container is not how many the host has."""

from __future__ import annotations

import math
import os
from pathlib import Path


def visible_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that the scheduler's affinity mask and the cgroup's CPU quota leave; at least 1.

    A quota (``cpu.max`` in cgroup v2, ``cpu.cfs_quota_us`` in v1) is rounded up.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def threads_of(cores: int, instances: int) -> int:
    """Threads for each of a model's instances, so that together they use all cores; at least 1."""
    return max(1, -(-cores // max(1, instances)))


def _quota(cgroup: Path) -> float | None:
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return quota / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None
