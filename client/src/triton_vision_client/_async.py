"""The asyncio client, twin of the synchronous one."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Callable, Optional, TypeVar, Union

import grpc
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triton_vision_client._async_calls import AsyncCalls
from triton_vision_client._balancer import Member
from triton_vision_client._batches import Batch, check_many, pack, splits, window
from triton_vision_client._calls import Call
from triton_vision_client._client import Parameters
from triton_vision_client._errors import (
    AuthenticationError,
    BadImageError,
    RequestTooLargeError,
    VisionClientError,
)
from triton_vision_client._images import ImageSource, encode
from triton_vision_client._observe import Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._protocol import says_yes, server_info
from triton_vision_client._reader import Reader
from triton_vision_client._results import ModelInfo, Result, ServerInfo, degraded
from triton_vision_client._settings import Fallback, Settings, check_model, check_timeout

Self = TypeVar("Self", bound="AsyncImageClient")


class AsyncImageClient(AsyncCalls):
    """``ImageClient`` for asyncio: the same arguments, the same results, the same errors.

    One client may be used in several event loops one after the other; each gets connections of its own. ``fallback``
    may be a coroutine function. Cancelling a call cancels it on the server, between its steps.
    """

    _end: Optional[asyncio.Future[None]] = None

    def __init__(
        self,
        url: Union[str, Sequence[str]] = "localhost:8001",
        *,
        model: str = "ensemble",
        tls: Optional[TLSConfig] = None,
        headers: Optional[Mapping[str, str]] = None,
        timeout: float = 30.0,
        retry: Optional[RetryPolicy] = None,
        fallback: Optional[Fallback] = None,
        observer: Optional[Observer] = None,
        transport: str = "grpc",
        shm_token: Optional[str] = None,
    ) -> None:
        super().__init__(
            Settings.of(url, model, tls, headers, timeout, retry, fallback, observer, transport, shm_token)
        )

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
        # Reading a file or packing an array takes milliseconds that belong to the loop's other callers.
        content = encode(image) if isinstance(image, bytes) else await asyncio.to_thread(encode, image)
        call = self._classification(
            [content],
            [image],
            top_k=top_k,
            mask=False,
            model=model,
            timeout=timeout,
            headers=headers,
            traceparent=traceparent,
        )
        try:
            results: list[Result] = await self._run(call)
        except VisionClientError as error:
            if not self._degrades(error):
                raise
            results = await self._degraded([image], error)
        return results[0]

    def classify_many(
        self,
        images: Iterable[ImageSource],
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
        headers: Optional[Mapping[str, str]] = None,
        traceparent: Optional[str] = None,
    ) -> AsyncGenerator[Result, None]:
        """As ``ImageClient.classify_many``: ``async for item in client.classify_many(images)``.

        The images are read in a thread of their own, so that a slow disk, or a slow generator, does not hold up the
        event loop.
        """
        check_many(images)
        call_of = self._batch_calls(top_k, model, timeout, headers, traceparent)
        return self._stream(images, call_of, self._settings.timeout if timeout is None else timeout)

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
        tensors_out: dict[str, NDArray[Any]] = await self._run(call)
        return tensors_out

    async def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        seconds = self._settings.timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + seconds
        request = service_pb2.ModelReadyRequest(name=self._settings.model if model is None else check_model(model))
        self._refuse_if_closed()
        await self._settle_in()
        await self._look_up(seconds)

        async def ask(member: Member) -> bool:
            left = max(0.001, deadline - time.monotonic())
            try:
                stub = self._connection(member).stub
                answer = await stub.ModelReady(request, timeout=left, metadata=self._settings.metadata)
            except (grpc.RpcError, asyncio.CancelledError, ValueError):  # the client, too, may be closed meanwhile
                return False
            return says_yes(answer)

        # All at once: one that is silent must not use up the others' time.
        asked = [asyncio.ensure_future(ask(member)) for member in self._balancer.members]
        try:
            for one in asyncio.as_completed(asked):
                if await one:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """As ``ImageClient.server_info``."""
        question = service_pb2.ServerMetadataRequest()
        info: ServerInfo = await self._run(self._question("ServerMetadata", question, server_info, timeout))
        return info

    async def models(self, *, timeout: Optional[float] = None) -> list[ModelInfo]:
        """As ``ImageClient.models``."""
        infos: list[ModelInfo]
        try:
            infos = await self._run(self._index(timeout))
        except AuthenticationError:
            infos = await self._run(self._statistics(timeout))
        return infos

    async def close(self) -> None:
        """As ``ImageClient.close``; calls under way that a server must not lose end with a ValueError all the same."""
        if self._loop is None:
            self._closed = True  # there is nothing to end
            return
        while self._end is not None and not self._end.done() and self._end.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._end})  # somebody else's
        self._end = asyncio.get_running_loop().create_future()
        try:
            await self._close()
        finally:
            self._end.set_result(None)

    async def _close(self) -> None:
        # Whoever has been cancelled before shall hear of that, and not of this.
        for _ in range(2):
            await asyncio.sleep(0)
        try:
            if not self._closed:
                await self._settle_in()
                await self._end_others(lambda other: not other.is_running())
                for left in self._stale:
                    with suppress(grpc.RpcError):  # no connection is possible
                        self._connection(left.member)
                self._closed = True
                for pause in self._last_calls():
                    await asyncio.sleep(pause)
                await self._unregister_all()
        finally:
            self._closed = True
            await self._end_connections()
            # Ended by that; what they hold is let go of here, and not whenever the loop comes to it.
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.close()

    # -- many images ---------------------------------------------------------------------------------------------

    async def _stream(
        self, images: Iterable[ImageSource], call_of: Callable[[Batch], Call], timeout: float
    ) -> AsyncGenerator[Result, None]:
        flying: deque[tuple[Batch, asyncio.Task[list[Result]]]] = deque()
        await self._settle_in()
        await self._look_up(timeout)
        most = window(len(self._balancer.members))
        reader = Reader(pack(images))
        try:
            failure: Optional[BaseException] = None
            while True:
                batch = await reader.next()
                if batch is None:
                    break
                if isinstance(batch, BaseException):
                    failure = batch  # what has been sent is answered first
                    break
                flying.append((batch, _started(self._answers(batch, call_of))))
                if len(flying) >= most:
                    for result in await _landed(flying):
                        yield result
            while flying:
                for result in await _landed(flying):
                    yield result
            if failure is not None:
                raise failure
        finally:
            reader.end()
            for _, task in flying:
                task.cancel()
            await asyncio.gather(*(task for _, task in flying), return_exceptions=True)

    async def _answers(self, batch: Batch, call_of: Callable[[Batch], Call]) -> list[Result]:
        if not batch.images:
            return []
        try:
            results: list[Result] = await self._run(call_of(batch))
            return results
        except RequestTooLargeError as error:
            # A server, or a proxy, with a low limit: one by one they may do.
            if len(batch.images) == 1:
                return [Result(batch.travelling()[0], error=BadImageError("too_large", str(error)))]
            return await self._one_by_one(batch, call_of)
        except VisionClientError as error:
            if splits(error, batch):
                return await self._one_by_one(batch, call_of)
            if not self._degrades(error):
                raise
            return await self._degraded(batch.travelling(), error)

    async def _one_by_one(self, batch: Batch, call_of: Callable[[Batch], Call]) -> list[Result]:
        answers = [await self._answers(single, call_of) for single in batch.singles()]
        return [result for row in answers for result in row]

    async def _degraded(self, sources: Sequence[Any], error: VisionClientError) -> list[Result]:
        assert self._settings.fallback is not None
        answers = []
        for source in sources:
            answer: Any = self._settings.fallback(source, error)
            answers.append(await answer if inspect.isawaitable(answer) else answer)
        return degraded(sources, answers, error)


async def _landed(flying: deque[tuple[Batch, asyncio.Task[list[Result]]]]) -> list[Result]:
    """The results of the request that was sent first."""
    batch, task = flying.popleft()
    try:
        return list(batch.merge(await task))
    finally:
        del task  # which holds its error, whose traceback holds this


def _started(work: Coroutine[Any, Any, list[Result]]) -> asyncio.Task[list[Result]]:
    task = asyncio.ensure_future(work)
    # Of a stream that nobody reads to its end, asyncio need not complain.
    task.add_done_callback(lambda one: one.cancelled() or one.exception())
    return task
