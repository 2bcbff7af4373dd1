"""How the asyncio client's requests reach the servers, and their answers its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Optional

import grpc
from tritonclient.grpc import service_pb2

from triton_vision_client._async_connections import Connection, Sent, end
from triton_vision_client._balancer import Member
from triton_vision_client._calls import ANSWERS, Attempts, Call, Metadata
from triton_vision_client._client import (
    IN_USE_PAUSE_S,
    PROBE_S,
    READY_S,
    UNREGISTER_S,
    BaseClient,
)
from triton_vision_client._errors import ServerError
from triton_vision_client._flight import GRACE_S
from triton_vision_client._forks import check_asyncio
from triton_vision_client._protocol import says_yes
from triton_vision_client._regions import IN_USE, Left, Regions
from triton_vision_client._shm import left_over
from triton_vision_client._translate import reaches

# What a client has of its own in each event loop.
OF_A_LOOP = ("_balancer", "_names", "_found", "_gone", "_connections", "_regions", "_tasks", "_in_air")


class AsyncCalls(BaseClient):
    """Connections and waiting, for callers in an event loop."""

    def _start_anew(self) -> None:
        super()._start_anew()
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._tasks: set[asyncio.Future[object]] = set()
        self._of_other_loops: dict[asyncio.AbstractEventLoop, dict[str, Any]] = {}

    # -- servers -------------------------------------------------------------------------------------------------

    async def _settle_in(self) -> None:
        """Another event loop gets connections of its own."""
        check_asyncio()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        stale, budget = self._stale, self._budget
        if self._loop is not None:
            self._of_other_loops[self._loop] = {name: getattr(self, name) for name in OF_A_LOOP}
        others = self._of_other_loops
        known = others.pop(loop, None)
        if known is None:
            self._start_anew()
        else:
            self.__dict__.update(known)
        self._loop, self._stale, self._budget, self._of_other_loops = loop, stale, budget, others
        await self._end_others(lambda other: other.is_closed())

    async def _end_others(self, which: Callable[[asyncio.AbstractEventLoop], bool]) -> None:
        """Ends, in this event loop, what others have left; servers are told of their regions when there is occasion."""
        for other in [other for other in self._of_other_loops if which(other)]:
            left = self._of_other_loops.pop(other)
            self._stale += left["_regions"].end()
            await end(left["_connections"].values(), left["_in_air"])

    async def _begin(self, call: Call) -> Attempts:
        """As in the synchronous twin."""
        await self._settle_in()
        attempts = self._attempts(call)
        try:
            await self._look_up(attempts.remaining())
        except asyncio.CancelledError:
            self._gave_up(call)
            raise
        return attempts

    async def _look_up(self, timeout: float) -> None:
        """Has the addresses resolved if it is time to, and asks the ejected servers that are due."""
        if self._balancer.any_ejected():
            self._names.suspect()
        first = self._names.look_up()
        if first is not None:
            future, limit = first
            ended = asyncio.wrap_future(future)
            try:
                await asyncio.wait({ended}, timeout=min(limit, timeout / 2))
            finally:
                ended.cancel()
        for connection in self._retired():
            await connection.end()
        for member in self._balancer.due():
            asked = self._later(self._probe(member))
            asked.add_done_callback(partial(self._probed, member))

    async def _probe(self, member: Member) -> bool:
        """Asks whether a server is well again."""
        try:
            method, request = self._readiness(member)
            answer = await getattr(self._connection(member).stub, method)(
                request, timeout=PROBE_S, metadata=self._settings.metadata, wait_for_ready=True
            )
        except grpc.RpcError as error:
            return reaches(error)
        except (ValueError, AttributeError):
            return False  # the client has been closed
        return says_yes(answer)

    def _probed(self, member: Member, asked: asyncio.Future[Any]) -> None:
        well = not asked.cancelled() and asked.exception() is None and asked.result()
        self._balancer.probed(member, well)

    async def _ask_version(self, connection: Connection, member: Member) -> None:
        """Asks what the server says about itself."""
        request = service_pb2.ServerMetadataRequest()
        with suppress(grpc.RpcError, ValueError, AttributeError):  # the client may be closed meanwhile
            self._heard_version(
                member,
                await connection.stub.ServerMetadata(request, timeout=PROBE_S, metadata=self._settings.metadata),
            )

    async def _ask_readiness(self, call: Call, connection: Connection, member: Member) -> None:
        """As in the synchronous twin."""
        request = service_pb2.ModelReadyRequest(name=call.model)
        with suppress(grpc.RpcError, ValueError, AttributeError):
            answer = await connection.stub.ModelReady(request, timeout=READY_S, metadata=call.metadata)
            self._heard_readiness(call, member, answer)

    def _connection(self, member: Member) -> Connection:
        connection: Optional[Connection] = self._connections.get(member)
        if connection is None:
            self._refuse_if_closed()
            connection = self._connections[member] = Connection(member, self._settings)
        return connection

    # -- one request ---------------------------------------------------------------------------------------------

    async def _run(self, call: Call) -> Any:
        """Sends a request until it is answered, or there is nothing left to try."""
        attempts = await self._begin(call)
        # Of this event loop, whichever is the client's when the answer comes.
        regions, in_air, balancer = self._regions, self._in_air, attempts.balancer
        regions.place(call)
        answered = False
        try:
            while True:
                member = attempts.next()
                connection: Optional[Connection] = None
                sent = False
                error: Any
                try:
                    self._refuse_if_closed()
                    connection = self._connection(member)
                    await self._check(connection, attempts, member)
                    await self._introduce(regions, call, connection, attempts, member)
                    self._refuse_if_swamped(call, member)
                    left = attempts.remaining()
                    message = regions.message(call, member, left)
                    sent = True
                    response = await self._sent(message, left, call, connection, attempts, member, in_air)
                    answered = True
                    result = call.read(response)
                except (grpc.RpcError, ServerError) as failure:
                    error = failure.with_traceback(None)
                except asyncio.CancelledError:
                    balancer.ended(member)
                    if self._closed and not _is_cancelled():
                        # gRPC cancels the calls of a channel that is closed.
                        self._gave_up(call)
                        raise ValueError("the client is closed") from None
                    self._gave_up(call)
                    raise
                except BaseException as failure:
                    balancer.ended(member)
                    if self._closed and isinstance(failure, (ValueError, AttributeError)):
                        self._gave_up(call)
                        raise ValueError("the client is closed") from None
                    raise
                else:
                    self._succeeded(call, attempts, member)
                    if self._should_ask_version(call, member):
                        self._later(self._ask_version(connection, member))
                    return result
                if self._closed:
                    balancer.ended(member)
                    self._gave_up(call)
                    raise ValueError("the client is closed") from error
                if isinstance(error, grpc.RpcError):
                    if regions.forgotten(error, call, member):
                        balancer.answered(member)
                        continue
                    answered = error.code() in ANSWERS
                connected = connection is not None and connection.connected
                typed = self._failed(error, call, attempts, member, connected=connected, sent=sent)
                typed, pause = self._next(typed, call, attempts, member)
                if pause is None:
                    try:
                        raise typed from error
                    finally:
                        # What was sent, and the connection, live no longer than whoever catches it wants.
                        del typed, error
                del typed, error
                try:
                    await asyncio.sleep(pause)
                    await self._look_up(attempts.remaining())
                except asyncio.CancelledError:
                    self._gave_up(call)
                    raise
        finally:
            for gone in regions.release(call, answered=answered):
                self._later(self._unregister(gone))

    async def _sent(
        self,
        message: Any,
        left: float,
        call: Call,
        connection: Connection,
        attempts: Attempts,
        member: Member,
        in_air: set[Any],
    ) -> Any:
        """Sends a message; returns the response, for which it waits ``left`` seconds."""
        expiry = self._expiry(call, member, left)
        may_cancel = partial(self._may_cancel, call, member, connection)
        # What expires by itself is waited for a little longer, so that gRPC says why.
        patience = left if expiry > left else left + GRACE_S
        # No variable for gRPC's call: the traceback of whoever is cancelled would keep it, and its thread.
        sent = Sent(
            getattr(connection.stub, call.method)(message, timeout=expiry, metadata=call.metadata),
            connection,
            patience,
            may_cancel,
            in_air,
            attempts.balancer,
            member,
        )
        try:
            return await sent.response()
        except grpc.RpcError as error:
            if self._should_ask_readiness(error, call, attempts, member, connection):
                await self._ask_readiness(call, connection, member)
            raise

    async def _introduce(
        self, regions: Regions, call: Call, connection: Connection, attempts: Attempts, member: Member
    ) -> None:
        """As in the synchronous twin."""
        region = regions.unknown_to(call, member)
        if region is None:
            return
        metadata = self._settings.for_shared_memory(call.metadata)
        if regions.meets(member):
            self._later(self._clear_after_others(metadata, connection, member))
        stale = [left for left in self._stale if left.member.address == member.address]
        self._stale = [left for left in self._stale if left not in stale]
        for left in (*stale, *regions.left_at(member)):
            self._later(self._unregister(left._replace(member=member)))
        send = connection.stub.SystemSharedMemoryRegister
        regions.tells(member, region.name, metadata)
        try:
            await send(region.registration(), timeout=attempts.register_timeout(member), metadata=metadata)
        except grpc.RpcError as error:
            regions.heard(region, member, metadata, error)
        else:
            regions.heard(region, member, metadata, None)

    async def _unregister(self, left: Left) -> bool:
        """Tells a server that a region is gone; whether it has refused, because it still reads it."""
        try:
            send = self._connection(left.member).stub.SystemSharedMemoryUnregister
            await send(left.message(), timeout=UNREGISTER_S, metadata=left.metadata)
        except grpc.RpcError as error:  # a server that is gone has forgotten it
            return IN_USE in (error.details() or "").lower()
        except (ValueError, AttributeError):
            return False  # the client has been closed
        self._regions.removed(left)
        return False

    async def _end_connections(self) -> None:
        """Ends them all, and the waiting of those who have calls under way."""
        connections, self._connections = self._connections, {}
        for sent in list(self._in_air):
            sent.desert()
        await end(connections.values(), self._in_air)

    async def _unregister_all(self) -> None:
        """As in the synchronous twin."""
        lefts, until = [*self._stale, *self._regions.end()], time.monotonic() + UNREGISTER_S
        self._stale = []
        while lefts:
            refused = await asyncio.gather(*map(self._unregister, lefts))
            again = [left for left, one in zip(lefts, refused) if one]
            lefts = again if time.monotonic() < until else []
            if lefts:
                await asyncio.sleep(IN_USE_PAUSE_S)

    async def _clear_after_others(self, metadata: Metadata, connection: Connection, member: Member) -> None:
        """Tells a server of the regions that processes have left which are gone."""
        with suppress(grpc.RpcError):  # whatever it is, registering will say so
            status = await connection.stub.SystemSharedMemoryStatus(
                service_pb2.SystemSharedMemoryStatusRequest(), timeout=UNREGISTER_S, metadata=metadata
            )
            for name in left_over(list(status.regions)):
                await self._unregister(Left(name, member, metadata))

    def _later(self, work: Coroutine[Any, Any, object]) -> asyncio.Future[Any]:
        """Does something without waiting for it; the loop itself keeps no task alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _check(self, connection: Connection, attempts: Attempts, member: Member) -> None:
        """As in the synchronous twin."""
        if attempts.may_check(member):
            request = service_pb2.ServerLiveRequest()
            limit = attempts.check_timeout(member)
            try:
                await connection.stub.ServerLive(request, timeout=limit, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                if not reaches(error):
                    raise


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs this, as far as Python (from 3.11 on) says so."""
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)
    return cancelling is not None and cancelling() > 0
