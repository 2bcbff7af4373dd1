"""A client's settings, checked, and the servers that its addresses stand for."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import grpc

from triton_vision_client._balancer import Member
from triton_vision_client._calls import Metadata
from triton_vision_client._cancelling import OwnError
from triton_vision_client._connecting import NO_DESCRIPTORS, lacks_descriptors
from triton_vision_client._errors import VisionClientError
from triton_vision_client._observe import NOBODY, Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._protocol import channel_options
from triton_vision_client._results import Prediction

DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400
# A name, an IPv4 address, or an IPv6 address in brackets; and a port.
URL = re.compile(r"(?:[^\s:/\[\]]+|\[[0-9a-fA-F:.]+(?:%\w+)?\]):(\d{1,5})")
# What gRPC itself resolves (its naming document); whatever follows is its affair.
GRPC_URL = re.compile(r"(unix|unix-abstract|ipv4|ipv6|dns|vsock):[^\s]+")
# W3C Trace Context: version, trace id, parent id, flags; 'ff' is not a version, no id is all zeros, and only versions
# to come may have more.
IDS_FLAGS = r"(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
TRACEPARENT = re.compile(rf"00-{IDS_FLAGS}|(?!00|ff)[0-9a-f]{{2}}-{IDS_FLAGS}(-[!-~]*)?")
# A version to come may have more than the 55 characters of today's, but servers take 8 KiB of headers in all.
LONGEST_TRACE = 512
# In which `triton-vision serve` wants the token for shared memory.
SHM_HEADER = "triton-grpc-protocol-shm"
LOG = logging.getLogger("triton_vision_client")

# Takes the image as the caller gave it and why no server has answered; gives the answer to use instead.
SyncFallback = Callable[[Any, VisionClientError], Sequence[Prediction]]
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
    fallback: Optional[Callable[[Any, VisionClientError], Any]] = None
    observer: Observer = field(default=NOBODY)
    shared_memory: bool = False
    shm_metadata: Metadata = ()

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
        shm_token: Optional[str] = None,
    ) -> Settings:
        """Checks what a caller gave; raises ValueError for what cannot work, OSError for an unreadable certificate."""
        if not isinstance(url, (str, Sequence)) or isinstance(url, (bytes, bytearray)):
            raise TypeError(f"url is an address, such as 'localhost:8001', or several, not {type(url).__name__}")
        urls = (url,) if isinstance(url, str) else tuple(url)
        if not urls or not all(urls):
            raise ValueError("at least one URL is needed, such as 'localhost:8001'")
        for one in urls:
            check_url(one)
        check_model(model)
        if transport not in ("grpc", "shm"):
            raise ValueError(f"transport is 'grpc' or 'shm', not {transport!r}")
        if shm_token is not None and transport != "shm":
            raise ValueError("shm_token is for transport='shm', which sends images through shared memory")
        for name, value, kind in (
            ("tls", tls, TLSConfig),
            ("retry", retry, RetryPolicy),
            ("observer", observer, Observer),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is a {kind.__name__}, not {type(value).__name__}")
        if fallback is not None and not callable(fallback):
            raise TypeError(f"fallback is a function of an image and an error, not {type(fallback).__name__}")
        if tls is not None:
            tls.check()
        given = check_headers(headers)
        if shm_token is not None:
            given = tuple({**dict(given), **dict(check_headers({SHM_HEADER: shm_token}))}.items())
        return cls(
            tuple(dict.fromkeys(urls)),
            model,
            tls,
            tuple(entry for entry in given if entry[0] != SHM_HEADER),
            check_timeout(timeout),
            retry or RetryPolicy(),
            fallback,
            observer or NOBODY,
            transport == "shm",
            tuple(entry for entry in given if entry[0] == SHM_HEADER),
        )

    def credentials(self) -> Any:
        """gRPC's channel credentials, None for a connection in the clear. Certificates that were renewed are read."""
        if self.tls is None:
            return None
        ca, key, certificate = self.tls.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def channel(self, api: Any, member: Member) -> Any:
        """A channel to a server, made by ``grpc`` or ``grpc.aio``.

        Raises:
            grpc.RpcError: this process has too few file descriptors left.
        """
        if lacks_descriptors():
            raise OwnError.unconnected(NO_DESCRIPTORS)
        options = channel_options(member.address, member.authority)
        credentials = self.credentials()
        if credentials is None:
            return api.insecure_channel(member.address, options=options)
        return api.secure_channel(member.address, credentials, options=options)

    def for_shared_memory(self, metadata: Metadata) -> Metadata:
        """The metadata for telling a server of a call's shared memory: with the token, which no other call carries."""
        return tuple({**dict(self.shm_metadata), **dict(metadata)}.items()) if self.shm_metadata else metadata

    def with_headers(self, headers: Optional[Mapping[str, str]], traceparent: Optional[str]) -> Metadata:
        """One call's metadata: the client's, the call's own in their place, and the trace that it belongs to."""
        if not headers and traceparent is None:
            return self.metadata
        merged = {**dict(self.metadata), **dict(check_headers(headers))}
        if traceparent is not None:
            if len(traceparent) <= LONGEST_TRACE and TRACEPARENT.fullmatch(traceparent):
                merged["traceparent"] = traceparent
            else:
                # Trace Context, 3.2.2: whoever cannot read it goes on without; it comes from strangers, often.
                LOG.debug("traceparent %.60r is not valid, and not passed on", traceparent)
        return tuple(merged.items())


def check_url(url: str) -> None:
    """Raises ValueError for anything but the address of a gRPC endpoint."""
    if not isinstance(url, str):
        raise TypeError(f"an address is text, such as 'localhost:8001', not {type(url).__name__}")
    if "://" in url:
        raise ValueError(f"{url!r} is not a gRPC address: give HOST:PORT without a scheme, such as 'localhost:8001'")
    match = URL.fullmatch(url)
    if GRPC_URL.fullmatch(url) and (match is None or url.startswith(("ipv4:", "ipv6:"))):
        return
    if match is None or not 0 < int(match[1]) < 65536:
        raise ValueError(
            f"{url!r} is not a gRPC address: give HOST:PORT with a port from 1 to 65535, such as 'localhost:8001'"
        )


def check_model(model: str) -> str:
    """The name itself; raises ValueError for what cannot be one."""
    if not isinstance(model, str) or not model:
        raise ValueError(f"model is a model's name, such as 'ensemble', not {model!r}")
    return model


def check_headers(headers: Optional[Mapping[str, str]]) -> Metadata:
    """Headers as gRPC's metadata; raises ValueError or TypeError for what gRPC would refuse."""
    metadata = []
    for key, value in (headers or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            other = value if isinstance(key, str) else key
            raise TypeError(f"header {key!r}: name and value are text, not {type(other).__name__}")
        # gRPC's rules for metadata; what breaks them would come back as the server's error.
        name = key.lower()
        if not re.fullmatch(r"[0-9a-z_.-]+", name) or not re.fullmatch(r"[ -~]*", value):
            raise ValueError(f"header {key!r}: a name is letters, digits, '_', '-', '.', a value is ASCII text")
        if name.startswith("grpc-") or name.endswith("-bin"):
            raise ValueError(f"header {key!r}: names that begin with 'grpc-' or end with '-bin' are gRPC's own")
        metadata.append((name, value))
    return tuple(metadata)


def check_timeout(timeout: float) -> float:
    """The timeout itself.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0 and at most a day.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}")
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT_S} s, a day, not {timeout!r:.20}")
    return float(timeout)
