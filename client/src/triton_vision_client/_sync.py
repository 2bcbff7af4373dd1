"""The synchronous client."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """One server's connection."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        credentials = settings.credentials()
        self.channel = (
            grpc.insecure_channel(url, options=_protocol.channel_options(url))
            if credentials is None
            else grpc.secure_channel(url, credentials, options=_protocol.channel_options(url))
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


class ImageClient:
    """Classifies images on an image ensemble over gRPC. Safe to use from several threads.

    Args:
        url: ``HOST:PORT`` of the server's gRPC endpoint, or several of them: a server that cannot be reached is
            passed over for the next.
        model: the ensemble.
        tls: certificates for an encrypted connection; None connects in the clear.
        headers: sent with every call, such as ``{"authorization": "Bearer …"}``.
        timeout: seconds for a whole call, its retries included.
        retry: how a call that reached no server is tried again.

    Raises:
        ValueError: an argument cannot work.
        OSError: a certificate cannot be read.
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
        self._servers = [_Server(one, self._settings) for one in self._settings.urls]
        self._preferred = 0
        self._lock = threading.Lock()
        self._closed = False

    def classify(
        self,
        image: ImageSource,
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> Result:
        """Classifies one image.

        Args:
            image: a path, bytes of an encoded file, a binary file object, a PIL image or an HxWx3 uint8 RGB array.
            top_k: how many classes; None leaves it to the server (5).
            model: another ensemble than the client's.
            timeout: seconds, instead of the client's.

        Raises:
            BadImageError: the server refuses the image.
            VisionClientError: the call failed; see the tree of errors.
            RequestTooLargeError: it does not fit into one message.
            OSError: the path or file object cannot be read.
            TypeError, ValueError: this is nothing that can be an image, or an argument is wrong.
        """
        _protocol.check_top_k(top_k)
        content = encode(image)
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        model = model or self._settings.model
        response = self._infer(model, [content], top_k, False, timeout)
        return _protocol.parse_response(response, [image])[0]

    def classify_many(
        self,
        images: Iterable[ImageSource],
        *,
        top_k: Optional[int] = None,
        model: Optional[str] = None,
        timeout: Optional[float] = None,
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
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        return self._stream(pack(images), top_k, model or self._settings.model, timeout)

    def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        timeout = self._settings.timeout if timeout is None else check_timeout(timeout)
        request = service_pb2.ModelReadyRequest(name=model or self._settings.model)
        deadline = time.monotonic() + timeout
        for server in self._servers:
            left = max(0.001, deadline - time.monotonic())
            try:
                if server.stub.ModelReady(request, timeout=left, metadata=self._settings.metadata).ready:
                    return True
            except grpc.RpcError:
                continue
        return False

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if not self._closed:
            self._closed = True
            for server in self._servers:
                server.channel.close()

    def __enter__(self) -> ImageClient:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    # -- one request --------------------------------------------------------------------------------------------

    def _stream(self, batches: Iterator[Batch], top_k: Optional[int], model: str, timeout: float) -> Iterator[Result]:
        flying: deque[tuple[Batch, Optional[_Flight]]] = deque()
        try:
            for batch in batches:
                flight = _Flight(self, model, batch.images, top_k, timeout) if batch.images else None
                flying.append((batch, flight))
                if len(flying) == WINDOW:
                    yield from _land(*flying.popleft())
            while flying:
                yield from _land(*flying.popleft())
        finally:
            for _, flight in flying:  # the caller stopped early, or a request failed
                if flight is not None:
                    flight.cancel()

    def _infer(self, model: str, images: Sequence[bytes], top_k: Optional[int], mask: bool, timeout: float) -> Any:
        attempts = Attempts(self._settings, timeout, self._preferred)
        while True:
            call = self._start(attempts, model, images, top_k, mask)
            answer, pause = self._finish(call, attempts, model, timeout)
            if pause is None:
                return answer
            time.sleep(pause)

    def _start(self, attempts: Attempts, model: str, images: Sequence[bytes], top_k: Optional[int], mask: bool) -> Any:
        if self._closed:
            raise ValueError("the client is closed")
        for _ in self._servers[1:]:
            if self._connects(self._servers[attempts.server], attempts.connect_timeout()):
                break
            attempts.pass_over()
        left = attempts.remaining()
        request = _protocol.build_request(model, images, top_k, mask, left)
        server = self._servers[attempts.server]
        return server.stub.ModelInfer.future(request, timeout=left, metadata=self._settings.metadata)

    def _connects(self, server: _Server, timeout: float) -> bool:
        """Whether the server need not be passed over: a network that swallows packets must not cost the whole call."""
        if server.connected:
            return True
        try:
            server.stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=timeout, metadata=self._settings.metadata)
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    def _finish(self, call: Any, attempts: Attempts, model: str, timeout: float) -> tuple[Any, Optional[float]]:
        """The response and None, or anything and the pause before the next try; raises if there is none."""
        server = self._servers[attempts.server]
        try:
            response = call.result()
        except grpc.RpcError as error:
            details = error.details() or ""
            typed = _protocol.translate(
                error.code(), details, model=model, address=server.url, timeout=timeout, connected=server.connected
            )
            pause = attempts.pause_after(typed, details)
            if pause is None:
                raise typed from error
            return None, pause
        with self._lock:
            self._preferred = attempts.server
        return response, None


class _Flight:
    """A request of ``classify_many`` that is under way; tried again, if need be, when its turn comes."""

    def __init__(
        self, client: ImageClient, model: str, images: Sequence[bytes], top_k: Optional[int], timeout: float
    ) -> None:
        self._client, self._model, self._images, self._top_k, self._timeout = client, model, images, top_k, timeout
        self._attempts = Attempts(client._settings, timeout, client._preferred)
        self._call = client._start(self._attempts, model, images, top_k, True)

    def land(self) -> Any:
        while True:
            answer, pause = self._client._finish(self._call, self._attempts, self._model, self._timeout)
            if pause is None:
                return answer
            time.sleep(pause)
            self._call = self._client._start(self._attempts, self._model, self._images, self._top_k, True)

    def cancel(self) -> None:
        self._call.cancel()


def _land(batch: Batch, flight: Optional[_Flight]) -> Iterator[Result]:
    answers: list[Result] = []
    if flight is not None:
        answers = _protocol.parse_response(flight.land(), batch.travelling())
    yield from batch.merge(answers)
