"""One tritonserver process: started with its guard, asked how it is, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from triton_vision import run as runtime
from triton_vision.cpu import visible_cores
from triton_vision.server import conceal, guard, launch
from triton_vision.server.logs import LogReader
from triton_vision.server.rundir import RunDir

KILL_AFTER_S = 5.5
# A guard that dies at once is not started again and again without a pause.
GUARD_PAUSE_S = 1.0
ISOLATED = (sys.executable, "-I", "-S")
# glibc takes blocks above 128 kB, which every image has several of, from the kernel and gives them back at once: with
# these thresholds (bytes) small images stay in the heap.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(32 * 1024 * 1024)}


class Child:
    """A running tritonserver; the thread that makes it must live as long, since the kernel ends both together.

    Args:
        command: its command line.
        secrets: further arguments, which nobody else may see.
        environment: its environment.
        run: its run-time folder.
        put: takes each line of its log, without blocking; None keeps the last ones only.

    Attributes:
        pid: its process id, which is also its process group.
        hidden: whether the secrets are hidden.
        log: what it says.
    """

    def __init__(
        self,
        command: Sequence[str],
        secrets: Sequence[str],
        environment: Mapping[str, str],
        run: RunDir,
        put: Callable[[str], None] | None,
    ) -> None:
        self._process, self.hidden = conceal.spawn(
            [*ISOLATED, launch.__file__, str(os.getpid())],
            command,
            secrets,
            environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A session of its own: Ctrl-C reaches the keeper alone, and the stubs can be ended as a group.
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.log = LogReader(self._process.stdout, put)
        self._run = run
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_reads, self._guard_pipe = os.pipe()
        try:
            self._start_guard()
        except BaseException:
            self.end()
            raise

    def _start_guard(self) -> None:
        self._guarded = time.monotonic()
        self._guard = subprocess.Popen(
            [*ISOLATED, guard.__file__, str(self._guard_reads), str(self.pid), self._run.prefix, str(self._run.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._guard_reads, self._run.lock_fd),
            start_new_session=True,
        )

    def ended(self) -> str:
        """How it ended by itself, in words; empty while it runs. Replaces a guard that has died."""
        dead = self._guard is not None and self._guard.poll() is not None
        if dead and time.monotonic() - self._guarded > GUARD_PAUSE_S:
            with contextlib.suppress(OSError):  # no room for a process: asked again soon
                self._start_guard()
        code = self._process.poll()
        if code is None:
            return ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"tritonserver ended with {how}"

    def end(self) -> None:
        """Ends it, its stubs and its guard, within KILL_AFTER_S seconds and a few more."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_AFTER_S)
        # Stubs that are still busy, or that outlived a crash of tritonserver.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.log.join(1.0)
        if process.stdout is not None:
            process.stdout.close()
        os.write(self._guard_pipe, b"done")
        os.close(self._guard_pipe)
        os.close(self._guard_reads)
        if self._guard is not None:
            self._guard.wait()


def surroundings(run: Path) -> dict[str, str]:
    """The variables that every tritonserver of the suite gets, unless the keeper's own environment says otherwise.

    Args:
        run: its run-time folder.
    """
    # LibTorch would count the host's cores, also in a container that may use a few.
    found = {"OMP_NUM_THREADS": str(visible_cores()), runtime.VARIABLE: str(run), **MALLOC}
    if os.path.expanduser("~") == "~":  # as OpenShift's users have it: OpenVINO does not load without a home
        found["HOME"] = str(run)
    return found
