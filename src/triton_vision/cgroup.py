"""Where the limits stand that control groups set for this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def limit_files(
    controller: str, unified: str, legacy: str, cgroups: Path = CGROUPS, own: Path = OWN
) -> Iterator[tuple[bool, Path]]:
    """Files that hold a limit, of this process's group and of all around it; each of them counts.

    Args:
        controller: such as ``memory``.
        unified: the file's name in the unified hierarchy (cgroup v2).
        legacy: the file's name in a hierarchy of the controller's own (v1).
        cgroups, own: where the hierarchies are mounted, and which group is this process's.

    Yields:
        Whether it is the unified hierarchy, and a file that need not exist.
    """
    # In a container, the group's own directory is mounted as if it were the root.
    groups = {(True, Path()), (False, Path())}
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                group = Path(path.lstrip("/"))
                groups |= {(not controllers, one) for one in (group, *group.parents)}
    for is_unified, group in sorted(groups):
        yield is_unified, cgroups / group / unified if is_unified else cgroups / controller / group / legacy
