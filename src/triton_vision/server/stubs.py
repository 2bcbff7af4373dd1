"""Noticing a Python model whose process dies while it loads, which Triton itself waits for in silence."""

from __future__ import annotations

import time
from pathlib import Path

# A stub that Triton has ended because its model failed is a zombie for a moment only.
PATIENCE_S = 5.0


class StubWatch:
    """Follows the Python backend's processes below one tritonserver.

    Args:
        server: tritonserver's process id.
    """

    def __init__(self, server: int) -> None:
        self._tasks = Path(f"/proc/{server}/task")
        self._models: dict[int, str] = {}
        self._dead_since: dict[int, float] = {}

    def dead_model(self) -> str:
        """The name of a model whose process has been dead for PATIENCE_S seconds; empty if there is none."""
        now = time.monotonic()
        for child in self._children():
            try:
                state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
                words = Path(f"/proc/{child}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it has ended and been noticed
            if state != "Z":
                # …/triton_python_backend_stub REPOSITORY/MODEL/VERSION/model.py REGION …
                if len(words) > 1 and words[0].endswith("triton_python_backend_stub"):
                    self._models[child] = Path(words[1]).parent.parent.name
            elif child in self._models and now - self._dead_since.setdefault(child, now) > PATIENCE_S:
                return self._models[child]
        return ""

    def _children(self) -> list[int]:
        children: list[int] = []
        try:
            for task in self._tasks.iterdir():
                children += map(int, (task / "children").read_text().split())
        except OSError:
            pass  # threads come and go; the next look sees them
        return children
