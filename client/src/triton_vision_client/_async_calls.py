"""How the asyncio client's requests reach the servers, and their answers its event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Optional

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision_client import _protocol
from triton_vision_client._balancer import Member
from triton_vision_client._calls import ANSWERS, NOT_REACHED, Attempts, Budget, Call
from triton_vision_client._client import PROBE_S, UNREGISTER_S, BaseClient, is_well
from triton_vision_client._errors import ServerError
from triton_vision_client._names import LOOK_UP_S
from triton_vision_client._regions import Regions
from triton_vision_client._settings import Settings
from triton_vision_client._shm import left_over


class Connection:
    """One server's channel, made in the event loop that uses it."""

    def __init__(self, member: Member, settings: Settings) -> None:
        options = _protocol.channel_options(member.address, member.authority)
        credentials = settings.credentials()
        self.channel = (
            grpc.aio.insecure_channel(member.address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(member.address, credentials, options=options)
        )
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    @property
    def connected(self) -> bool:
        return bool(self.channel.get_state() == grpc.ChannelConnectivity.READY)

    def end(self) -> None:
        """Closes it without its loop, which is gone."""
        inner = getattr(self.channel, "_channel", None)
        if inner is not None:
            inner.close()


class AsyncCalls(BaseClient):
    """Connections and waiting, for callers in an event loop."""

    _loop: Optional[asyncio.AbstractEventLoop] = None

    # -- servers -------------------------------------------------------------------------------------------------

    async def _look_up(self, timeout: float = LOOK_UP_S) -> None:
        """Has the addresses resolved if it is time to, and asks the ejected servers that are due."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._process != os.getpid():
            self._leave_behind()
            self._loop, self._process, self._connections, self._regions = loop, os.getpid(), {}, Regions()
            self._tasks = set()
            self._start_over()
        first = self._names.look_up()
        if first is not None:
            ended = asyncio.wrap_future(first)
            try:
                await asyncio.wait({ended}, timeout=min(LOOK_UP_S, timeout / 2))
            finally:
                ended.cancel()
        for connection in self._retired():
            await connection.channel.close()
        for member in self._balancer.due():
            self._later(self._probe(member))

    def _leave_behind(self) -> None:
        """Gives up what belongs to another loop, or to a parent process."""
        if self._process == os.getpid() and self._loop is not None and self._loop.is_closed():
            for name, member in self._regions.end():
                self._stale.setdefault(member.address, set()).add(name)
            for connection in self._connections.values():
                connection.end()
        else:
            # Somebody may still use it: closing it here would disturb him.
            self._left_behind += [self._connections, self._regions]
            self._stale = {}
            self._budget = Budget(self._settings.retry.budget, self._settings.retry.reserve)

    async def _probe(self, member: Member) -> None:
        """Asks whether the model is ready there."""
        well = False
        try:
            answer = await self._connection(member).stub.ModelReady(
                self._readiness(), timeout=PROBE_S, metadata=self._settings.metadata, wait_for_ready=True
            )
            well = bool(answer.ready)
        except grpc.RpcError as error:
            well = is_well(error)
        except ValueError:
            pass  # the client has been closed
        finally:
            self._balancer.probed(member, well)

    def _connection(self, member: Member) -> Connection:
        if self._closed:
            raise ValueError("the client is closed")
        connection: Optional[Connection] = self._connections.get(member)
        if connection is None:
            connection = self._connections[member] = Connection(member, self._settings)
        return connection

    # -- one request ---------------------------------------------------------------------------------------------

    async def _run(self, call: Call) -> Any:
        """Sends a request until it is answered, or there is nothing left to try."""
        await self._look_up(call.timeout)
        attempts = self._attempts(call)
        self._regions.place(call)
        answered = False
        try:
            while True:
                member = attempts.next()
                connection: Optional[Connection] = None
                try:
                    connection = self._connection(member)
                    await self._check(connection, attempts, member)
                    await self._introduce(call, connection, attempts, member)
                    left = attempts.remaining()
                    message = self._regions.message(call, member, left)
                    send = getattr(connection.stub, call.method)
                    response = await send(message, timeout=left, metadata=call.metadata)
                except grpc.RpcError as error:
                    assert connection is not None
                    if self._regions.forgotten(error, call, member):
                        self._balancer.answered(member)
                        continue
                    answered = error.code() in ANSWERS
                    typed, pause = self._failed(error, call, attempts, member, connection.connected)
                    if pause is None:
                        raise typed from error
                except BaseException as error:
                    self._balancer.ended(member)
                    if self._closed and isinstance(error, (asyncio.CancelledError, ValueError)):
                        # gRPC cancels the calls of a channel that is closed.
                        raise ValueError("the client is closed") from None
                    raise
                else:
                    answered = True
                    self._succeeded(call, attempts, member)
                    if response is None:  # what gRPC makes of bytes that it cannot read
                        raise ServerError(f"{member.address}: its answer cannot be read")
                    return response
                await asyncio.sleep(pause)
                await self._look_up()
        finally:
            for name, member in self._regions.release(call, answered=answered):
                self._later(self._unregister(name, member))

    async def _introduce(self, call: Call, connection: Connection, attempts: Attempts, member: Member) -> None:
        """As in the synchronous twin."""
        region = self._regions.unknown_to(call, member)
        if region is None:
            return
        if member not in self._regions.told:
            await self._clear_after_others(connection, member)
        for left in (*self._stale.pop(member.address, ()), *self._regions.left_at(member)):
            self._later(self._unregister(left, member))
        send = connection.stub.SystemSharedMemoryRegister
        self._regions.tells(member, region.name)
        try:
            await send(region.registration(), timeout=attempts.remaining(), metadata=call.metadata)
        except grpc.RpcError as error:
            self._regions.heard(region, member, error)
        else:
            self._regions.heard(region, member, None)

    async def _unregister(self, name: str, member: Member) -> None:
        """Tells a server that a region is gone; it may refuse as long as it reads it."""
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        with suppress(grpc.RpcError):  # a server that is gone has forgotten it
            send = self._connection(member).stub.SystemSharedMemoryUnregister
            await send(request, timeout=UNREGISTER_S, metadata=self._settings.metadata)
            self._regions.removed(name, member)

    async def _clear_after_others(self, connection: Connection, member: Member) -> None:
        """Tells a server of the regions that processes have left which are gone."""
        request = service_pb2.SystemSharedMemoryStatusRequest()
        with suppress(grpc.RpcError):  # whatever it is, registering will say so
            status = await connection.stub.SystemSharedMemoryStatus(
                request, timeout=UNREGISTER_S, metadata=self._settings.metadata
            )
            for name in left_over(list(status.regions)):
                await self._unregister(name, member)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something without waiting for it; the loop itself keeps no task alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, connection: Connection, attempts: Attempts, member: Member) -> None:
        """As in the synchronous twin."""
        if attempts.may_check(member) and not connection.connected:
            request = service_pb2.ServerLiveRequest()
            limit = attempts.connect_timeout()
            try:
                await connection.stub.ServerLive(request, timeout=limit, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                if error.code() in NOT_REACHED:
                    raise
