"""Choosing and checking TCP ports."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack

from triton_vision.server.errors import SetupError


def resolve_ports(host: str, wanted: dict[str, int], elsewhere: Mapping[str, str] | None = None) -> dict[str, int]:
    """Checks that each wanted port can be bound on ``host``, and chooses a free one where 0 is wanted.

    Args:
        host: the address to bind, an IPv4 or IPv6 literal or a name.
        wanted: option name (``--grpc-port``) -> port, 0 for any free one.
        elsewhere: option name -> the address to bind instead of ``host``.

    Raises:
        SetupError: a port is taken, may not be bound, or the host is not an address of this machine.
    """
    chosen: dict[str, int] = {}
    with ExitStack() as held:  # all are held until all are known, so that no port is handed out twice
        for option, port in wanted.items():
            if not 0 <= port <= 65535:
                raise SetupError(f"{option} {port} is not a port: choose 1 to 65535, or 0 for any free one")
            chosen[option] = _bind(held, (elsewhere or {}).get(option, host), option, port)
    return chosen


def _bind(held: ExitStack, host: str, option: str, port: int) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise SetupError(f"--host {host} is not a known address: {error}") from None
    sock = held.enter_context(socket.socket(family, kind, protocol))
    # As servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(1)
    except PermissionError:
        raise SetupError(f"port {port} needs root: choose one from 1024 with {option}") from None
    except OSError as error:
        if error.errno == 98:  # EADDRINUSE
            raise SetupError(
                f"port {port} on {host} is in use: end what listens there, or choose another with {option} "
                "(0 takes any free one)"
            ) from None
        raise SetupError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return int(sock.getsockname()[1])


def reachable(host: str, port: int) -> str:
    """The ``HOST:PORT`` under which a local caller reaches a server bound to ``host``."""
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
