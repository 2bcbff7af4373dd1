"""What the synchronous and the asyncio client share: everything but waiting."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional, Union

import grpc
from tritonclient.grpc import service_pb2

from triton_vision_client import _protocol
from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._batches import Batch
from triton_vision_client._calls import TELLING_S, Attempts, Budget, Call
from triton_vision_client._cancelling import ASK_AGAIN_S, INFER, LATE_S, MOST_LEFT, OwnError, survives_cancelling
from triton_vision_client._connecting import true_details
from triton_vision_client._errors import (
    DeadlineExceededError,
    ModelNotFoundError,
    ServerError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._forks import watch
from triton_vision_client._names import Names, members_of
from triton_vision_client._regions import Left, Regions
from triton_vision_client._results import Result
from triton_vision_client._settings import Settings, check_model, check_timeout
from triton_vision_client._translate import dead_model, translate

LOG = logging.getLogger("triton_vision_client")
# An ejected server is asked whether it is well; how long it may take to say so.
PROBE_S = 2.0
# How long it may take to say whether a model is ready, once a call to that model has run out of time.
READY_S = 0.25
# For how long a late answer is blamed on a model that was heard to be dead. Triton 2.51 still calls a dead model ready,
# and takes a second or more per batch to say what is wrong: some callers hear it in time, and some don't.
DEAD_S = 10.0
# How long a server may take to be told that a region is gone; and when one is asked again that still reads it.
UNREGISTER_S = 2.0
IN_USE_PAUSE_S = 0.05
# How long the end of a client waits for its calls under way: servers read their regions of shared memory, or may not
# survive that they are cancelled. As long as some end, it waits on, up to the longest.
LAST_CALLS_S, LONGEST_LAST_CALLS_S, LAST_CALLS_PAUSE_S = 2.0, 10.0, 0.02
# How much longer, in the background, a connection is left open for those that must not be cancelled.
LINGER_S = 5.0
# gRPC may wait without end for calls that a signal's exception has struck.
CLOSE_S = 2.0

Parameters = Mapping[str, Union[bool, int, float, str]]


class BaseClient:
    """Settings, and the servers that they name. The twins add connections, and the waiting."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._closed = False
        self._start_anew()
        watch(self)

    def _start_anew(self) -> None:
        """Has nothing of its own yet: neither locks nor connections nor shared memory."""
        self._lock = threading.RLock()
        # Held while the client is closed, so that whoever closes it, too, comes back when that is done.
        self._ending = threading.RLock()
        self._budget = Budget(self._settings.retry.budget, self._settings.retry.reserve)
        self._connections: dict[Member, Any] = {}
        # Those that no new call uses, but that calls may still be under way on.
        self._left_behind: list[Any] = []
        self._regions = Regions()
        # The calls that are under way at a server.
        self._in_air: set[Any] = set()
        # What servers are to be told of regions of event loops that are gone.
        self._stale: list[Left] = []
        self._gone: list[Member] = []
        self._found = {url: [Member(url)] for url in self._settings.urls}
        self._balancer = Balancer([member for row in self._found.values() for member in row], self._ejected)
        self._names = Names(self._settings.urls, self._take)

    def _after_fork(self) -> Any:
        """In a forked child; returns what is the parent's."""
        parents = (self._connections, self._left_behind, self._in_air, self._regions, self._balancer)
        self._start_anew()
        return parents

    def __copy__(self) -> NoReturn:
        raise TypeError("a client cannot be copied: use it from any number of threads, or make another one")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled: make one in each process, or have it inherited by a fork")

    # -- building calls ------------------------------------------------------------------------------------------

    def _classification(
        self,
        images: Sequence[bytes],
        sources: Sequence[Any],
        *,
        top_k: Optional[int],
        mask: bool,
        model: Optional[str],
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        name = self._settings.model if model is None else check_model(model)
        count = _protocol.check_top_k(top_k)

        def build(left: float, region: Optional[tuple[str, int]] = None) -> Any:
            return _protocol.build_request(name, images, count, mask, left, region)

        def read(response: Any) -> list[Result]:
            return _protocol.parse_response(response, sources)

        call = self._call_of("ModelInfer", build, read, name, timeout, headers, traceparent)
        call.images = images if self._settings.shared_memory else ()
        return call

    def _batch_calls(
        self,
        top_k: Optional[int],
        model: Optional[str],
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Callable[[Batch], Call]:
        """How each request of a stream is made; what is wrong with the arguments is said here, not at the first."""

        def call_of(batch: Batch) -> Call:
            return self._classification(
                batch.images,
                batch.travelling(),
                top_k=top_k,
                mask=True,
                model=model,
                timeout=timeout,
                headers=headers,
                traceparent=traceparent,
            )

        call_of(Batch())
        return call_of

    def _inference(
        self,
        model: str,
        tensors: Mapping[str, Any],
        outputs: Sequence[str],
        parameters: Optional[Parameters],
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        request = _protocol.build_tensors(check_model(model), tensors, outputs, parameters or {})

        def build(left: float) -> Any:
            request.parameters["timeout"].int64_param = max(1, int(left * 1e6))
            return request

        return self._call_of("ModelInfer", build, _protocol.parse_tensors, model, timeout, headers, traceparent)

    def _question(self, method: str, message: Any, read: Callable[[Any], Any], timeout: Optional[float]) -> Call:
        def build(left: float) -> Any:  # noqa: ARG001 - such a question carries no deadline of its own
            return message

        return self._call_of(method, build, read, "", timeout, None, None)

    def _index(self, timeout: Optional[float]) -> Call:
        return self._question("RepositoryIndex", service_pb2.RepositoryIndexRequest(), _protocol.model_infos, timeout)

    def _statistics(self, timeout: Optional[float]) -> Call:
        """Of all models that are loaded: a server may keep the index to those with its admin token."""
        return self._question("ModelStatistics", service_pb2.ModelStatisticsRequest(), _protocol.loaded_models, timeout)

    def _call_of(
        self,
        method: str,
        build: Callable[..., Any],
        read: Callable[[Any], Any],
        model: str,
        timeout: Optional[float],
        headers: Optional[Mapping[str, str]],
        traceparent: Optional[str],
    ) -> Call:
        self._refuse_if_closed()
        seconds = self._settings.timeout if timeout is None else check_timeout(timeout)
        return Call(method, build, read, model, seconds, self._settings.with_headers(headers, traceparent))

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ValueError("the client is closed")

    # -- the course of a call ------------------------------------------------------------------------------------

    def _attempts(self, call: Call) -> Attempts:
        return Attempts(self._balancer, self._budget, self._settings.retry, call.timeout)

    def _failed(
        self, error: Any, call: Call, attempts: Attempts, member: Member, *, connected: bool, sent: bool
    ) -> VisionClientError:
        """The typed error of a failed try, of which the balancer is told.

        Args:
            error: gRPC's, or the typed one of an answer that cannot be read.
            connected: whether the connection is up.
            sent: whether the call itself was sent, and not only a question that comes before it.
        """
        unanswered_for: Optional[float] = None
        if isinstance(error, VisionClientError):
            typed = error
        else:
            unsent_for = None if sent else time.monotonic() - attempts.try_began
            unanswered_for = unsent_for if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else None
            typed = translate(
                error.code(),
                true_details(error.code(), error.details() or "", member.address, connected=connected),
                model=call.model,
                address=member.address,
                timeout=call.timeout,
                connected=connected,
                unsent_for=unsent_for,
                tls=self._settings.tls is not None,
            )
        if getattr(typed, "broken", False):
            member.dead[call.model] = time.monotonic()
        elif isinstance(typed, DeadlineExceededError) and self._is_dead(call, member):
            typed = dead_model(call.model, member.address, f"no answer within {call.timeout:g} s")
        attempts.settle(
            member,
            typed,
            own_model=call.model == self._settings.model,
            missing=_awaited(member, call, typed),
            unanswered_for=unanswered_for,
        )
        return typed

    def _is_dead(self, call: Call, member: Member) -> bool:
        """Whether any caller has heard that the call's model is dead, since this call began or shortly before."""
        return member.dead.get(call.model, -math.inf) > min(call.began, time.monotonic() - DEAD_S)

    def _should_ask_readiness(
        self, error: Any, call: Call, attempts: Attempts, member: Member, connection: Any
    ) -> bool:
        """Whether a failed call has waited so long that its model may be dead."""
        return (
            call.method == INFER
            and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            and time.monotonic() - attempts.try_began >= TELLING_S
            and not self._is_dead(call, member)
            and connection.connected
        )

    def _heard_readiness(self, call: Call, member: Member, answer: Any) -> None:
        """Remembers what a server says about a late call's model."""
        if answer is not None and not answer.ready:
            member.dead[call.model] = time.monotonic()

    def _next(
        self, typed: VisionClientError, call: Call, attempts: Attempts, member: Member, ended: Optional[float] = None
    ) -> tuple[VisionClientError, Optional[float]]:
        """The error that a try has ended with, at the time ``ended`` or now, and the pause before the next try.

        None as a pause: there shall be none, and the error is the whole call's.
        """
        pause = attempts.pause_after(member, typed)
        if pause is None:
            typed = attempts.verdict(typed)
            self._tell("call", type(typed).__name__, (ended or time.monotonic()) - call.began)
        else:
            self._tell("retry", typed)
        return typed, pause

    def _succeeded(self, call: Call, attempts: Attempts, member: Member, ended: Optional[float] = None) -> None:
        """An answer has come, at the time ``ended`` or now."""
        attempts.settle(member, None)
        if member.dead:
            member.dead.pop(call.model, None)
        if call.model and call.model != member.last_served:
            member.last_served = call.model
            member.served.add(call.model)
        self._tell("call", "ok", (ended or time.monotonic()) - call.began)

    def _may_cancel(self, call: Call, member: Member, connection: Any) -> bool:
        """Whether a call may be cancelled that has been sent: it harms no server, or has not reached one."""
        return call.method != INFER or member.cancels or not connection.connected

    def _refuse_if_swamped(self, call: Call, member: Member) -> None:
        """Raises OwnError if too many calls are left to the server to take another one."""
        if call.method == INFER and member.left >= MOST_LEFT:
            raise OwnError.swamped()

    def _expiry(self, call: Call, member: Member, left: float) -> float:
        """In how many seconds a call expires at the server, with ``left`` seconds to go for its caller."""
        return left if call.method != INFER or member.cancels else left + LATE_S

    def _last_calls(self) -> Iterator[float]:
        """The pauses of the client's end, until nothing is under way any more that must be waited for."""
        until, longest = (time.monotonic() + seconds for seconds in (LAST_CALLS_S, LONGEST_LAST_CALLS_S))
        count = len(self._in_air)
        while self._must_wait() and time.monotonic() < min(until, longest):
            yield LAST_CALLS_PAUSE_S
            if len(self._in_air) < count:
                count, until = len(self._in_air), time.monotonic() + LAST_CALLS_S

    def _must_wait(self) -> bool:
        if self._regions.told:
            return bool(self._in_air)
        return any(not one.may_cancel() for one in list(self._in_air))

    def _should_ask_version(self, call: Call, member: Member) -> bool:
        """Whether a server that has just answered a call is to be asked for its version."""
        now = time.monotonic()
        if call.method != INFER or member.cancels or now < member.version_due:
            return False
        member.version_due = now + ASK_AGAIN_S
        return True

    def _heard_version(self, member: Member, metadata: Any) -> None:
        """What a server says about itself."""
        member.cancels, member.version_due = survives_cancelling(metadata), math.inf

    def _gave_up(self, call: Call) -> None:
        """Its caller has cancelled a call, or left it."""
        self._tell("call", "cancelled", time.monotonic() - call.began)

    def _tell(self, what: str, *arguments: Any) -> None:
        """Tells the observer, whose own mistakes must not cost an answer."""
        try:
            getattr(self._settings.observer, what)(*arguments)
        except Exception:
            LOG.exception("the observer raised")

    def _degrades(self, error: VisionClientError) -> bool:
        """Whether the fallback answers for servers that did not."""
        return self._settings.fallback is not None and isinstance(
            error, (ServerUnavailableError, DeadlineExceededError)
        )

    # -- servers -------------------------------------------------------------------------------------------------

    def _ejected(self, member: Member) -> None:
        self._names.suspect()
        self._tell("ejection", member.address)

    def _take(self, url: str, answers: Sequence[Any]) -> None:
        """Takes what the resolver says of an address. Servers that are gone end with their last call."""
        with self._lock:
            self._found[url] = members_of(url, answers)
            members = {member.address: member for row in self._found.values() for member in row}
            if members.keys() != {member.address for member in self._balancer.members}:
                self._names.suspect()  # where one has gone, another may be on its way
            self._gone += self._balancer.replace(list(members.values()))

    def _retired(self) -> list[Any]:
        """The connections to servers that are gone and that no call is under way to any more."""
        if not self._gone:
            return []
        with self._lock:
            ended = [member for member in self._gone if not member.outstanding and not member.probing_until]
            self._gone = [member for member in self._gone if member not in ended]
            for member in ended:
                self._regions.forget(member)
            return [self._connections.pop(member) for member in ended if member in self._connections]

    def _readiness(self, member: Member) -> tuple[str, Any]:
        """Method and message that ask whether an ejected server is well again."""
        if member.missing:
            return "ModelReady", service_pb2.ModelReadyRequest(name=member.missing)
        return "ServerReady", service_pb2.ServerReadyRequest()


def _awaited(member: Member, call: Call, error: VisionClientError) -> str:
    """The model to wait for at a server that a call's error ejects; empty for the server as such.

    Where it is not the model that was broken or missing, one that it has served: servers may have different models, and
    a typing error in a model's name must not keep one out.
    """
    of_the_model = isinstance(error, (ModelNotFoundError, ServerError)) or getattr(error, "broken", False)
    return call.model if of_the_model or call.model in member.served else member.last_served
