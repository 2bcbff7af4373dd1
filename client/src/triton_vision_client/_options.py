"""Value objects that configure a client."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which pauses, a call that reached no server is tried again.

    The pause before retry *n* (from 0) is drawn from 0 to ``min(maximum, initial * 2**n)`` seconds: exponential
    backoff with full jitter, so that many callers do not come back in step. Where a server says for how long it is
    busy, the pause is at least half of that, up to ``maximum``. All tries share the call's one timeout.

    Attributes:
        attempts: rounds over the servers; 1 never tries again, not even another server.
        initial: seconds.
        maximum: seconds.
        budget: how many retries each call earns for its client, so that a server in trouble sees at most so much more
            than its share. Asking a server that this call has not tried costs nothing, unless its queue has just been
            full.
        reserve: how many retries a client starts with, and can save.
    """

    attempts: int = 6
    initial: float = 0.1
    maximum: float = 2.0
    budget: float = 0.2
    reserve: float = 20.0

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise TypeError(f"attempts is an integer, not {type(self.attempts).__name__}")
        # Written so that no NaN passes.
        if not self.attempts >= 1 or not all(
            value >= 0 for value in (self.initial, self.maximum, self.budget, self.reserve)
        ):
            raise ValueError("attempts must be at least 1, and pauses, budget and reserve at least 0")

    def pause(self, retry: int, wait: Optional[float] = None) -> float:
        """Seconds to wait before retry number ``retry``, from 0, of a server that says it is busy for ``wait`` s."""
        longest = min(self.maximum, self.initial * 2.0 ** min(retry, 60))
        told = min(self.maximum, wait or 0.0)
        return max(random.uniform(0.0, longest), random.uniform(0.5 * told, told))


@dataclass(frozen=True)
class TLSConfig:
    """Certificates for an encrypted connection; each a path to a PEM file.

    Attributes:
        ca: the authority that signed the server's certificate; None takes gRPC's built-in ones.
        certificate, key: the client's own, for mutual TLS; both or neither.
    """

    ca: Optional[Union[str, Path]] = None
    certificate: Optional[Union[str, Path]] = None
    key: Optional[Union[str, Path]] = None
    _held: dict[Union[str, Path], bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("mutual TLS needs certificate and key, both")

    def check(self) -> None:
        """Sees whether the files can be used.

        Raises:
            OSError: one cannot be read.
            ValueError: the authority's holds no certificate, or the client's own two do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.read()
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise ValueError(f"TLSConfig: {self.ca} holds no certificate in PEM ({error.reason})") from None
        if self.certificate is not None and self.key is not None:
            try:
                # Without the password it would ask on the terminal.
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
            except ssl.SSLError as error:
                raise ValueError(
                    f"TLSConfig: {self.certificate} and {self.key} are not a certificate and its unencrypted key "
                    f"in PEM ({error.reason})"
                ) from None

    def read(self) -> tuple[Optional[bytes], Optional[bytes], Optional[bytes]]:
        """The contents: authority, key, certificate. Of a file that has gone since, what it has held."""

        def content(path: Optional[Union[str, Path]]) -> Optional[bytes]:
            if path is None:
                return None
            try:
                self._held[path] = Path(path).read_bytes()
            except OSError:
                if path not in self._held:
                    raise
            return self._held[path]

        return content(self.ca), content(self.key), content(self.certificate)
