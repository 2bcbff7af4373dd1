"""The synchronous client."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Callable, Optional

import grpc
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision_client import _protocol
from triton_vision_client._balancer import Member
from triton_vision_client._batches import Batch, check_many, pack, window
from triton_vision_client._calls import Attempts, Budget
from triton_vision_client._client import (
    LOOK_UP_S,
    NOT_REACHED,
    PROBE_S,
    UNREGISTER_S,
    BaseClient,
    Call,
    Parameters,
    degraded,
    is_well,
    model_infos,
    server_info,
)
from triton_vision_client._errors import BadImageError, RequestTooLargeError, VisionClientError
from triton_vision_client._flight import Flight
from triton_vision_client._images import ImageSource, encode
from triton_vision_client._results import ModelInfo, Result, ServerInfo
from triton_vision_client._settings import Settings, check_timeout, named_host
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


class ImageClient(BaseClient):
    """Classifies images on an image ensemble over gRPC. Safe to use from several threads, and after a fork.

    Args:
        url: ``HOST:PORT`` of the server's gRPC endpoint, or several of them. A name that resolves to several addresses
            stands for as many servers. Each call goes to the one with the fewest under way; one that fails is left
            alone until it is well again, and its calls go to the others.
        model: the ensemble.
        tls: certificates for an encrypted connection; None connects in the clear.
        headers: sent with every call, such as ``{"authorization": "Bearer …"}``.
        timeout: seconds for a whole call, its retries included. The server is told what is left of it, and drops work
            that nobody waits for.
        retry: how a call that reached no server is tried again.
        fallback: answers instead of servers that cannot be reached, are overloaded or late: takes the image as given
            and the error, returns Predictions. Its results are marked ``degraded``.
        observer: is told of calls, retries and ejections; see ``PrometheusObserver``.
        transport: ``shm`` passes images through shared memory, for servers on this very host; where one refuses, they
            go over gRPC, and a log line says so.

    Raises:
        ValueError: an argument cannot work.
        OSError: a certificate cannot be read.
    """

    def classify(
        self,
        image: ImageSource,
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> Result:
        """Classifies one image.

        Args:
            image: a path, bytes of an encoded file, a binary file object, a PIL image or an HxWx3 uint8 RGB array.
            top_k: how many classes; None leaves it to the server (5).
            model: another ensemble than the client's.
            timeout: seconds, instead of the client's.
            headers: for this call, beside the client's.
            traceparent: the trace that the call belongs to (W3C Trace Context), passed on.

        Raises:
            BadImageError: the server refuses the image.
            VisionClientError: the call failed; see the tree of errors.
            RequestTooLargeError: it does not fit into one message.
            OSError: the path or file object cannot be read.
            TypeError, ValueError: this is nothing that can be an image, or an argument is wrong.
        """
        _protocol.check_top_k(top_k)
        call = self._classification(
            [encode(image)],
            top_k=top_k,
            mask=False,
            model=model,
            timeout=timeout,
            headers=headers,
            traceparent=traceparent,
        )
        try:
            response = self._run(call)
        except VisionClientError as error:
            if not self._degrades(error):
                raise
            return self._degraded([image], error)[0]
        return _protocol.parse_response(response, [image])[0]

    def classify_many(
        self,
        images: Iterable[ImageSource],
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> Iterator[Result]:
        """Classifies any number of images; yields one Result for each, in their order.

        The images are read as they are needed and travel in batches, several at once, so an endless iterable is
        fine. A bad image, or one that cannot be read, costs only itself: its Result has an ``error``.

        Args:
            images: as for ``classify``.
            timeout: seconds for each request, instead of the client's.

        Raises:
            VisionClientError: a request failed as a whole; the results so far have been yielded.
        """
        _protocol.check_top_k(top_k)
        check_many(images)

        def call_of(batch: Batch) -> Call:
            return self._classification(
                batch.images,
                top_k=top_k,
                mask=True,
                model=model,
                timeout=timeout,
                headers=headers,
                traceparent=traceparent,
            )

        call_of(Batch())  # what is wrong with the arguments is said here, not at the first result
        return self._stream(images, call_of)

    def infer(
        self,
        model: str,
        tensors: Mapping[str, Any],
        *,
        outputs: Sequence[str] = (),
        parameters: Optional[Parameters] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> dict[str, NDArray[Any]]:
        """Any model, any tensors.

        Args:
            tensors: name -> array, with the batch dimension if the model has one. Strings and bytes become BYTES.
            outputs: which ones; none means all.
            parameters: of the request, such as ``{"top_k": 3}``.

        Returns:
            Name -> array; BYTES as arrays of ``bytes`` objects.

        Raises:
            VisionClientError: the call failed; see the tree of errors.
            TypeError: an array's dtype, or a parameter's type, cannot be sent.
        """
        call = self._inference(model, tensors, outputs, parameters, timeout, headers, traceparent)
        return _protocol.parse_tensors(self._run(call))

    def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        deadline = time.monotonic() + (self._settings.timeout if timeout is None else check_timeout(timeout))
        request = service_pb2.ModelReadyRequest(name=model or self._settings.model)
        self._look_up()
        members = list(self._balancer.members)
        for number, member in enumerate(members):
            # One that is silent must not use up the others' time.
            left = max(0.001, (deadline - time.monotonic()) / (len(members) - number))
            try:
                stub = self._connection(member).stub
                if stub.ModelReady(request, timeout=left, metadata=self._settings.metadata).ready:
                    return True
            except grpc.RpcError:
                continue
        return False

    def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """Name, version and extensions of a server; raises VisionClientError if none answers."""
        return server_info(self._run(self._question("ServerMetadata", service_pb2.ServerMetadataRequest(), timeout)))

    def models(self, *, timeout: Optional[float] = None) -> list[ModelInfo]:
        """The models of a server's repository and their states; raises VisionClientError if none answers."""
        return model_infos(self._run(self._question("RepositoryIndex", service_pb2.RepositoryIndexRequest(), timeout)))

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        mine = self._process == os.getpid()
        if mine and not self._closed:
            asked = [self._unregister(name, member) for name, member in self._abandon_regions()]
            for one in asked:  # all at once: a server that hangs costs its time once
                with suppress(grpc.RpcError):  # one that is gone has forgotten them
                    one.result()
        self._closed = True
        with self._lock:
            connections, self._connections = self._connections, {}
        if mine:
            for connection in connections.values():
                connection.channel.close()

    def __enter__(self) -> ImageClient:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    # -- servers -------------------------------------------------------------------------------------------------

    def _look_up(self, timeout: float = LOOK_UP_S) -> None:
        """Resolves the addresses if it is time to, and asks the ejected servers that are due."""
        if self._process != os.getpid():
            self._after_fork()
        with self._looking_up:  # of several first calls, the others wait for what the first one finds
            if self._must_look_up():
                self._take(_resolve(self._settings.urls, min(LOOK_UP_S, timeout / 2)))
            for member in self._retired():
                with self._lock:
                    connection = self._connections.pop(member, None)
                if connection is not None:
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
        self._looking_up = threading.RLock()
        self._left_behind.append(self._regions)
        self._regions, self._told, self._stale = None, {}, {}
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
        if not self._must_register(call, member):
            return
        assert call.region is not None
        name = call.region.name
        if member not in self._told:
            self._clear_after_others(connection, member)
        request = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=call.region.size)
        send = connection.stub.SystemSharedMemoryRegister
        # It may arrive even if its answer does not.
        self._told.setdefault(member, set()).add(name)
        try:
            send(request, timeout=attempts.remaining(), metadata=call.metadata)
        except grpc.RpcError as error:
            self._registered(call, member, error)
        else:
            self._registered(call, member, None)

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
        for name, member in self._release(call, answered):
            self._unregister(name, member)

    def _unregister(self, name: str, member: Member) -> Any:
        """Tells a server, without waiting, that a region is gone; it may refuse as long as it reads it."""

        def told(answer: Any) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self._told.get(member, set()).discard(name)

        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        send = self._connection(member).stub.SystemSharedMemoryUnregister.future
        asked = send(request, timeout=UNREGISTER_S, metadata=self._settings.metadata)
        asked.add_done_callback(told)
        return asked

    def _stream(self, images: Iterable[ImageSource], call_of: Callable[[Batch], Call]) -> Iterator[Result]:
        flying: deque[tuple[Batch, Optional[Flight]]] = deque()
        self._look_up()
        most = window(len(self._balancer.members))
        try:
            failure: Optional[BaseException] = None
            for batch in pack(images):
                if isinstance(batch, BaseException):
                    failure = batch  # what has been sent is answered first
                    break
                flying.append((batch, Flight(self, call_of(batch)) if batch.images else None))
                if len(flying) >= most:
                    yield from self._land(*flying.popleft(), call_of)
            while flying:
                yield from self._land(*flying.popleft(), call_of)
            if failure is not None:
                raise failure
        finally:
            for _, flight in flying:  # the caller stopped early, or a request failed
                if flight is not None:
                    flight.cancel()

    def _land(self, batch: Batch, flight: Optional[Flight], call_of: Callable[[Batch], Call]) -> Iterator[Result]:
        answers: list[Result] = []
        if flight is not None:
            try:
                answers = _protocol.parse_response(flight.land(), batch.travelling())
            except RequestTooLargeError as error:
                answers = self._one_by_one(batch, call_of, error)
            except VisionClientError as error:
                if not self._degrades(error):
                    raise
                answers = self._degraded(batch.travelling(), error)
        yield from batch.merge(answers)

    def _one_by_one(self, batch: Batch, call_of: Callable[[Batch], Call], error: RequestTooLargeError) -> list[Result]:
        """The answers to a batch that was too large for a message, from a server or a proxy with a low limit."""
        if len(batch.images) == 1:
            return [Result(batch.travelling()[0], error=BadImageError("too_large", str(error)))]
        answers: list[Result] = []
        for single in batch.singles():
            answers += self._land(single, Flight(self, call_of(single)), call_of)
        return answers

    def _degraded(self, sources: Sequence[Any], error: VisionClientError) -> list[Result]:
        assert self._settings.fallback is not None
        return degraded(sources, [self._settings.fallback(source, error) for source in sources])


def _resolve(urls: Sequence[str], timeout: float) -> list[list[Any]]:
    """The resolver's answers for names; nothing for another address, or where there is none in time."""
    named = [named_host(url) for url in urls]
    answers: list[list[Any]] = [[] for _ in urls]
    if not any(named):
        return answers

    def ask() -> None:
        for row, host_and_port in enumerate(named):
            if host_and_port is not None:
                with suppress(OSError, UnicodeError):
                    answers[row] = socket.getaddrinfo(*host_and_port, type=socket.SOCK_STREAM)

    # The resolver has no timeout of its own.
    thread = threading.Thread(target=ask, name="look-up", daemon=True)
    thread.start()
    thread.join(timeout)
    return list(answers)
