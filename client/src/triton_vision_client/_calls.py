"""One call, and the course of its tries: which server next, how much time is left, when to give up. No I/O in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import grpc

from triton_vision_client import _protocol
from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._errors import (
    DeadlineExceededError,
    ModelNotFoundError,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._options import RetryPolicy
from triton_vision_client._shm import Region

Metadata = tuple[tuple[str, str], ...]
# What a server that has been reached does not answer.
NOT_REACHED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# What a server answers only once it is done with a request.
ANSWERS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)
# With several servers, how long one may take to be connected before the next is asked.
CONNECT_S = 3.0


class Call:
    """One request, whatever it asks for: how it is built, where it goes, and how long it may take.

    Attributes:
        method: of the inference protocol's service.
        build: the seconds left, and for images in shared memory where they are -> the message.
        model: for error messages.
        images: those that shall go through shared memory; empty for none.
        region: where they are.
        told_unknown: whether a server has said that it does not know the region, which may happen once.
    """

    def __init__(self, method: str, build: Callable[..., Any], model: str, timeout: float, metadata: Metadata):
        self.method, self.build, self.model, self.timeout, self.metadata = method, build, model, timeout, metadata
        self.began = time.monotonic()
        self.images: Sequence[bytes] = ()
        self.region: Optional[Region] = None
        self.told_unknown = False


class Budget:
    """Bounds a client's retries to a share of its calls, so that a server in trouble is not hammered.

    Every call earns ``ratio`` of a retry, up to ``reserve`` of them. Safe to use from several threads.
    """

    def __init__(self, ratio: float, reserve: float) -> None:
        self._ratio, self._reserve = ratio, reserve
        self._saved = reserve
        self._lock = threading.RLock()

    def earn(self) -> None:
        """A call begins."""
        with self._lock:
            self._saved = min(self._reserve, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether there is a retry left; takes it."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True


class Attempts:
    """One call: its deadline, and the servers that it has tried."""

    def __init__(self, balancer: Balancer, budget: Budget, retry: RetryPolicy, timeout: float) -> None:
        self._balancer, self._budget, self._retry = balancer, budget, retry
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._tried: list[Member] = []
        self._retries = 0
        budget.earn()

    def renew(self) -> None:
        """Gives the call its whole timeout again."""
        self._deadline = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Seconds left of the call's timeout; at least a millisecond, so that gRPC itself reports the end."""
        return max(0.001, self._deadline - time.monotonic())

    def connect_timeout(self) -> float:
        """Seconds that one of several servers may take to be connected."""
        return min(CONNECT_S, self.remaining() / (len(self._balancer.members) + 1))

    def next(self) -> Member:
        """The server for the next try."""
        member = self._balancer.pick(self._tried)
        self._tried.append(member)
        return member

    def may_check(self, member: Member) -> bool:
        """Whether it is worth a moment to see that the server can be reached, since another one might."""
        return not member.proven and len(self._balancer.members) > 1 and self._balancer.has_untried(self._tried)

    def settle(self, member: Member, error: Optional[VisionClientError], *, own_model: bool = True) -> None:
        """Tells the balancer how a try has ended.

        Args:
            own_model: whether the call was for the client's own model, which all its servers should have.
        """
        if error is None:
            self._balancer.answered(member)
        elif isinstance(error, ServerUnavailableError) and not isinstance(error, ServerOverloadedError):
            self._balancer.failed(member)
        elif isinstance(error, ModelNotFoundError) and own_model and len(self._balancer.members) > 1:
            self._balancer.failed(member)  # it may still be loading
        elif isinstance(error, DeadlineExceededError) or getattr(error, "suspect", False):
            self._balancer.erred(member)
        elif isinstance(error, ServerOverloadedError) and not error.waited:
            self._balancer.overloaded(member)
        else:
            self._balancer.ended(member)

    def pause_after(self, error: VisionClientError) -> Optional[float]:
        """Seconds to wait before the next try; None if there shall be none.

        A server that has not been asked yet is asked at once; after a full queue only if its own had room of late, so
        that overloaded servers do not see every call of every caller. Going round again costs one of the policy's
        attempts, a pause, and a retry of the client's budget.
        """
        if not _protocol.may_retry(error):
            return None
        full = isinstance(error, ServerOverloadedError)
        untried = self._retry.attempts > 1 and self._balancer.has_untried(self._tried, with_room=full)
        if isinstance(error, (ModelNotFoundError, ServerError)) and not untried:
            return None
        if untried:
            return 0.0
        self._retries += 1
        if self._retries >= self._retry.attempts:
            return None
        pause = self._retry.pause(self._retries - 1)
        if time.monotonic() + pause >= self._deadline or not self._budget.spend():
            return None
        self._tried.clear()
        return pause
