"""One request of the synchronous client, from its first try to its answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Optional

import grpc

from triton_vision_client._calls import ANSWERS, Call

if TYPE_CHECKING:
    from triton_vision_client._sync_calls import SyncCalls


class Flight:
    """A request that is under way; tried again, if need be, when it is landed.

    Args:
        waits: whether its caller does nothing else until then, which gRPC does a little faster.
    """

    def __init__(self, client: SyncCalls, call: Call, *, waits: bool = False) -> None:
        self._client, self._call, self._waits = client, call, waits
        client._look_up(call.timeout)
        self._attempts = client._attempts(call)
        client._regions.place(call)
        self._start()

    def _start(self) -> None:
        client, call, attempts = self._client, self._call, self._attempts
        self._failure: Optional[grpc.RpcError] = None
        self._connection: Any = None
        self._member = attempts.next()
        try:
            self._connection = client._connection(self._member)
            client._check(self._connection, attempts, self._member)
            client._introduce(call, self._connection, attempts, self._member)
            left = attempts.remaining()
            message = client._regions.message(call, self._member, left)
            send = getattr(self._connection.stub, call.method)
            self._answer = (send if self._waits else send.future)(message, timeout=left, metadata=call.metadata)
        except grpc.RpcError as error:
            self._failure = error
        except BaseException as error:
            client._balancer.ended(self._member)
            client._free(call, answered=False)
            if isinstance(error, ValueError) and client._closed:
                raise ValueError("the client is closed") from None
            raise

    def land(self) -> Any:
        """The response; raises the typed error if there is none."""
        client, call = self._client, self._call
        if not self._waits and (self._failure is not None or self._answer.done()):
            # Nobody has waited for it: should it have failed, its next try has the time that a call has.
            self._attempts.renew()
        while True:
            try:
                if self._failure is not None:
                    raise self._failure
                response = self._answer if self._waits else self._answer.result()
            except grpc.RpcError as error:
                if client._regions.forgotten(error, call, self._member):
                    client._balancer.answered(self._member)
                    self._start()
                    continue
                connected = self._connection.connected
                typed, pause = client._failed(error, call, self._attempts, self._member, connected)
                if pause is None:
                    client._free(call, answered=error.code() in ANSWERS)
                    raise typed from error
                time.sleep(pause)
                client._look_up()
                self._start()
            except BaseException:
                self.cancel()
                raise
            else:
                client._succeeded(call, self._attempts, self._member)
                client._free(call, answered=True)
                return response

    def cancel(self) -> None:
        """Gives up on it."""
        if self._failure is None and not self._waits:
            self._answer.cancel()
        self._client._balancer.ended(self._member)
        self._client._free(self._call, answered=False)
