"""What the client finds out about its connections by itself, because gRPC does not say, or crashes."""

from __future__ import annotations

import errno
import os
import socket

import grpc

from triton_vision_client._translate import NOT_REACHED

# How many file descriptors must be free for another connection. gRPC 1.85 crashes the process (SIGABRT, SIGSEGV) if
# it gets fewer than 4 for the first one, or fewer than 6 with asyncio; each later connection takes 1.
SPARE = 16
NO_DESCRIPTORS = "too many open files"


def lacks_descriptors() -> bool:
    """Whether this process cannot open SPARE more descriptors. Takes a few microseconds."""
    opened: list[int] = []
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        while len(opened) < SPARE:
            opened.append(os.dup(opened[0]))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return False


def true_details(code: grpc.StatusCode, details: str, address: str, *, connected: bool) -> str:
    """A failed call's details, corrected: gRPC reports only one of a name's addresses.

    Args:
        connected: whether the connection is up.
    """
    # gRPC may have released its own by now, so all of SPARE must be free here, too.
    if code in NOT_REACHED and not connected and lacks_descriptors():
        return NO_DESCRIPTORS
    if "refused" in details and _accepts_ipv4(address):
        return "failed to connect: socket closed"
    return details


def _accepts_ipv4(address: str) -> bool:
    """Whether something listens at localhost's IPv4 address, which gRPC does not mention when ::1 refuses."""
    host, _, port = address.rpartition(":")
    if host != "localhost":
        return False
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=0.2):
            return True
    except (OSError, ValueError, OverflowError):
        return False
