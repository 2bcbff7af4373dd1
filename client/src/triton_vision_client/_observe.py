"""What a client tells about itself: an interface, and a Prometheus implementation of it."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Optional

from triton_vision_client._errors import VisionClientError

# Seconds; from a small image on a GPU to the default timeout.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Observer:
    """Is told what happens in a client. Derive from it and override what is of interest; nothing may be raised.

    The methods are called from whatever thread makes the call, and must not block.
    """

    def call(self, outcome: str, seconds: float) -> None:
        """A request has ended: ``ok``, or the name of its error's class; how long it took, its retries included."""

    def retry(self, error: VisionClientError) -> None:
        """A try has failed, and there will be another."""

    def ejection(self, address: str) -> None:
        """A server is left alone for a while."""


NOBODY = Observer()
_LOCK = threading.RLock()
_METRICS: weakref.WeakKeyDictionary[Any, tuple[Any, Any, Any]] = weakref.WeakKeyDictionary()


class PrometheusObserver(Observer):
    """Counts in ``prometheus_client``'s metrics, which must be installed.

    ``triton_vision_client_seconds`` (a histogram by ``outcome``), ``triton_vision_client_retries_total`` (by ``error``)
    and ``triton_vision_client_ejections_total`` (by ``server``).

    Args:
        registry: one of ``prometheus_client``'s; None takes its default.

    Raises:
        ImportError: ``prometheus_client`` is not installed.
    """

    def __init__(self, registry: Optional[Any] = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ImportError("PrometheusObserver needs prometheus_client: pip install prometheus-client") from None
        registry = registry if registry is not None else prometheus_client.REGISTRY
        with _LOCK:
            if registry not in _METRICS:
                _METRICS[registry] = _metrics(prometheus_client, registry)
            self._seconds, self._retries, self._ejections = _METRICS[registry]

    def call(self, outcome: str, seconds: float) -> None:
        self._seconds.labels(outcome).observe(seconds)

    def retry(self, error: VisionClientError) -> None:
        self._retries.labels(type(error).__name__).inc()

    def ejection(self, address: str) -> None:
        self._ejections.labels(address).inc()


def _metrics(prometheus_client: Any, registry: Any) -> tuple[Any, Any, Any]:
    """The metrics of one registry, which all observers that have it share."""
    return (
        prometheus_client.Histogram(
            "triton_vision_client_seconds",
            "How long requests took, their retries included",
            ["outcome"],
            registry=registry,
            buckets=BUCKETS,
        ),
        prometheus_client.Counter(
            "triton_vision_client_retries", "Tries after the first", ["error"], registry=registry
        ),
        prometheus_client.Counter(
            "triton_vision_client_ejections", "Servers left alone for a while", ["server"], registry=registry
        ),
    )
