"""One request of the synchronous client, from its first try to its answer."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Optional

import grpc

from triton_vision_client._calls import ANSWERS, Call
from triton_vision_client._cancelling import INFER, LATE_S, LONG_S, OwnError
from triton_vision_client._errors import DeadlineExceededError, ServerError, VisionClientError

if TYPE_CHECKING:
    from triton_vision_client._balancer import Member
    from triton_vision_client._sync_calls import SyncCalls

# How much later than its deadline a call may end before it is given up for lost.
GRACE_S = 1.0


class Flight:
    """A request that is under way; tried again, if need be, when it is landed.

    Args:
        waits: whether its caller does nothing else until then, which gRPC does in half the CPU time.
    """

    def __init__(self, client: SyncCalls, call: Call, *, waits: bool = False) -> None:
        self._client, self._call, self._waits = client, call, waits
        self._process = os.getpid()
        self._ended: Optional[float] = None
        # Its server, for as long as the balancer counts this as left to it.
        self._left_to: list[Member] = []
        self._attempts = client._begin(call)
        client._regions.place(call)
        self._start()

    def _start(self) -> None:
        client, call, attempts = self._client, self._call, self._attempts
        self._failure: Optional[Exception] = None
        self._connection: Any = None
        self._sent = self._blocks = self._outlasts = False
        self._ended = None
        self._member = attempts.next()
        self._lost_at = time.monotonic() + attempts.remaining() + LATE_S + GRACE_S
        client._in_air.add(self)
        try:
            client._refuse_if_closed()
            self._connection = client._connection(self._member)
            client._check(self._connection, attempts, self._member)
            client._introduce(call, self._connection, attempts, self._member)
            client._refuse_if_swamped(call, self._member)
            left = attempts.remaining()
            message = client._regions.message(call, self._member, left)
            send = getattr(self._connection.stub, call.method)
            self._blocks = self._waits and self._may_block(left)
            self._sent = True
            if self._blocks:
                self._answer = send(message, timeout=left, metadata=call.metadata)
                client._in_air.discard(self)
            else:
                expiry = client._expiry(call, self._member, left)
                self._outlasts = expiry > left
                self._answer = send.future(message, timeout=expiry, metadata=call.metadata)
                self._answer.add_done_callback(self._note_end)
        except grpc.RpcError as error:
            client._in_air.discard(self)
            self._failure = error
            if not self._sent:
                # Known at once, so that no other call goes there, and not when somebody comes for this one.
                connected = self._connection is not None and self._connection.connected
                self._failure = client._failed(error, call, attempts, self._member, connected=connected, sent=False)
        except BaseException as error:
            client._in_air.discard(self)
            # A signal's exception, such as Ctrl-C's or an alarm's, may have struck gRPC anywhere.
            client._give_up(self._member, self._connection)
            client._gave_up(call)
            client._balancer.ended(self._member)
            client._free(call, answered=False)
            if isinstance(error, ValueError) and client._closed:
                raise ValueError("the client is closed") from None
            raise

    def _may_block(self, left: float) -> bool:
        """Whether nothing can cancel the call, by way of gRPC's own waiting, at a server that would not survive it.

        A signal's exception does, which comes to the main thread alone; and so does a deadline.
        """
        if self._call.method != INFER or self._member.cancels:
            return True
        return left >= LONG_S and threading.current_thread() is not threading.main_thread()

    @property
    def connection(self) -> Any:
        """On which it is under way; None before that is known."""
        return self._connection

    def may_cancel(self) -> bool:
        """Whether no server is harmed if this is cancelled."""
        return not self._sent or self._client._may_cancel(self._call, self._member, self._connection)

    def end_if_lost(self) -> None:
        """Gives up on it, and on its connection, if gRPC should have ended it by now: it never will."""
        if time.monotonic() > self._lost_at:
            self._client._give_up(self._member, self._connection)
            self._note_end()

    def _leave(self) -> None:
        """Nobody waits for the answer any more."""
        if self.may_cancel():
            self._answer.cancel()
        else:
            self._client._balancer.keeps(self._member)
            self._left_to.append(self._member)
            self._answer.add_done_callback(self._note_end)  # once more: it may have ended just before

    def _note_end(self, _: Any = None) -> None:
        """The answer is there, whenever somebody comes for it; or there will be none."""
        self._ended = time.monotonic()
        self._client._in_air.discard(self)
        with suppress(IndexError):  # nobody has left it, or that is over
            self._client._balancer.done(self._left_to.pop())

    def land(self) -> Any:
        """What the caller wants of the response; raises the typed error if there is none."""
        client, call = self._client, self._call
        if self._process != os.getpid():
            raise RuntimeError("this was begun before a fork: only the process that has begun it can go on with it")
        if not self._waits and (self._failure is not None or self._answer.done()):
            # Nobody has waited for it: should it have failed, its next try has the time that a call has.
            self._attempts.renew()
        while True:
            error: Any
            try:
                result = call.read(self._response())
            except (grpc.RpcError, VisionClientError) as failure:
                # gRPC raises the answer itself, whose traceback would hold it, this call and its images in a cycle.
                error = failure.with_traceback(None)
            except grpc.FutureTimeoutError:
                # gRPC has lost the call: an exception of a signal has struck the connection.
                client._give_up(self._member, self._connection)
                client._in_air.discard(self)
                error = DeadlineExceededError(f"{self._member.address} did not answer within {call.timeout:g} s")
            except BaseException:
                self.cancel()
                raise
            else:
                client._succeeded(call, self._attempts, self._member, self._ended)
                client._free(call, answered=True)
                if client._should_ask_version(call, self._member):
                    client._ask_version(self._connection, self._member)
                return result
            if client._closed:
                if self._sent:
                    client._balancer.ended(self._member)
                client._gave_up(call)
                client._free(call, answered=False)
                raise ValueError("the client is closed") from error
            if isinstance(error, grpc.RpcError) and client._regions.forgotten(error, call, self._member):
                client._balancer.answered(self._member)
                self._start()
                continue
            typed = error
            if self._sent:
                connected = self._connection.connected
                typed = client._failed(error, call, self._attempts, self._member, connected=connected, sent=True)
            typed, pause = client._next(typed, call, self._attempts, self._member, self._ended)
            if pause is None:
                client._free(call, answered=_is_answer(error))
                try:
                    raise typed from error
                finally:
                    # What was sent, and the connection, live no longer than whoever catches it wants.
                    del typed, error
                    self._failure = self._answer = None
            del typed, error
            try:
                time.sleep(pause)
                client._look_up(self._attempts.remaining())
            except BaseException:
                client._gave_up(call)
                client._free(call, answered=False)
                raise
            self._start()

    def _response(self) -> Any:
        """The response. If the call is late, asks whether its model is ready before it raises."""
        try:
            if self._failure is not None:
                raise self._failure
            return self._answer if self._blocks else self._wait()
        except grpc.RpcError as error:
            client, call, member, connection = self._client, self._call, self._member, self._connection
            if client._should_ask_readiness(error, call, self._attempts, member, connection):
                client._ask_readiness(call, connection, member)
            raise

    def _wait(self) -> Any:
        """The response.

        Raises:
            grpc.FutureTimeoutError: gRPC has lost the call.
        """
        left = self._attempts.remaining()
        if not self._outlasts:
            return self._answer.result(left + GRACE_S)
        try:
            return self._answer.result(left)
        except grpc.FutureTimeoutError:
            self._leave()
            raise OwnError.late() from None

    def cancel(self) -> None:
        """Gives up on it."""
        if self._process != os.getpid():
            return  # it is another process's
        client, call = self._client, self._call
        if self._failure is None and not self._blocks:
            if self._answer.done():
                self._settle_unread()
                return
            self._leave()
        client._gave_up(call)
        if self._sent:
            client._balancer.ended(self._member)
        client._free(call, answered=False)

    def _settle_unread(self) -> None:
        """It has ended; only nobody has come for it."""
        client, call, error = self._client, self._call, self._answer.exception()
        if error is None:
            client._succeeded(call, self._attempts, self._member, self._ended)
        else:
            connected = self._connection.connected
            typed = client._failed(error, call, self._attempts, self._member, connected=connected, sent=True)
            client._tell("call", type(typed).__name__, (self._ended or time.monotonic()) - call.began)
        client._free(call, answered=error is None or _is_answer(error))


def _is_answer(error: Any) -> bool:
    """Whether the server is done with a call that has ended so."""
    return isinstance(error, ServerError) or (isinstance(error, grpc.RpcError) and error.code() in ANSWERS)
