"""What a stage counts and logs, at a price that does not depend on the load.

Every metric and every log line is a call to another process: 18 us and 40 to 100 us. So counts are added up here and
handed over by a thread of their own, a few times a second at most, and refusals are logged one line a second at most.
"""

from __future__ import annotations

import threading
import time
from typing import Any

# Seconds between two deliveries of what has been counted, and between two log lines about refusals.
DELIVERY_S = 0.2
LOG_LINE_S = 1.0

# Metric -> its help text. All are counters, with the label ``model``.
FAMILIES = {
    "triton_vision_images_total": "Items that a stage answered",
    "triton_vision_refusals_total": "Items that a stage refused, by reason",
    "triton_vision_input_bytes_total": "Bytes of the tensors that a stage read",
    "triton_vision_seconds_total": "Seconds that a stage spent, by step",
}
# A counter of one family, with its labels beside ``model``.
Key = tuple[str, tuple[tuple[str, str], ...]]


class Meter:
    """Counts for one model instance; its counters add up over all instances of the model.

    Args:
        utils: Triton's module.
        model: the model's name, for the label.
    """

    def __init__(self, utils: Any, model: str) -> None:
        self._families = {
            name: utils.MetricFamily(name=name, description=text, kind=utils.MetricFamily.COUNTER)
            for name, text in FAMILIES.items()
        }
        self._model = model
        self._metrics: dict[Key, Any] = {}
        self._pending: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, counts: dict[Key, float]) -> None:
        """Adds what one ``execute`` has counted."""
        with self._lock:
            for key, value in counts.items():
                self._pending[key] = self._pending.get(key, 0.0) + value
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="meter", daemon=True)
            self._thread.start()
        self._news.set()

    def close(self) -> None:
        """Hands over what is left."""
        self._closed.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _deliver(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            self._flush()
            self._closed.wait(DELIVERY_S)
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            due, self._pending = self._pending, {}
        for key, value in due.items():
            if value:
                self._metric(key).increment(value)

    def _metric(self, key: Key) -> Any:
        if key not in self._metrics:
            name, labels = key
            self._metrics[key] = self._families[name].Metric(labels={"model": self._model, **dict(labels)})
        return self._metrics[key]


class RefusalLog:
    """One line a second at most, with how many refusals went without one."""

    def __init__(self, utils: Any, model: str) -> None:
        self._logger = utils.Logger
        self._model = model
        self._silent = 0
        self._next = 0.0

    def note(self, request_id: str, index: int, text: str) -> None:
        """A refused item: which one of its request (from 0), and why."""
        now = time.monotonic()
        if now < self._next:
            self._silent += 1
            return
        since = f" ({self._silent} more since the last such line)" if self._silent else ""
        # What a request calls itself is a stranger's text.
        of = f" of request {request_id[:80]!r}" if request_id else ""
        self._logger.log_warn(f"{self._model}: refused image {index}{of}: {text}{since}")
        self._silent, self._next = 0, now + LOG_LINE_S
