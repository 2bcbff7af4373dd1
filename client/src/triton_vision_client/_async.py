"""The asyncio client, twin of the synchronous one."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    ANSWERS,
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
from triton_vision_client._errors import BadImageError, RequestTooLargeError, ServerError, VisionClientError
from triton_vision_client._images import ImageSource, encode
from triton_vision_client._results import ModelInfo, Result, ServerInfo
from triton_vision_client._settings import Settings, check_timeout, named_host
from triton_vision_client._shm import left_over


class _Connection:
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


class AsyncImageClient(BaseClient):
    """``ImageClient`` for asyncio: the same arguments, the same results, the same errors.

    One client may be used in several event loops one after the other; each gets connections of its own. ``fallback``
    may be a coroutine function. Cancelling a call cancels it on the server, between its steps.
    """

    _loop: Optional[asyncio.AbstractEventLoop] = None
    _resolving: asyncio.Lock

    async def classify(
        self,
        image: ImageSource,
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> Result:
        """As ``ImageClient.classify``."""
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
            response = await self._run(call)
        except VisionClientError as error:
            if not self._degrades(error):
                raise
            return (await self._degraded([image], error))[0]
        return _protocol.parse_response(response, [image])[0]

    async def classify_many(
        self,
        images: Iterable[ImageSource],
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> AsyncIterator[Result]:
        """As ``ImageClient.classify_many``: ``async for item in client.classify_many(images)``.

        The images are read in a thread of their own, so that a slow disk, or a slow generator, does not hold up the
        event loop.
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

        flying: deque[tuple[Batch, asyncio.Task[list[Result]]]] = deque()
        await self._look_up()
        most = window(len(self._balancer.members))
        loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(1, "images")
        try:
            failure: Optional[BaseException] = None
            batches = pack(images)
            while True:
                batch = await loop.run_in_executor(reader, next, batches, None)
                if batch is None:
                    break
                if isinstance(batch, BaseException):
                    failure = batch  # what has been sent is answered first
                    break
                flying.append((batch, asyncio.ensure_future(self._answers(batch, call_of))))
                if len(flying) >= most:
                    landed, task = flying.popleft()
                    for result in landed.merge(await task):
                        yield result
            while flying:
                landed, task = flying.popleft()
                for result in landed.merge(await task):
                    yield result
            if failure is not None:
                raise failure
        finally:
            reader.shutdown(wait=False)
            for _, task in flying:
                task.cancel()
            await asyncio.gather(*(task for _, task in flying), return_exceptions=True)

    async def infer(
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
        """As ``ImageClient.infer``."""
        call = self._inference(model, tensors, outputs, parameters, timeout, headers, traceparent)
        return _protocol.parse_tensors(await self._run(call))

    async def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        deadline = time.monotonic() + (self._settings.timeout if timeout is None else check_timeout(timeout))
        request = service_pb2.ModelReadyRequest(name=model or self._settings.model)
        await self._look_up()
        members = list(self._balancer.members)
        for number, member in enumerate(members):
            # One that is silent must not use up the others' time.
            left = max(0.001, (deadline - time.monotonic()) / (len(members) - number))
            try:
                stub = self._connection(member).stub
                answer = await stub.ModelReady(request, timeout=left, metadata=self._settings.metadata)
            except grpc.RpcError:
                continue
            if answer.ready:
                return True
        return False

    async def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """As ``ImageClient.server_info``."""
        call = self._question("ServerMetadata", service_pb2.ServerMetadataRequest(), timeout)
        return server_info(await self._run(call))

    async def models(self, *, timeout: Optional[float] = None) -> list[ModelInfo]:
        """As ``ImageClient.models``."""
        call = self._question("RepositoryIndex", service_pb2.RepositoryIndexRequest(), timeout)
        return model_infos(await self._run(call))

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        mine = self._loop is asyncio.get_running_loop() and self._process == os.getpid()
        if mine and not self._closed:
            gone = self._abandon_regions()
            await asyncio.gather(*(self._unregister(name, member) for name, member in gone))
            for member in self._balancer.members:
                for name in self._stale.pop(member.address, ()):
                    await self._unregister(name, member)
        self._closed = True
        connections, self._connections = self._connections, {}
        if mine:
            for connection in connections.values():
                await connection.channel.close()

    async def __aenter__(self) -> AsyncImageClient:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.close()

    # -- servers -------------------------------------------------------------------------------------------------

    async def _look_up(self, timeout: float = LOOK_UP_S) -> None:
        """Resolves the addresses if it is time to, and asks the ejected servers that are due."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._process != os.getpid():
            self._leave_behind()
            self._loop, self._process, self._connections, self._regions = loop, os.getpid(), {}, None
            self._resolving = asyncio.Lock()
            self._tasks = set()
            self._start_over()
        async with self._resolving:  # of several first calls, the others wait for what the first one finds
            if self._must_look_up():
                limit = min(LOOK_UP_S, timeout / 2)
                self._take(await asyncio.gather(*(self._resolve(url, limit) for url in self._settings.urls)))
            for member in self._retired():
                connection = self._connections.pop(member, None)
                if connection is not None:
                    await connection.channel.close()
        for member in self._balancer.due():
            self._later(self._probe(member))

    def _leave_behind(self) -> None:
        """Gives up what belongs to another loop, or to a parent process."""
        if self._process == os.getpid() and self._loop is not None and self._loop.is_closed():
            for member, names in self._told.items():
                self._stale.setdefault(member.address, set()).update(names)
            self._told = {}
            if self._regions is not None:
                self._regions.close()
            for connection in self._connections.values():
                connection.end()
        else:
            # Somebody may still use it: closing it here would disturb him.
            self._left_behind += [self._connections, self._regions]
            self._told, self._stale = {}, {}
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

    def _connection(self, member: Member) -> _Connection:
        if self._closed:
            raise ValueError("the client is closed")
        connection: Optional[_Connection] = self._connections.get(member)
        if connection is None:
            connection = self._connections[member] = _Connection(member, self._settings)
        return connection

    async def _resolve(self, url: str, timeout: float) -> list[Any]:
        named = named_host(url)
        if named is None:
            return []
        asked = asyncio.get_running_loop().getaddrinfo(*named, type=socket.SOCK_STREAM)
        try:
            return await asyncio.wait_for(asked, timeout)
        except (OSError, UnicodeError, asyncio.TimeoutError):
            return []

    # -- one request ---------------------------------------------------------------------------------------------

    async def _run(self, call: Call) -> Any:
        """Sends a request until it is answered, or there is nothing left to try."""
        await self._look_up(call.timeout)
        attempts = self._attempts(call)
        self._place(call)
        answered = False
        try:
            while True:
                member = attempts.next()
                connection: Optional[_Connection] = None
                try:
                    connection = self._connection(member)
                    await self._check(connection, attempts, member)
                    await self._introduce(call, connection, attempts, member)
                    left = attempts.remaining()
                    message = self._message(call, member, left)
                    send = getattr(connection.stub, call.method)
                    response = await send(message, timeout=left, metadata=call.metadata)
                except grpc.RpcError as error:
                    assert connection is not None
                    if self._knows_no_region(error, call, member):
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
            for name, member in self._release(call, answered):
                self._later(self._unregister(name, member))

    async def _introduce(self, call: Call, connection: _Connection, attempts: Attempts, member: Member) -> None:
        """As in the synchronous twin."""
        if not self._must_register(call, member):
            return
        assert call.region is not None
        name = call.region.name
        if member not in self._told:
            await self._clear_after_others(connection, member)
            for stale in self._stale.pop(member.address, ()):
                await self._unregister(stale, member)
        request = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=call.region.size)
        send = connection.stub.SystemSharedMemoryRegister
        # It may arrive even if its answer does not.
        self._told.setdefault(member, set()).add(name)
        try:
            await send(request, timeout=attempts.remaining(), metadata=call.metadata)
        except grpc.RpcError as error:
            self._registered(call, member, error)
        else:
            self._registered(call, member, None)

    async def _unregister(self, name: str, member: Member) -> None:
        """Tells a server that a region is gone; it may refuse as long as it reads it."""
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        with suppress(grpc.RpcError):  # a server that is gone has forgotten it
            send = self._connection(member).stub.SystemSharedMemoryUnregister
            await send(request, timeout=UNREGISTER_S, metadata=self._settings.metadata)
            self._told.get(member, set()).discard(name)

    async def _clear_after_others(self, connection: _Connection, member: Member) -> None:
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

    async def _check(self, connection: _Connection, attempts: Attempts, member: Member) -> None:
        """As in the synchronous twin."""
        if attempts.may_check(member) and not connection.connected:
            request = service_pb2.ServerLiveRequest()
            limit = attempts.connect_timeout()
            try:
                await connection.stub.ServerLive(request, timeout=limit, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                if error.code() in NOT_REACHED:
                    raise

    async def _answers(self, batch: Batch, call_of: Callable[[Batch], Call]) -> list[Result]:
        if not batch.images:
            return []
        try:
            return _protocol.parse_response(await self._run(call_of(batch)), batch.travelling())
        except RequestTooLargeError as error:
            # A server, or a proxy, with a low limit: one by one they may do.
            if len(batch.images) == 1:
                return [Result(batch.travelling()[0], error=BadImageError("too_large", str(error)))]
            answers = [await self._answers(single, call_of) for single in batch.singles()]
            return [result for row in answers for result in row]
        except VisionClientError as error:
            if not self._degrades(error):
                raise
            return await self._degraded(batch.travelling(), error)

    async def _degraded(self, sources: Sequence[Any], error: VisionClientError) -> list[Result]:
        assert self._settings.fallback is not None
        answers = []
        for source in sources:
            answer: Any = self._settings.fallback(source, error)
            answers.append(await answer if inspect.isawaitable(answer) else answer)
        return degraded(sources, answers)
