"""Becomes tritonserver, bound to its keeper's life.

Run as ``python -I -S launch.py KEEPER_PID BINARY ARGUMENT…``: asks the kernel to kill this process when its parent
dies, then executes the binary in its own place. A program of its own rather than a hook between fork and exec,
because the keeper has threads (gRPC's among them), whose locks a forked Python must not touch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    keeper, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the line above
        return 1
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
