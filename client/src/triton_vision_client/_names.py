"""The servers that a client's addresses stand for: which addresses are names, and when those are looked up."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Callable, Optional

from triton_vision_client._balancer import Member

# How long calls wait for the first look-up; without an answer by then, resolving is gRPC's affair.
LOOK_UP_S = 2.0
# How often a name is looked up while calls are made, to find servers that it has gained, or lost without a failure.
LOOK_UP_EVERY_S = 30.0
# How soon again after a server has failed.
LOOK_UP_AGAIN_S = 5.0
HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")


class Names:
    """Resolves the names among a client's addresses, when it is time to. Safe to use from several threads.

    The resolver has no timeout of its own, so it is asked in a thread, which no call but the first ones waits for.

    Args:
        urls: the client's addresses.
        take: is told of each name, and of ``getaddrinfo``'s answers for it; of none that cannot be resolved.
    """

    def __init__(
        self,
        urls: Sequence[str],
        take: Callable[[str, Sequence[Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._named = {url: named for url, named in ((url, named_host(url)) for url in urls) if named is not None}
        self._take = take
        self._clock = clock
        self._lock = threading.RLock()
        self._due = 0.0
        self._began = 0.0
        self._running = False
        self._first: Future[None] = Future()
        self._first_until: Optional[float] = None
        self._first.set_running_or_notify_cancel()  # a waiter that gives up must not end it for the others

    def suspect(self) -> None:
        """A server has failed, or has gone: its name may stand for others by now, or soon."""
        self._due = min(self._due, self._began + LOOK_UP_AGAIN_S)

    def look_up(self) -> Optional[tuple[Future[None], float]]:
        """Begins a look-up if it is time to.

        Returns:
            What ends with the very first one, and for how many seconds to wait for it; None after that.
        """
        if not self._named:
            return None
        with self._lock:
            now = self._clock()
            begins = not self._running and now >= self._due
            if begins:
                self._running, self._began, self._due = True, now, now + LOOK_UP_EVERY_S
            if self._first_until is None:
                self._first_until = now + LOOK_UP_S
        if begins:
            try:
                threading.Thread(target=self._run, name="look-up", daemon=True).start()
            except RuntimeError:  # no more threads can be had, or the interpreter ends
                self._ended()
        left = self._first_until - now
        return None if self._first.done() or left <= 0 else (self._first, left)

    def _run(self) -> None:
        try:
            for url, (host, port) in self._named.items():
                try:
                    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                except (OSError, UnicodeError):
                    self.suspect()  # nothing is said against what is known
                    continue
                self._take(url, found)
        finally:
            self._ended()

    def _ended(self) -> None:
        self._running = False
        if not self._first.done():
            self._first.set_result(None)


def named_host(url: str) -> Optional[tuple[str, int]]:
    """Host and port of an address whose host is a name, which may stand for several servers; None for any other."""
    match = HOST_PORT.fullmatch(url)
    if match is None or re.fullmatch(r"[\d.]+", match["host"]):
        return None
    return match["host"], int(match["port"])


def members_of(url: str, answers: Sequence[Any]) -> list[Member]:
    """The servers behind an address.

    Args:
        answers: of ``getaddrinfo`` for its host; empty for an address that is not a name or cannot be resolved.

    Returns:
        One for each IPv4 address (without any: IPv6 address) if there are several; else the address as it is, whose
        resolution is left to gRPC.
    """
    host = url.rpartition(":")[0]
    for family in (socket.AF_INET, socket.AF_INET6):
        found = list(dict.fromkeys(entry[4][:2] for entry in answers if entry[0] == family))
        if len(found) > 1:
            shape = "{}:{}" if family == socket.AF_INET else "[{}]:{}"
            return [Member(shape.format(*address), authority=host) for address in found]
        if found:
            break
    return [Member(url)]
