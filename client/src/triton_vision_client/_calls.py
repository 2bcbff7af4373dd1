"""One call, and the course of its tries: which server next, how much time is left, when to give up. No I/O in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional

import grpc

from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._errors import (
    BadImageError,
    DeadlineExceededError,
    ModelNotFoundError,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._options import RetryPolicy
from triton_vision_client._shm import Region
from triton_vision_client._translate import may_retry

Metadata = tuple[tuple[str, str], ...]
# What a server answers only once it is done with a request.
ANSWERS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)
# With several servers, how long one may take to show that it is there before the next is asked; and one that had been
# left alone, because it did not.
CHECK_S, CHECK_AGAIN_S = 3.0, 0.5
# One that has not answered in less than this may as well be far away.
TELLING_S = 1.0
# With less than this left of a call's time, no other server is asked.
SHORTEST_TRY_S = 0.01

# How many servers' failures an error names beside its own.
NAMED = 7


class Call:
    """One request, whatever it asks for: how it is built and read, where it goes, and how long it may take.

    Attributes:
        method: of the inference protocol's service.
        build: the seconds left, and for images in shared memory where they are -> the message.
        read: the response -> what the caller wants of it. Raises ServerError if it is not there.
        model: that it is for; empty for a question to the server as such.
        images: those that shall go through shared memory; empty for none.
        region: where they are.
        forgotten_by: the servers that have said that they do not know the region, each of which may do so once.
    """

    def __init__(
        self,
        method: str,
        build: Callable[..., Any],
        read: Callable[[Any], Any],
        model: str,
        timeout: float,
        metadata: Metadata,
    ) -> None:
        self.method, self.build, self.read, self.model = method, build, read, model
        self.timeout, self.metadata = timeout, metadata
        self.began = time.monotonic()
        self.images: Sequence[bytes] = ()
        self.region: Optional[Region] = None
        self.forgotten_by: set[Member] = set()


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
        self.balancer = balancer
        self._budget, self._retry = budget, retry
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._tried: list[Member] = []
        self._failures: dict[Member, VisionClientError] = {}
        self._retries = 0
        budget.earn()

    def renew(self) -> None:
        """Gives the call its whole timeout again."""
        self._deadline = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Seconds left of the call's timeout; at least a millisecond, so that gRPC itself reports the end."""
        return max(0.001, self._deadline - time.monotonic())

    def check_timeout(self, member: Member) -> float:
        """Seconds that one of several servers may take to show that it is there."""
        longest = CHECK_AGAIN_S if member.ejected_until else CHECK_S
        left = self.remaining()
        # A server far away takes some round trips to be connected.
        return max(min(longest, left / (len(self.balancer.members) + 1)), min(CHECK_AGAIN_S, left / 2))

    def register_timeout(self, member: Member) -> float:
        """Seconds that a server may take to be told of a region; with several, another one may do instead."""
        return self.remaining() if len(self.balancer.members) == 1 else self.check_timeout(member)

    def next(self) -> Member:
        """The server for the next try."""
        member = self.balancer.pick(self._tried)
        self._tried.append(member)
        self.try_began = time.monotonic()
        return member

    def may_check(self, member: Member) -> bool:
        """Whether it is worth a moment to see that the server is there, since another one might be."""
        return not member.proven and len(self.balancer.members) > 1

    def settle(
        self,
        member: Member,
        error: Optional[VisionClientError],
        *,
        own_model: bool = True,
        missing: str = "",
        unanswered_for: Optional[float] = None,
    ) -> None:
        """Tells the balancer how a try has ended.

        Args:
            unanswered_for: for how many seconds a question that comes before the call has had no answer at all.
            own_model: whether the call was for the client's own model, which all its servers should have.
            missing: the model that must be ready at the server until it comes back, should it be ejected.
        """
        if isinstance(error, ServerOverloadedError):
            if error.waited:
                self.balancer.answered(member)
            else:
                self.balancer.overloaded(member)
        elif unanswered_for is not None and unanswered_for < TELLING_S:
            self.balancer.erred(member, missing)
        elif isinstance(error, ServerUnavailableError):
            self.balancer.failed(member, missing)
        elif isinstance(error, ModelNotFoundError) and own_model and len(self.balancer.members) > 1:
            self.balancer.failed(member, missing)  # it may still be loading
        elif isinstance(error, DeadlineExceededError) or getattr(error, "suspect", False):
            self.balancer.erred(member, missing)
        else:
            self.balancer.answered(member)  # a refusal, it may be, but that is the caller's affair

    def pause_after(self, member: Member, error: VisionClientError) -> Optional[float]:
        """Seconds to wait before the next try; None if there shall be none.

        A server that has not been asked yet is asked at once; after a full queue, if its own was full of late as well,
        that takes a retry of the client's budget, so that overloaded servers do not see every call of every caller.
        Going round again costs one of the policy's attempts, a pause, and a retry of the budget.
        """
        self._failures[member] = error
        if not may_retry(error) or self.remaining() < SHORTEST_TRY_S:
            return None
        full = isinstance(error, ServerOverloadedError)
        if self._retry.attempts > 1 and self.balancer.has_untried(self._tried, with_room=full):
            return 0.0
        if full and self._retry.attempts > 1 and self.balancer.has_untried(self._tried) and self._budget.spend():
            return 0.0
        if not isinstance(self._gravest(), ServerUnavailableError):
            return None  # the same again
        self._retries += 1
        if self._retries >= self._retry.attempts:
            return None
        pause = self._retry.pause(self._retries - 1, getattr(error, "wait", None))
        if time.monotonic() + pause >= self._deadline or not self._budget.spend():
            return None
        self._tried.clear()
        return pause

    def verdict(self, error: VisionClientError) -> VisionClientError:
        """The error that says of the whole call what its last try alone, ``error``, may not.

        Where one server had a full queue and another could not be reached, the caller may try again later.
        """
        failures, gravest = list(self._failures.values()), self._gravest()
        # An error that is raised holds this object, by way of its traceback.
        self._failures.clear()
        if len(failures) < 2 or isinstance(error, BadImageError):
            return error
        kept = gravest if may_retry(error) else error
        others = [str(other) for other in failures if other is not kept]
        more = [f"{len(others) - NAMED} more servers"] if len(others) > NAMED else []
        merged = type(kept)(f"{kept}; also: {'; '.join(others[:NAMED] + more)}")
        merged.__dict__.update(kept.__dict__)
        return merged

    def _gravest(self) -> VisionClientError:
        """Of each server's last failure the one that says most about the call; of equals the last."""
        return max(reversed(list(self._failures.values())), key=_weight)


def _weight(error: VisionClientError) -> int:
    kinds = (ModelNotFoundError, ServerError, ServerUnavailableError, ServerOverloadedError)
    return max((rank for rank, kind in enumerate(kinds) if isinstance(error, kind)), default=-1)
