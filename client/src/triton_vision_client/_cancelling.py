"""Which calls may be cancelled at a server: some versions of Triton do not survive it."""

from __future__ import annotations

import re
from typing import Any

import grpc

# Older servers crash (SIGSEGV) when inference calls are cancelled while they are under way and, more rarely, when their
# deadlines expire there. Three fixes to triton-inference-server/server, and the first release tag that holds each:
# PR 7840 in v2.53.0 (24.12), PR 8078 (issue 8034, seen on 25.01) in v2.57.0 (25.04), PR 8220 in v2.59.0 (25.06).
FIRST_SAFE = (2, 59)
# The method they crash in. All others are handled elsewhere in Triton, and ModelStreamInfer is not used here.
INFER = "ModelInfer"
# How much later than the caller's own deadline a call expires at a server that may not survive that.
LATE_S = 10.0
# A blocking call in a thread expires there all the same: with timeouts of so many seconds, calls expire too rarely to
# matter, and gRPC's own waiting takes half the CPU time.
LONG_S = 1.0
# How many calls may be under way at such a server that nobody waits for: callers that come and go would otherwise leave
# it more than it can answer before the client ends, and cancels the rest.
MOST_LEFT = 64
# When a server that has not said its version is asked again.
ASK_AGAIN_S = 60.0


class OwnError(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """How a call has ended here, though not at the server. Reads like gRPC's own."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    @classmethod
    def late(cls) -> OwnError:
        """The caller's time is over; the server may still answer."""
        return cls(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    @classmethod
    def swamped(cls) -> OwnError:
        """The server is busy with calls that nobody waits for any more."""
        details = f"Exceeds maximum queue size: {MOST_LEFT} calls are under way there that nobody waits for any more"
        return cls(grpc.StatusCode.UNAVAILABLE, details)

    @classmethod
    def unconnected(cls, details: str) -> OwnError:
        """No connection is possible, so gRPC was never asked for one."""
        return cls(grpc.StatusCode.UNAVAILABLE, details)

    def code(self) -> grpc.StatusCode:
        """As gRPC's."""
        return self._code

    def details(self) -> str:
        """As gRPC's."""
        return self._details


def survives_cancelling(metadata: Any) -> bool:
    """Whether a server's ServerMetadata shows a version that takes cancelled calls."""
    if metadata is None or metadata.name != "triton":  # unreadable, or another server, or renamed with --id
        return False
    version = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", metadata.version)
    return version is not None and (int(version[1]), int(version[2])) >= FIRST_SAFE
