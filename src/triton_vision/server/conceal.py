"""Starting a program with arguments that nobody else on the machine can read.

tritonserver takes its secrets as arguments and from nowhere else, and every user may read every process's arguments
(``ps``, ``/proc/PID/cmdline``). So the program is started with stand-ins in their place. The kernel stops it, as under
a debugger, when it has been loaded and has not yet run; then its list of arguments is pointed to the real ones, which
lie where the environment lies: only root and the user who started it may read that. What the program's own children
inherit as their environment no longer has them.

Where this is forbidden (by seccomp, or by the kernel's ``yama.ptrace_scope`` of 2 or 3), the program starts with
readable arguments, and the caller is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PTRACE_CONT, PTRACE_DETACH = 7, 17
VARIABLE = "TRITON_VISION_HIDDEN_"


def spawn(
    launcher: Sequence[str], command: Sequence[str], hidden: Sequence[str], env: Mapping[str, str], **options: Any
) -> tuple[subprocess.Popen[str], bool]:
    """Starts a command with further, hidden arguments; the thread that calls this must be the one that made them.

    Args:
        launcher: the command line of ``launch.py``, which becomes ``command``; ``--traced`` is put behind it here.
        command: the program and its arguments.
        hidden: ``--NAME=VALUE`` each. What stands in for one is ``--NAME=hidden``: the program must refuse that, so
            that it cannot run with a secret that everybody knows.
        env: the program's environment.
        options: Popen's.

    Returns:
        The process, and whether the hidden arguments are hidden.
    """
    if not hidden:
        return subprocess.Popen([*launcher, *command], env=dict(env), **options), True
    stand_ins = [argument.partition("=")[0] + "=hidden" for argument in hidden]
    secret = {f"{VARIABLE}{number}": argument for number, argument in enumerate(hidden)}
    traced = [launcher[0], *launcher[1:-1], "--traced", launcher[-1]]
    process = subprocess.Popen([*traced, *command, *stand_ins], env={**env, **secret}, **options)
    try:
        if _wait_until_loaded(process.pid):
            _swap(process.pid, stand_ins, list(secret))
            _ptrace(PTRACE_DETACH, process.pid)
            return process, True
    except (OSError, ValueError):
        pass
    except BaseException:  # Ctrl-C must leave nothing stopped half-way
        _end(process)
        raise
    _end(process)
    return subprocess.Popen([*launcher, *command, *hidden], env=dict(env), **options), False


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_until_loaded(pid: int) -> bool:
    """Waits for the stop right after exec; false if the process ended instead, since it may not be traced."""
    while True:
        # The end itself is left to Popen to see.
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        if state is None or state.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            return False
        if state.si_status == signal.SIGTRAP:
            return True
        _ptrace(PTRACE_CONT, pid, state.si_status)  # a signal that came before


def _swap(pid: int, stand_ins: Sequence[str], variables: Sequence[str]) -> None:
    """Points the stopped process's argument list to the values of ``variables``, and takes them out of its environment.

    The layout is the kernel's for every program: the pointers to the arguments, a null, those to the environment, a
    null; above them the strings, whose place /proc/PID/stat tells.

    Raises:
        ValueError: the memory does not look like that.
        OSError: it may not be read or written.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    arguments_at, arguments_end, environment_at, environment_end = map(int, fields[45:49])
    stack = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith("[stack]")]
    if not stack:
        raise ValueError("the process has no stack that can be seen")
    bottom = int(stack[0].partition("-")[0], 16)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        content = os.pread(memory, environment_end - bottom, bottom)

        def strings(start: int, end: int) -> list[tuple[int, bytes]]:
            found, at = [], start
            for text in content[start - bottom : end - bottom].split(b"\0")[:-1]:
                found.append((at, text))
                at += len(text) + 1
            return found

        arguments, environment = strings(arguments_at, arguments_end), strings(environment_at, environment_end)
        pointers = [*(at for at, _ in arguments), 0, *(at for at, _ in environment), 0]
        table = struct.pack(f"{len(pointers)}P", *pointers)
        where = content.find(table)
        if where < 0:
            raise ValueError("the argument list is not where the kernel puts it")
        row = len(arguments) - len(stand_ins)
        if [text.decode(errors="replace") for _, text in arguments[row:]] != list(stand_ins):
            raise ValueError("the arguments are not those that it was started with")
        first = len(arguments) + 1  # the first pointer to the environment
        hidden = {name: index for index, (_, text) in enumerate(environment) for name in variables if _is(name, text)}
        # Another variable takes the place of each: the list must keep its length, since more lies behind it.
        kept = [at for index, (at, _) in enumerate(environment) if index not in hidden.values()]
        if len(hidden) != len(variables) or not kept:
            raise ValueError("the environment is not the one that it was started with")
        for offset, name in enumerate(variables):
            pointers[row + offset] = environment[hidden[name]][0] + len(name) + 1
            pointers[first + hidden[name]] = kept[0]
        os.pwrite(memory, struct.pack(f"{len(pointers)}P", *pointers), bottom + where)
    finally:
        os.close(memory)


def _is(name: str, entry: bytes) -> bool:
    return entry.startswith(name.encode() + b"=")


def _ptrace(request: int, pid: int, number: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, number) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
