"""System shared memory for callers on the server's own host: regions to write images into, so that gRPC carries none.

A region is a file in /dev/shm. Its name holds the process that made it, by PID namespace, number and start time, so
that whoever comes after a crash can tell what is left over, and remove it. Other containers' processes are not judged.
Servers know it by that name with a secret behind it: whoever may infer could read and write a region by its name alone.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import secrets
import struct
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from tritonclient.grpc import service_pb2

SHM = Path("/dev/shm")
PREFIX = "triton_vision_client"
NAME = re.compile(rf"({PREFIX}\.(\d+)\.(\d+)\.(\d+)\.\d+)(?:\.[0-9a-f]{{32}})?")
# Regions come in powers of two from here on, so that few serve for many.
SMALLEST = 1 << 20
# Free regions that are kept, in bytes in all.
KEPT = 64 << 20
# Told apart by number, in all pools of a process.
_numbers = itertools.count()
# What Triton answers where a region is not, or no longer, registered: it has been restarted.
UNKNOWN_REGION = "unable to find shared memory region"


class Region:
    """A piece of shared memory of this process.

    Attributes:
        name: by which a server knows it.
    """

    def __init__(self, file: str, size: int) -> None:
        self.name, self.size = f"{file}.{secrets.token_hex(16)}", size
        self._file = file
        path = SHM / file
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserves the memory: a write into a full /dev/shm would otherwise end this process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def write(self, images: Sequence[bytes]) -> int:
        """Writes a BYTES tensor; returns its length."""
        at = 0
        for image in images:
            struct.pack_into("<I", self._map, at, len(image))
            self._map[at + 4 : at + 4 + len(image)] = image
            at += 4 + len(image)
        return at

    def registration(self) -> Any:
        """The message that tells a server of it."""
        return service_pb2.SystemSharedMemoryRegisterRequest(name=self.name, key=f"/{self._file}", byte_size=self.size)

    def remove(self) -> None:
        """Gives the memory back, once the server has done so, too. Idempotent."""
        with suppress(FileNotFoundError):
            (SHM / self._file).unlink()
        self._map.close()


class RegionPool:
    """The regions of one client in one process. Safe to use from several threads.

    ``registered`` says for each region which servers know it; the client keeps it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[Region] = []
        self._all: set[Region] = set()
        self.registered: dict[Region, set[Any]] = {}
        self._closed = False
        sweep()
        self._end = weakref.finalize(self, _remove_all, self._all, os.getpid())
        # A child of multiprocessing's ends without Python's own finalizers, but with those of that module.
        processes = sys.modules.get("multiprocessing.util")
        if processes is not None:
            processes.Finalize(self, _remove_all, args=(self._all, os.getpid()), exitpriority=0)

    def take(self, images: Sequence[bytes]) -> Region:
        """A region that holds the images.

        Raises:
            OSError: /dev/shm has no room, or there is none.
        """
        needed = sum(4 + len(image) for image in images)
        with self._lock:
            fitting = [region for region in self._free if needed <= region.size <= 4 * max(needed, SMALLEST)]
            region = min(fitting, key=lambda one: one.size, default=None)
            if region is not None:
                self._free.remove(region)
        if region is None:
            size = max(SMALLEST, 1 << (needed - 1).bit_length())
            region = Region(f"{PREFIX}.{_process(os.getpid())}.{next(_numbers)}", size)
            with self._lock:
                if self._closed:
                    region.remove()
                    raise ValueError("the client is closed")
                self._all.add(region)
                self.registered[region] = set()
        region.write(images)
        return region

    def give_back(self, region: Region) -> list[Region]:
        """Takes a region back that no server reads any more; returns those that are to be unregistered and dropped."""
        with self._lock:
            self._free.append(region)
            spare = []
            while sum(one.size for one in self._free) > KEPT and len(self._free) > 1:
                spare.append(self._free.pop(0))
            return spare

    def drop(self, region: Region) -> None:
        """Removes a region."""
        with self._lock:
            self._all.discard(region)
            self.registered.pop(region, None)
        region.remove()

    def names(self) -> set[str]:
        """Of all regions that there are."""
        with self._lock:
            return {region.name for region in self._all}

    def forget(self, server: Any) -> None:
        """A server knows none of the regions any more."""
        with self._lock:
            for known in self.registered.values():
                known.discard(server)

    def close(self) -> None:
        """Removes everything. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()


def _remove_all(regions: set[Region], process: int) -> None:
    if os.getpid() == process:  # a forked child leaves its parent's alone
        for region in list(regions):
            region.remove()
        regions.clear()


def _process(pid: int) -> Optional[str]:
    """Number and start time of a process, which together name it for good; None if there is none."""
    try:
        # The 22nd field of proc(5)'s stat, counted behind the name, which may hold anything.
        return f"{_namespace()}.{pid}.{Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[19]}"
    except (OSError, IndexError):
        return None


def _namespace() -> int:
    """The number of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def left_over(names: Sequence[str]) -> Iterator[str]:
    """Those of the names that are regions of processes that are gone, or gone regions of this one."""
    for name in names:
        match = NAME.fullmatch(name)
        if match is None or int(match[2]) != _namespace():
            continue
        process = int(match[3])
        if _process(process) != f"{match[2]}.{match[3]}.{match[4]}":
            yield name
        elif process == os.getpid() and not (SHM / match[1]).exists():
            yield name  # of a client that nobody has closed


def sweep() -> None:
    """Removes this user's regions of processes that are gone."""
    try:
        names = [entry.name for entry in os.scandir(SHM) if entry.stat(follow_symlinks=False).st_uid == os.getuid()]
    except OSError:
        return
    for name in left_over(names):
        with suppress(OSError):
            (SHM / name).unlink()
