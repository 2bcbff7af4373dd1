"""Keeping a server serving: a tritonserver that dies is started again, Python processes that die are replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from triton_vision.repository import RepositoryError
from triton_vision.server.errors import ServerError, ServerStartError
from triton_vision.server.renewal import Tending

if TYPE_CHECKING:
    from triton_vision.server.process import TritonServer

PERIOD_S = 0.2
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 30.0
# How a server that was crashed is spoken of (child.Child.ended), and how long it is left alone at most.
CRASHED, CRASH_DELAY_S = "ended with signal", 4.0
# A server that has served for so long is taken for healthy: the next failure is the first again.
HEALTHY_S = 60.0
MOST_FAILURES = 10


def keep(server: TritonServer, tell: Callable[[str], None], ready: Callable[[], None]) -> None:
    """Keeps a server that is ready serving, until a stop is requested.

    Args:
        server: it must not be used from elsewhere meanwhile.
        tell: takes a line, without its end, about what went wrong and what is done about it.
        ready: called when the server is ready again after a restart.

    Raises:
        ServerStartError: its start failed MOST_FAILURES times in a row. A crash does not count: callers may have caused
            it, and must not be able to end the server for good.
    """
    failures = crashes = 0
    while True:
        began = time.monotonic()
        why = _watch(server, tell)
        if not why:
            return
        if time.monotonic() - began >= HEALTHY_S:
            crashes = 0
        failures = 0
        while why:
            crashes += 1
            if CRASHED not in why:
                failures += 1
            if failures >= MOST_FAILURES:
                raise ServerStartError(f"{why}; that was the {failures}th failure in a row, so it is not restarted")
            delay = min(FIRST_DELAY_S * 2 ** (crashes - 1), CRASH_DELAY_S if CRASHED in why else LAST_DELAY_S)
            tell(f"error: {why}; restarting in {delay:g} s")
            why = _restart(server, delay)
            if server.stop_requested.is_set():
                return
        ready()


def _watch(server: TritonServer, tell: Callable[[str], None]) -> str:
    """Looks after a server that is ready; returns why it has to be restarted, or empty when a stop is requested."""
    tending = Tending(server.pid, server.index, tell, server.start_took, server.folder)
    while not server.stop_requested.wait(PERIOD_S):
        why = server.ended()
        if why:
            return why
        why = tending.tend()
        if why:
            # It would refuse every call and still take all the time it has to end.
            os.kill(server.pid, signal.SIGKILL)
            return why
    return ""


def _restart(server: TritonServer, delay: float) -> str:
    """Ends what is left, waits, starts again; returns why it did not come to serve."""
    server.stop()
    if server.stop_requested.wait(delay):
        return ""
    try:
        server.start()
    except (ServerError, RepositoryError, OSError) as error:
        return str(error)
    return ""
