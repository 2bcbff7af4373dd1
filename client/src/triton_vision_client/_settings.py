"""A client's settings, checked, and the servers that its addresses stand for."""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import grpc

from triton_vision_client._balancer import Member
from triton_vision_client._errors import VisionClientError
from triton_vision_client._observe import NOBODY, Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._results import Prediction

DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400
HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.-]+):(?P<port>\d{1,5})")
# W3C Trace Context, version 00: version, trace id, parent id, flags.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Metadata = tuple[tuple[str, str], ...]
# Takes the image as the caller gave it and why no server has answered; gives the answer to use instead.
Fallback = Callable[[Any, VisionClientError], Union[Sequence[Prediction], Awaitable[Sequence[Prediction]]]]


@dataclass(frozen=True)
class Settings:
    """One client's settings, checked."""

    urls: tuple[str, ...]
    model: str
    tls: Optional[TLSConfig]
    metadata: Metadata
    timeout: float
    retry: RetryPolicy
    fallback: Optional[Fallback] = None
    observer: Observer = field(default=NOBODY)
    shared_memory: bool = False

    @classmethod
    def of(
        cls,
        url: Union[str, Sequence[str]],
        model: str,
        tls: Optional[TLSConfig],
        headers: Optional[Mapping[str, str]],
        timeout: float,
        retry: Optional[RetryPolicy],
        fallback: Optional[Fallback] = None,
        observer: Optional[Observer] = None,
        transport: str = "grpc",
    ) -> Settings:
        """Checks what a caller gave; raises ValueError for what cannot work, OSError for an unreadable certificate."""
        urls = (url,) if isinstance(url, str) else tuple(url)
        if not urls or not all(urls):
            raise ValueError("at least one URL is needed, such as 'localhost:8001'")
        for one in urls:
            if "://" in one:
                raise ValueError(
                    f"{one!r} is no gRPC address: give HOST:PORT without a scheme, such as 'localhost:8001'"
                )
        if transport not in ("grpc", "shm"):
            raise ValueError(f"transport is 'grpc' or 'shm', not {transport!r}")
        if tls is not None:
            tls.read()
        return cls(
            tuple(dict.fromkeys(urls)),
            model,
            tls,
            check_headers(headers),
            check_timeout(timeout),
            retry or RetryPolicy(),
            fallback,
            observer or NOBODY,
            transport == "shm",
        )

    def credentials(self) -> Any:
        """gRPC's channel credentials, None for a connection in the clear."""
        if self.tls is None:
            return None
        ca, key, certificate = self.tls.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def with_headers(self, headers: Optional[Mapping[str, str]], traceparent: Optional[str]) -> Metadata:
        """One call's metadata: the client's, the call's own in their place, and the trace that it belongs to."""
        if not headers and traceparent is None:
            return self.metadata
        merged = {**dict(self.metadata), **dict(check_headers(headers))}
        if traceparent is not None:
            if not TRACEPARENT.fullmatch(traceparent):
                raise ValueError(f"traceparent {traceparent!r} is not 00-TRACE-PARENT-FLAGS (W3C Trace Context)")
            merged["traceparent"] = traceparent
        return tuple(merged.items())


def check_headers(headers: Optional[Mapping[str, str]]) -> Metadata:
    """Headers as gRPC's metadata; raises ValueError for what gRPC would refuse."""
    metadata = tuple((key.lower(), value) for key, value in (headers or {}).items())
    for key, value in metadata:
        # gRPC's rule for metadata; what breaks it would come back as the server's error.
        if not re.fullmatch(r"[0-9a-z_.-]+", key) or not re.fullmatch(r"[ -~]*", value):
            raise ValueError(f"header {key!r}: a name is letters, digits, '_', '-', '.', a value is ASCII text")
    return metadata


def check_timeout(timeout: float) -> float:
    """The timeout itself; raises ValueError unless it is a number of seconds above 0 and of at most a day."""
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT_S} s, a day, not {timeout:g}")
    return float(timeout)


def named_host(url: str) -> Optional[tuple[str, int]]:
    """Host and port of an address whose host is a name, which may stand for several servers; None for any other."""
    match = HOST_PORT.fullmatch(url)
    if match is None or re.fullmatch(r"[\d.]+", match["host"]):
        return None
    return match["host"], int(match["port"])


def members_of(url: str, answers: Sequence[Any]) -> list[Member]:
    """The servers behind an address.

    Args:
        answers: of ``getaddrinfo`` for its host; empty for an address that is no name, or cannot be resolved.

    Returns:
        One for each IPv4 address (without any: IPv6 address) if there are several; else the address as it is, whose
        resolution is left to gRPC.
    """
    host = url.rpartition(":")[0]
    for family in (socket.AF_INET, socket.AF_INET6):
        found = list(dict.fromkeys(entry[4][:2] for entry in answers if entry[0] == family))
        if len(found) > 1:
            shape = "{}:{}" if family == socket.AF_INET else "[{}]:{}"
            return [Member(shape.format(*address), authority=host, url=url) for address in found]
        if found:
            break
    return [Member(url, url=url)]
