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
# When a server that has not said its version is asked again.
ASK_AGAIN_S = 60.0


class LateError(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The caller's time is over, though the server may still answer. Reads like gRPC's own."""

    def code(self) -> grpc.StatusCode:
        """As gRPC's."""
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        """As gRPC's."""
        return "Deadline Exceeded"


def survives_cancelling(metadata: Any) -> bool:
    """Whether a server's ServerMetadata shows a version that takes cancelled calls."""
    if metadata is None or metadata.name != "triton":  # unreadable, or another server, or renamed with --id
        return False
    version = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", metadata.version)
    return version is not None and (int(version[1]), int(version[2])) >= FIRST_SAFE
