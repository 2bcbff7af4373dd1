"""The asyncio client, twin of the synchronous one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional, Union

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision_client import _protocol
from triton_vision_client._core import DEFAULT_TIMEOUT_S, WINDOW, Attempts, Batch, Settings, check_timeout, pack
from triton_vision_client._images import ImageSource, encode
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._results import Result


class _Server:
    """One server's connection, made in the event loop that uses it."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        credentials = settings.credentials()
        self.channel = (
            grpc.aio.insecure_channel(url, options=_protocol.channel_options(url))
            if credentials is None
            else grpc.aio.secure_channel(url, credentials, options=_protocol.channel_options(url))
        )
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    @property
    def connected(self) -> bool:
        return bool(self.channel.get_state() == grpc.ChannelConnectivity.READY)


class AsyncImageClient:
    """``ImageClient`` for asyncio: the same arguments, the same results, the same errors.

    One client may be used in several event loops one after the other; each gets connections of its own.
    """

    def __init__(
        self,
        url: Union[str, Sequence[str]] = "localhost:8001",
        *,
        model: str = "ensemble",
        tls: Optional[TLSConfig] = None,
        headers: Optional[Mapping[str, str]] = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retry: Optional[RetryPolicy] = None,
    ) -> None:
        self._settings = Settings.of(url, model, tls, headers, timeout, retry)
        self._settings.credentials()  # an unreadable certificate is the constructor's error, as in the twin
        self._servers: list[_Server] = []
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._preferred = 0
        self._closed = False

    async def classify(
        self,
        image: ImageSource,
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> Result:
        """As ``ImageClient.classify``. Cancelling it cancels the call on the server between its steps."""
        _protocol.check_top_k(top_k)
        content = encode(image)
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        response = await self._infer(model or self._settings.model, [content], top_k, False, timeout)
        return _protocol.parse_response(response, [image])[0]

    async def classify_many(
        self,
        images: Iterable[ImageSource],
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> AsyncIterator[Result]:
        """As ``ImageClient.classify_many``: ``async for item in client.classify_many(images)``."""
        _protocol.check_top_k(top_k)
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        model = model or self._settings.model
        flying: deque[tuple[Batch, asyncio.Task[Any]]] = deque()
        try:
            for batch in pack(images):
                flying.append((batch, asyncio.ensure_future(self._infer(model, batch.images, top_k, True, timeout))))
                if len(flying) == WINDOW:
                    for result in await _land(*flying.popleft()):
                        yield result
            while flying:
                for result in await _land(*flying.popleft()):
                    yield result
        finally:
            for _, task in flying:
                task.cancel()
            await asyncio.gather(*(task for _, task in flying), return_exceptions=True)

    async def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        request = service_pb2.ModelReadyRequest(name=model or self._settings.model)
        deadline = time.monotonic() + timeout
        for server in self._connections():
            left = max(0.001, deadline - time.monotonic())
            try:
                answer = await server.stub.ModelReady(request, timeout=left, metadata=self._settings.metadata)
            except grpc.RpcError:
                continue
            if answer.ready:
                return True
        return False

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._closed = True
        servers, self._servers = self._servers, []
        if self._loop is asyncio.get_running_loop():
            for server in servers:
                await server.channel.close()

    async def __aenter__(self) -> AsyncImageClient:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.close()

    def _connections(self) -> list[_Server]:
        if self._closed:
            raise ValueError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._servers = [_Server(url, self._settings) for url in self._settings.urls]
        return self._servers

    async def _connects(self, server: _Server, timeout: float) -> bool:
        """Whether the server need not be passed over: a network that swallows packets must not cost the whole call."""
        if server.connected:
            return True
        request = service_pb2.ServerLiveRequest()
        try:
            await server.stub.ServerLive(request, timeout=timeout, metadata=self._settings.metadata)
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    async def _infer(
        self, model: str, images: Sequence[bytes], top_k: Optional[int], mask: bool, timeout: float
    ) -> Any:
        if not images:  # a batch of nothing but unreadable sources
            return None
        attempts = Attempts(self._settings, timeout, self._preferred)
        while True:
            servers = self._connections()
            for _ in servers[1:]:
                if await self._connects(servers[attempts.server], attempts.connect_timeout()):
                    break
                attempts.pass_over()
            server = servers[attempts.server]
            left = attempts.remaining()
            request = _protocol.build_request(model, images, top_k, mask, left)
            try:
                response = await server.stub.ModelInfer(request, timeout=left, metadata=self._settings.metadata)
            except grpc.RpcError as error:
                details = error.details() or ""
                typed = _protocol.translate(
                    error.code(), details, model=model, address=server.url, timeout=timeout, connected=server.connected
                )
                pause = attempts.pause_after(typed, details)
                if pause is None:
                    raise typed from error
                await asyncio.sleep(pause)
            else:
                self._preferred = attempts.server
                return response


async def _land(batch: Batch, task: asyncio.Task[Any]) -> list[Result]:
    response = await task
    answers = _protocol.parse_response(response, batch.travelling()) if response is not None else []
    return list(batch.merge(answers))
