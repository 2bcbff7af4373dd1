"""The guard: a small process that outlives its server's keeper by a moment, to end what the keeper left.

``serve`` may be killed with SIGKILL. tritonserver then dies by its parent-death signal, but a Python stub that is
busy would run on. The guard holds the read end of a pipe whose write end only the keeper has: when the pipe closes
without the word "done", the guard kills tritonserver's process group and clears its shared memory and folder.

Run as ``python -I -S guard.py PIPE_FD GROUP PREFIX FOLDER``; standard library only, so that it starts in
milliseconds and needs nothing of the environment. Its inherited lock keeps the run-time folder locked until it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys


def main(arguments: list[str]) -> int:
    pipe, group, prefix, folder = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(pipe, 16) == b"done":
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    region = re.compile(re.escape(prefix) + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/shm"):
            if region.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join("/dev/shm", name))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other servers' folders may lie beside it
        os.rmdir(os.path.dirname(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
