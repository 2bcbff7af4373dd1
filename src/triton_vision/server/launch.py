"""Becomes tritonserver, bound to its keeper's life.

Run as ``python -I -S launch.py [--traced] KEEPER_PID BINARY ARGUMENT…``: asks the kernel to kill this process when its
parent dies, then executes the binary in its own place. A program of its own rather than a hook between fork and exec,
because the keeper has threads (gRPC's among them), whose locks a forked Python must not touch.

With ``--traced`` the kernel stops the binary before its first instruction, for ``conceal``; it exits with 125 where
that is not allowed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PTRACE_TRACEME = 0
MAY_NOT_BE_TRACED = 125


def main(arguments: list[str]) -> int:
    traced = arguments[0] == "--traced"
    keeper, command = int(arguments[traced]), arguments[traced + 1 :]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the line above
        return 1
    if traced and libc.ptrace(PTRACE_TRACEME, 0, None, None) != 0:
        return MAY_NOT_BE_TRACED
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
