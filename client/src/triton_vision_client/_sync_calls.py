"""How the synchronous client's requests reach the servers, and their answers its threads."""

from __future__ import annotations

import os
import threading
from concurrent import futures
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision_client import _protocol
from triton_vision_client._balancer import Member
from triton_vision_client._calls import NOT_REACHED, Attempts, Budget, Call
from triton_vision_client._client import PROBE_S, UNREGISTER_S, BaseClient, is_well
from triton_vision_client._flight import Flight
from triton_vision_client._names import LOOK_UP_S
from triton_vision_client._regions import Regions
from triton_vision_client._settings import Settings
from triton_vision_client._shm import left_over


class Connection:
    """One server's channel."""

    def __init__(self, member: Member, settings: Settings) -> None:
        options = _protocol.channel_options(member.address, member.authority)
        credentials = settings.credentials()
        self.channel = (
            grpc.insecure_channel(member.address, options=options)
            if credentials is None
            else grpc.secure_channel(member.address, credentials, options=options)
        )
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    @property
    def connected(self) -> bool:
        """Whether the connection is up; True where that cannot be known.

        The asyncio channel tells its state, this one only through ``subscribe``, whose polling thread races with
        ``close`` and raises in the background: so the state is read where that thread reads it.
        """
        check = getattr(getattr(self.channel, "_channel", None), "check_connectivity_state", None)
        return check is None or bool(check(False) == grpc.ChannelConnectivity.READY.value[0])


class SyncCalls(BaseClient):
    """Connections and waiting, for callers in threads."""

    # -- servers -------------------------------------------------------------------------------------------------

    def _look_up(self, timeout: float = LOOK_UP_S) -> None:
        """Has the addresses resolved if it is time to, and asks the ejected servers that are due."""
        if self._process != os.getpid():
            self._after_fork()
        first = self._names.look_up()
        if first is not None:
            with suppress(futures.TimeoutError):
                first.result(min(LOOK_UP_S, timeout / 2))
        for connection in self._retired():
            connection.channel.close()
        for member in self._balancer.due():
            self._probe(member)

    def _probe(self, member: Member) -> None:
        """Asks whether the model is ready there, without waiting for the answer."""

        def told(answer: Any) -> None:
            if answer.cancelled():
                well = False
            elif answer.exception() is not None:
                well = is_well(answer.exception())
            else:
                well = bool(answer.result().ready)
            self._balancer.probed(member, well)

        request = self._readiness()
        # Waits for the connection, which gRPC makes in the meantime.
        asked = self._connection(member).stub.ModelReady.future(
            request, timeout=PROBE_S, metadata=self._settings.metadata, wait_for_ready=True
        )
        asked.add_done_callback(told)

    def _connection(self, member: Member) -> Connection:
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            connection = self._connections.get(member)
            if connection is None:
                connection = self._connections[member] = Connection(member, self._settings)
            return connection

    def _after_fork(self) -> None:
        """A child gets connections of its own. The parent's stay untouched: closing them here would disturb it."""
        self._left_behind.append(self._connections)
        self._lock, self._connections, self._process = threading.RLock(), {}, os.getpid()
        self._left_behind.append(self._regions)
        self._regions = Regions()
        self._budget = Budget(self._settings.retry.budget, self._settings.retry.reserve)
        self._start_over()

    # -- one request ---------------------------------------------------------------------------------------------

    def _run(self, call: Call) -> Any:
        """Sends a request until it is answered, or there is nothing left to try."""
        return Flight(self, call, waits=True).land()

    def _check(self, connection: Connection, attempts: Attempts, member: Member) -> None:
        """A network that swallows packets must not cost the whole call, where another server might answer.

        Raises:
            grpc.RpcError: the server could not be reached in the time that is due to it.
        """
        if attempts.may_check(member) and not connection.connected:
            request = service_pb2.ServerLiveRequest()
            limit = attempts.connect_timeout()
            try:
                connection.stub.ServerLive(request, timeout=limit, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                if error.code() in NOT_REACHED:
                    raise

    def _introduce(self, call: Call, connection: Connection, attempts: Attempts, member: Member) -> None:
        """Tells the server of the region that holds the call's images, if there is one that it does not know."""
        region = self._regions.unknown_to(call, member)
        if region is None:
            return
        if member not in self._regions.told:
            self._clear_after_others(connection, member)
        for left in self._regions.left_at(member):
            self._unregister(left, member)
        send = connection.stub.SystemSharedMemoryRegister
        self._regions.tells(member, region.name)
        try:
            send(region.registration(), timeout=attempts.remaining(), metadata=call.metadata)
        except grpc.RpcError as error:
            self._regions.heard(region, member, error)
        else:
            self._regions.heard(region, member, None)

    def _clear_after_others(self, connection: Connection, member: Member) -> None:
        """Tells a server of the regions that processes have left which are gone."""
        try:
            request = service_pb2.SystemSharedMemoryStatusRequest()
            status = connection.stub.SystemSharedMemoryStatus(
                request, timeout=UNREGISTER_S, metadata=self._settings.metadata
            )
            for name in left_over(list(status.regions)):
                self._unregister(name, member).result()
        except grpc.RpcError:
            pass  # whatever it is, registering will say so

    def _free(self, call: Call, *, answered: bool) -> None:
        for name, member in self._regions.release(call, answered=answered):
            self._unregister(name, member)

    def _unregister(self, name: str, member: Member) -> Any:
        """Tells a server, without waiting, that a region is gone; it may refuse as long as it reads it."""

        def told(answer: Any) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self._regions.removed(name, member)

        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        send = self._connection(member).stub.SystemSharedMemoryUnregister.future
        asked = send(request, timeout=UNREGISTER_S, metadata=self._settings.metadata)
        asked.add_done_callback(told)
        return asked
