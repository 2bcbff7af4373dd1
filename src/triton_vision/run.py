"""What a server's keeper and the stages inside that server share: a folder, and pages of memory in it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

# The environment variable in which a stage finds the run-time folder of its server.
VARIABLE = "TRITON_VISION_RUN"
# A page for each first stage: when it was written (time.monotonic, which all processes of a machine share), seconds
# that a request admitted now would wait, and how many items each instance may admit until the next page.
PAGE = struct.Struct("<ddd")


def folder() -> Path | None:
    """The run-time folder of the server that this process belongs to; None where nobody keeps one."""
    run = os.environ.get(VARIABLE)
    return Path(run) if run else None


def page_path(run: Path, model: str) -> Path:
    """Where the page of a model lies."""
    return run / f"pace-{model}"
