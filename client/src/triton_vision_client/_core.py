"""What the synchronous and the asyncio client share: settings, packing, and the course of one call's tries."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import grpc

from triton_vision_client import _protocol
from triton_vision_client._errors import BadImageError, VisionClientError
from triton_vision_client._images import ImageSource, encode_or_refuse
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._results import Result

DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400
# A request of classify_many holds at most this many images and, unless one alone is larger, bytes.
BATCH = 16
BATCH_BYTES = 8 << 20
# How many requests of classify_many are under way at once: enough to keep every stage busy.
WINDOW = 6


@dataclass(frozen=True)
class Settings:
    """One client's settings, checked."""

    urls: tuple[str, ...]
    model: str
    tls: Optional[TLSConfig]
    metadata: tuple[tuple[str, str], ...]
    timeout: float
    retry: RetryPolicy

    @classmethod
    def of(
        cls,
        url: Union[str, Sequence[str]],
        model: str,
        tls: Optional[TLSConfig],
        headers: Optional[Mapping[str, str]],
        timeout: float,
        retry: Optional[RetryPolicy],
    ) -> Settings:
        """Checks what a caller gave; raises ValueError for what cannot work."""
        urls = (url,) if isinstance(url, str) else tuple(url)
        if not urls or not all(urls):
            raise ValueError("at least one URL is needed, such as 'localhost:8001'")
        for one in urls:
            if "://" in one:
                raise ValueError(
                    f"{one!r} is no gRPC address: give HOST:PORT without a scheme, such as 'localhost:8001'"
                )
        metadata = tuple((key.lower(), value) for key, value in (headers or {}).items())
        for key, value in metadata:
            # gRPC's rule for metadata; what breaks it would come back as the server's error.
            if not re.fullmatch(r"[0-9a-z_.-]+", key) or not re.fullmatch(r"[ -~]*", value):
                raise ValueError(f"header {key!r}: a name is letters, digits, '_', '-', '.', a value is ASCII text")
        return cls(urls, model, tls, metadata, check_timeout(timeout), retry or RetryPolicy())

    def credentials(self) -> Any:
        """gRPC's channel credentials, None for a connection in the clear."""
        if self.tls is None:
            return None
        ca, key, certificate = self.tls.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)


def check_timeout(timeout: float) -> float:
    """The timeout itself; raises ValueError unless it is a number of seconds above 0 and of at most a day."""
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT_S} s, a day, not {timeout:g}")
    return float(timeout)


# With several servers, how long one may take to be connected before the next is asked.
CONNECT_S = 3.0


class Attempts:
    """The tries of one call: which server next, how much time is left, and when to give up."""

    def __init__(self, settings: Settings, timeout: float, first: int) -> None:
        self._retry = settings.retry
        self._deadline = time.monotonic() + timeout
        self._servers = len(settings.urls)
        self._tried = 0
        self.server = first

    def remaining(self) -> float:
        """Seconds left of the call's timeout; at least a millisecond, so that gRPC itself reports the end."""
        return max(0.001, self._deadline - time.monotonic())

    def connect_timeout(self) -> float:
        """Seconds that one of several servers may take to be connected."""
        return min(CONNECT_S, self.remaining() / (self._servers + 1))

    def pass_over(self) -> None:
        """Turns to the next server."""
        self.server = (self.server + 1) % self._servers

    def pause_after(self, error: VisionClientError, details: str) -> Optional[float]:
        """Seconds to wait before the next try, at the next server; None if there is none."""
        self._tried += 1
        if self._tried >= self._retry.attempts or not _protocol.may_retry(error, details):
            return None
        self.pass_over()
        # Another server is asked at once; only when all have failed is there something to wait for.
        rounds, within = divmod(self._tried, self._servers)
        pause = self._retry.pause(rounds - 1) if within == 0 else 0.0
        return pause if time.monotonic() + pause < self._deadline else None


@dataclass
class Batch:
    """Images that travel in one request, and those among them that cannot travel."""

    sources: list[Any] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    refused: dict[int, BadImageError] = field(default_factory=dict)
    size: int = 0

    def travelling(self) -> list[Any]:
        """The sources whose images are in the request."""
        return [source for row, source in enumerate(self.sources) if row not in self.refused]

    def merge(self, answers: list[Result]) -> Iterator[Result]:
        """The results in the order of the sources: the server's, and the refusals made here."""
        served = iter(answers)
        for row, source in enumerate(self.sources):
            yield Result(source, error=self.refused[row]) if row in self.refused else next(served)


def pack(images: Iterable[ImageSource]) -> Iterator[Batch]:
    """Batches of consecutive images, read one by one, so that an endless iterable is fine."""
    batch = Batch()
    for source in images:
        image = encode_or_refuse(source)
        size = 0 if isinstance(image, BadImageError) else len(image)
        if batch.sources and (len(batch.sources) == BATCH or batch.size + size > BATCH_BYTES):
            yield batch
            batch = Batch()
        if isinstance(image, BadImageError):
            batch.refused[len(batch.sources)] = image
        else:
            batch.images.append(image)
            batch.size += size
        batch.sources.append(source)
    if batch.sources:
        yield batch
