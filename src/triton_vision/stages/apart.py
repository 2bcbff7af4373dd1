"""Work on one image in a process of its own, so that it can be ended and its memory is gone with it.

``Apart`` forks a *template* when the stage is set up, before the stage has threads and before its libraries have any.
The template does nothing but fork once more for each image: that child works under limits that the kernel keeps, on
CPU time and memory, behind everybody else (``nice``), and is the first that the kernel ends when memory runs out.
Whatever becomes of it, the stage goes on. Template and child die with the stage's process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import signal
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from triton_vision.stages.errors import ImageRefused
from triton_vision.stages.limits import too_complex

PR_SET_PDEATHSIG = 1
NICE = 10
# Beside CPU time: a child that waits for the machine this many times as long is ended, too.
WALL_FACTOR = 12
# Exit codes of a child: its answer, or its refusal, stands in the shared memory; it had too little memory.
DONE, REFUSED, NO_MEMORY = 0, 3, 4
TEXT_BYTES = 4096


class Apart:
    """Turns one file after the other into pixels, each in a process of its own.

    Args:
        work: bytes -> uint8 array of ``shape``; raises ImageRefused.
        shape: of what it makes.
        max_memory: bytes that ``work`` may take.
    """

    def __init__(self, work: Callable[[bytes], NDArray[Any]], shape: tuple[int, ...], max_memory: int) -> None:
        self._work = work
        self._shape = shape
        self._max_memory = max_memory
        self._size = int(np.prod(shape))
        # Anonymous and shared: the child writes into it what the stage reads.
        self._memory = mmap.mmap(-1, max(self._size, TEXT_BYTES))
        self._turn = threading.Lock()
        self._pipe, theirs = Pipe()
        parent = os.getpid()
        self._template = os.fork()
        if self._template == 0:
            self._be_template(theirs, parent)
        theirs.close()

    def run(self, data: bytes, seconds: float) -> NDArray[Any]:
        """The pixels of one file.

        Args:
            data: the file.
            seconds: of CPU that it may take.

        Raises:
            ImageRefused: as ``work`` does, and ``too_complex`` for one that takes more memory than it may.
            TimeoutError: it takes more seconds.
            RuntimeError: the template is gone.
        """
        try:
            with self._turn:
                self._pipe.send_bytes(struct.pack("<d", seconds))
                self._pipe.send_bytes(data)
                (status,) = struct.unpack("<i", self._pipe.recv_bytes(4))
                pixels, text = self._memory[: self._size], self._memory[:TEXT_BYTES]
        except (EOFError, OSError):
            raise RuntimeError("the process that forks decoders has ended") from None
        code = os.waitstatus_to_exitcode(status)
        if code == DONE:
            return np.frombuffer(pixels, np.uint8).reshape(self._shape)
        if code == REFUSED:
            reason, _, detail = text.rstrip(b"\0").decode(errors="replace").partition("\0")
            raise ImageRefused(reason, detail)
        if code == NO_MEMORY:
            raise too_complex(f"decoding takes more than {self._max_memory / 1e6:.0f} MB of memory", "max_memory")
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            raise TimeoutError(f"more than {seconds:g} s")
        if code == -signal.SIGKILL:
            raise too_complex("decoding it took the machine's last memory", "memory")
        raise ImageRefused("corrupt", "its decoder fails on it")

    def close(self) -> None:
        """Ends the template, and a child that is at work. Idempotent; may be called from another thread."""
        if self._template:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._template, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._template, 0)
            self._template = 0
            self._pipe.close()

    def __del__(self) -> None:
        if getattr(self, "_template", 0):
            self.close()

    # -- in the template and its children -----------------------------------------------------------------------

    def _be_template(self, pipe: Connection, parent: int) -> NoReturn:
        # Never back into whoever called: this process is a copy of a stub, and must leave by os._exit alone.
        try:
            _die_with(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _close_all_but(pipe.fileno())
            gc.freeze()  # what is never collected stays shared with the stage
            while True:
                (seconds,) = struct.unpack("<d", pipe.recv_bytes())
                data = pipe.recv_bytes()
                template = os.getpid()
                child = os.fork()
                if child == 0:
                    self._be_child(data, seconds, template)
                del data
                pipe.send_bytes(struct.pack("<i", os.waitpid(child, 0)[1]))
        except BaseException:  # noqa: BLE001 - the stage has gone, or this process can do nothing
            os._exit(1)

    def _be_child(self, data: bytes, seconds: float, template: int) -> NoReturn:
        code = 1
        try:
            _die_with(template)
            for number in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            os.nice(NICE)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            most = _data_size() + self._max_memory + 2 * len(data)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds)
            pixels = self._work(data)
            self._memory[: self._size] = np.ascontiguousarray(pixels).tobytes()
            code = DONE
        except ImageRefused as refused:
            text = f"{refused.reason}\0{refused.detail}".encode(errors="replace")[: TEXT_BYTES - 1]
            self._memory[:TEXT_BYTES] = text.ljust(TEXT_BYTES, b"\0")
            code = REFUSED
        except MemoryError:
            code = NO_MEMORY
        finally:
            os._exit(code)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _close_all_but(kept: int) -> None:
    """Closes what was inherited: the stage's pipes would never end otherwise."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))


def _data_size() -> int:
    """Bytes of private, writable memory, as RLIMIT_DATA counts them."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
