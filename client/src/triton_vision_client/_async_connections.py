"""The asyncio client's connections, and the requests that are under way on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable

import grpc
from tritonclient.grpc import service_pb2_grpc

from triton_vision_client._balancer import Balancer, Member
from triton_vision_client._cancelling import OwnError
from triton_vision_client._client import LAST_CALLS_PAUSE_S, LINGER_S
from triton_vision_client._forks import closed_channel, open_channel
from triton_vision_client._settings import Settings

# The loop itself keeps no task alive.
_lingering: set[asyncio.Future[None]] = set()


class Connection:
    """One server's channel, made in the event loop that uses it."""

    def __init__(self, member: Member, settings: Settings) -> None:
        self.channel = settings.channel(grpc.aio, member)
        open_channel(self)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def end(self) -> None:
        """Closes it. Whoever still holds this object, such as an error's traceback, holds no channel by it."""
        channel, self.channel, self.stub = self.channel, None, None
        closed_channel(self)
        if channel is not None:
            try:
                await channel.close()
            except RuntimeError:  # calls are pending in an event loop that is gone
                channel._channel.close()

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return self.channel is not None and bool(self.channel.get_state() == grpc.ChannelConnectivity.READY)


class Sent:
    """A request at a server. Its caller may leave before the server is done with it.

    Args:
        answer: gRPC's call.
        patience: seconds for which its caller waits.
        may_cancel: whether no server is harmed if it is cancelled, at the time of asking.
        in_air: holds it until it has ended.
        balancer: counts it as under way at ``member`` after its caller has left.
    """

    def __init__(
        self,
        answer: Any,
        connection: Connection,
        patience: float,
        may_cancel: Callable[[], bool],
        in_air: set[Any],
        balancer: Balancer,
        member: Member,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.connection, self.may_cancel = connection, may_cancel
        self._answer, self._in_air, self._balancer, self._member = answer, in_air, balancer, member
        self._ended: asyncio.Future[bool] = loop.create_future()
        self._timer = loop.call_later(patience, self._stop_waiting, False)
        self._is_left = False
        in_air.add(self)
        answer.add_done_callback(self._note_end)

    async def response(self) -> Any:
        """What the server answers.

        Raises:
            grpc.RpcError: gRPC's own error, or one that reads like it.
            ValueError: the client has been closed.
        """
        try:
            # gRPC cancels a call when whoever awaits it is cancelled.
            if not await self._ended:
                raise OwnError.late()
            return await self._answer
        finally:
            self._timer.cancel()
            if self in self._in_air:
                self._leave()
            self._answer = None  # which holds this

    def desert(self) -> None:
        """Its client is closed: whoever waits for it waits no longer."""
        if not self._ended.done():
            self._ended.set_exception(ValueError("the client is closed"))

    def _leave(self) -> None:
        if self.may_cancel():
            self._answer.cancel()
        else:
            self._is_left = True
            self._balancer.keeps(self._member)

    def _stop_waiting(self, ended: bool) -> None:
        if not self._ended.done():
            with suppress(RuntimeError):  # the event loop is closed, and nobody waits in it any more
                self._ended.set_result(ended)

    def _note_end(self, _: Any) -> None:
        self._in_air.discard(self)
        self._stop_waiting(True)
        if self._is_left:
            self._balancer.done(self._member)


async def end(connections: Iterable[Connection], in_air: set[Sent]) -> None:
    """Ends connections; where calls are under way that must not be cancelled, in the background, after them."""
    busy = {sent.connection for sent in in_air if not sent.may_cancel()}
    for connection in connections:
        if connection in busy:
            task = asyncio.ensure_future(_linger(connection, in_air))
            _lingering.add(task)
            task.add_done_callback(_lingering.discard)
        else:
            await connection.end()


async def _linger(connection: Connection, in_air: set[Sent]) -> None:
    until = time.monotonic() + LINGER_S
    try:
        while any(sent.connection is connection for sent in in_air) and time.monotonic() < until:
            await asyncio.sleep(LAST_CALLS_PAUSE_S)
    finally:  # also when the event loop ends
        await connection.end()
        await asyncio.sleep(LAST_CALLS_PAUSE_S)  # while gRPC ends what that has cancelled
