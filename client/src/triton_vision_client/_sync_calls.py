"""How the synchronous client's requests reach the servers, and their answers its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any, Callable

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision_client._balancer import Member
from triton_vision_client._calls import Attempts, Call, Metadata
from triton_vision_client._client import (
    CLOSE_S,
    IN_USE_PAUSE_S,
    LAST_CALLS_PAUSE_S,
    LINGER_S,
    PROBE_S,
    READY_S,
    UNREGISTER_S,
    BaseClient,
)
from triton_vision_client._flight import GRACE_S, Flight
from triton_vision_client._protocol import says_yes
from triton_vision_client._regions import IN_USE, Left
from triton_vision_client._settings import Settings
from triton_vision_client._shm import left_over
from triton_vision_client._translate import reaches


class Connection:
    """One server's channel."""

    def __init__(self, member: Member, settings: Settings) -> None:
        self.channel = settings.channel(grpc, member)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    @property
    def connected(self) -> bool:
        """Whether the connection is up; True where that cannot be known.

        The asyncio channel tells its state, this one only through ``subscribe``, whose polling thread races with
        ``close`` and raises in the background: so the state is read where that thread reads it.
        """
        check = getattr(getattr(self.channel, "_channel", None), "check_connectivity_state", None)
        try:
            return check is None or bool(check(False) == grpc.ChannelConnectivity.READY.value[0])
        except ValueError:  # it has been closed
            return False


class SyncCalls(BaseClient):
    """Connections and waiting, for callers in threads."""

    # -- servers -------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> Attempts:
        """Starts a call's clock, and sees to the servers; the first calls wait until their names are resolved."""
        attempts = self._attempts(call)
        try:
            self._look_up(attempts.remaining())
        except BaseException:
            self._gave_up(call)
            raise
        return attempts

    def _look_up(self, timeout: float) -> None:
        """Has the addresses resolved if it is time to, and asks the ejected servers that are due."""
        if self._balancer.any_ejected():
            self._names.suspect()
        first = self._names.look_up()
        if first is not None:
            ended, limit = first
            with suppress(futures.TimeoutError):
                ended.result(min(limit, timeout / 2))
        end(self._retired())
        self._end_lost()
        if self._left_behind and not self._in_air:
            with self._lock:
                struck, self._left_behind = self._left_behind, []
            end(struck, wait=0)
        due = self._balancer.due()
        while due:
            member = due.pop()
            try:
                self._probe(member)
            except BaseException:
                self._give_up(member, self._connections.get(member))
                for one in (member, *due):
                    self._balancer.probed(one, False)
                raise

    def _end_lost(self) -> None:
        for flight in list(self._in_air):
            flight.end_if_lost()

    def _probe(self, member: Member) -> None:
        """Asks whether a server is well again, without waiting for the answer."""

        def told(answer: Any) -> None:
            well = False
            try:
                if not answer.cancelled():
                    error = answer.exception()
                    well = says_yes(answer.result()) if error is None else reaches(error)
            finally:
                self._balancer.probed(member, well)

        method, request = self._readiness(member)
        try:
            connection = self._connection(member)
        except grpc.RpcError:
            self._balancer.probed(member, False)
            return
        # Waits for the connection, which gRPC makes in the meantime.
        asked = getattr(connection.stub, method).future(
            request, timeout=PROBE_S, metadata=self._settings.metadata, wait_for_ready=True
        )
        asked.add_done_callback(told)

    def _connection(self, member: Member) -> Connection:
        with self._lock:
            connection = self._connections.get(member)
            if connection is None:
                self._refuse_if_closed()
                connection = self._connections[member] = Connection(member, self._settings)
            return connection

    def _give_up(self, member: Member, connection: Any) -> None:
        """Uses a connection no more for new calls. Those under way keep it."""
        with self._lock:
            known = self._connections.get(member)
            if known is not None and known is connection:
                del self._connections[member]
                self._left_behind.append(known)

    def _ask_version(self, connection: Connection, member: Member) -> None:
        """Asks, without waiting for it, what the server says about itself."""

        def told(answer: Any) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self._heard_version(member, answer.result())

        try:
            request = service_pb2.ServerMetadataRequest()
            asked = connection.stub.ServerMetadata.future(request, timeout=PROBE_S, metadata=self._settings.metadata)
            asked.add_done_callback(told)
        except ValueError:
            pass  # the client has been closed
        except BaseException:
            self._give_up(member, connection)
            raise

    def _ask_readiness(self, call: Call, connection: Connection, member: Member) -> None:
        """Asks whether a late call's model is ready."""
        request = service_pb2.ModelReadyRequest(name=call.model)
        with suppress(grpc.RpcError, ValueError):  # the client may be closed meanwhile
            answer = connection.stub.ModelReady(request, timeout=READY_S, metadata=call.metadata)
            self._heard_readiness(call, member, answer)

    # -- one request ---------------------------------------------------------------------------------------------

    def _run(self, call: Call) -> Any:
        """Sends a request until it is answered, or there is nothing left to try."""
        return Flight(self, call, waits=True).land()

    def _check(self, connection: Connection, attempts: Attempts, member: Member) -> None:
        """A network that swallows packets must not cost the whole call, where another server might answer.

        Raises:
            grpc.RpcError: the server could not be reached in the time that is due to it.
        """
        if attempts.may_check(member):
            request = service_pb2.ServerLiveRequest()
            limit = attempts.check_timeout(member)
            try:
                connection.stub.ServerLive(request, timeout=limit, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                if not reaches(error):
                    raise

    def _introduce(self, call: Call, connection: Connection, attempts: Attempts, member: Member) -> None:
        """Tells the server of the region that holds the call's images, if there is one that it does not know."""
        region = self._regions.unknown_to(call, member)
        if region is None:
            return
        metadata = self._settings.for_shared_memory(call.metadata)
        if self._regions.meets(member):
            self._clear_after_others(metadata, connection, member)
        for left in self._regions.left_at(member):
            self._unregister(left)
        send = connection.stub.SystemSharedMemoryRegister
        self._regions.tells(member, region.name, metadata)
        try:
            send(region.registration(), timeout=attempts.register_timeout(member), metadata=metadata)
        except grpc.RpcError as error:
            self._regions.heard(region, member, metadata, error)
        else:
            self._regions.heard(region, member, metadata, None)

    def _clear_after_others(self, metadata: Metadata, connection: Connection, member: Member) -> None:
        """Tells a server, without waiting, of the regions that processes have left which are gone."""

        def told(answer: Any) -> None:
            # Whatever is wrong, registering will say so.
            if not answer.cancelled() and answer.exception() is None and not self._closed:
                for name in left_over(list(answer.result().regions)):
                    self._unregister(Left(name, member, metadata))

        asked = connection.stub.SystemSharedMemoryStatus.future(
            service_pb2.SystemSharedMemoryStatusRequest(), timeout=UNREGISTER_S, metadata=metadata
        )
        asked.add_done_callback(told)

    def _free(self, call: Call, *, answered: bool) -> None:
        for left in self._regions.release(call, answered=answered):
            # The client may have been closed, which has told the server; or no connection is possible.
            with suppress(ValueError, grpc.RpcError):
                self._unregister(left)

    def _unregister(self, left: Left) -> Any:
        """Tells a server, without waiting, that a region is gone; it refuses as long as it reads it."""

        def told(answer: Any) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self._regions.removed(left)

        connection = self._connection(left.member)
        send = connection.stub.SystemSharedMemoryUnregister.future
        try:
            asked = send(left.message(), timeout=UNREGISTER_S, metadata=left.metadata)
            asked.add_done_callback(told)
        except BaseException:
            self._give_up(left.member, connection)
            raise
        return asked

    def _unregister_all(self) -> None:
        """At the end: waits until the servers know, and asks those again that are still reading."""
        lefts, until = self._regions.end(), time.monotonic() + UNREGISTER_S
        while lefts:
            # All at once: a server that hangs costs its time once.
            asked = [(left, self._unregister(left)) for left in lefts if left.member in self._connections]
            refused = []
            for left, one in asked:
                try:
                    one.result(UNREGISTER_S + GRACE_S)
                except grpc.FutureTimeoutError:
                    pass  # gRPC has lost it
                except grpc.RpcError as error:  # one that is gone has forgotten them
                    if IN_USE in (error.details() or "").lower():
                        refused.append(left)
            lefts = refused if time.monotonic() < until else []
            if lefts:
                time.sleep(IN_USE_PAUSE_S)


def linger(connections: Sequence[Connection], in_air: set[Flight]) -> None:
    """Closes connections in the background, once none of these calls is under way on one, or after LINGER_S."""
    until = time.monotonic() + LINGER_S

    def idle() -> bool:
        busy = {flight.connection for flight in list(in_air)}
        return busy.isdisjoint(connections) or time.monotonic() > until

    end(connections, wait=0, when=idle)


def end(connections: Sequence[Connection], wait: float = CLOSE_S, when: Callable[[], bool] = lambda: True) -> None:
    """Closes connections in a thread; for those that gRPC cannot end, waits no longer than so many seconds.

    Args:
        when: begins once this is so.
    """

    def close() -> None:
        while not when():
            time.sleep(LAST_CALLS_PAUSE_S)
        for connection in connections:
            connection.channel.close()

    if not connections:
        return
    thread = threading.Thread(target=close, name="close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and with it the connections
        return
    thread.join(wait)
