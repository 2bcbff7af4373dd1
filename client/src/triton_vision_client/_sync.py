"""The synchronous client."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Callable, Optional, TypeVar, Union

import grpc
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triton_vision_client._batches import Batch, check_many, pack, splits, window
from triton_vision_client._calls import Call
from triton_vision_client._client import Parameters
from triton_vision_client._errors import (
    AuthenticationError,
    BadImageError,
    RequestTooLargeError,
    VisionClientError,
)
from triton_vision_client._flight import GRACE_S, Flight
from triton_vision_client._images import ImageSource, encode
from triton_vision_client._observe import Observer
from triton_vision_client._options import RetryPolicy, TLSConfig
from triton_vision_client._protocol import says_yes, server_info
from triton_vision_client._results import ModelInfo, Result, ServerInfo, degraded
from triton_vision_client._settings import Settings, SyncFallback, check_model, check_timeout
from triton_vision_client._sync_calls import SyncCalls, end, linger

Self = TypeVar("Self", bound="ImageClient")


class ImageClient(SyncCalls):
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
        shm_token: what such a server wants for that (``serve``'s ``--shm-token-file``); sent with no other call. Also
            taken from ``headers``, under ``triton-grpc-protocol-shm``.

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
        timeout: float = 30.0,
        retry: Optional[RetryPolicy] = None,
        fallback: Optional[SyncFallback] = None,
        observer: Optional[Observer] = None,
        transport: str = "grpc",
        shm_token: Optional[str] = None,
    ) -> None:
        super().__init__(
            Settings.of(url, model, tls, headers, timeout, retry, fallback, observer, transport, shm_token)
        )

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
        call = self._classification(
            [encode(image)],
            [image],
            top_k=top_k,
            mask=False,
            model=model,
            timeout=timeout,
            headers=headers,
            traceparent=traceparent,
        )
        try:
            results: list[Result] = self._run(call)
        except VisionClientError as error:
            if not self._degrades(error):
                raise
            results = self._degraded([image], error)
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
    ) -> Generator[Result, None, None]:
        """Classifies any number of images; yields one Result for each, in their order.

        The images are read as they are needed and travel in batches, several at once, so an endless iterable is
        fine. A bad image, or one that cannot be read, costs only itself: its Result has an ``error``.

        Args:
            images: as for ``classify``.
            timeout: seconds for each request, instead of the client's.

        Raises:
            VisionClientError: a request failed as a whole; the results so far have been yielded.
        """
        check_many(images)
        call_of = self._batch_calls(top_k, model, timeout, headers, traceparent)
        return self._stream(images, call_of, self._settings.timeout if timeout is None else timeout)

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
            tensors: name -> array, with the batch dimension if the model has one. Strings and bytes become BYTES, and
                arrays of ``ml_dtypes.bfloat16`` BF16.
            outputs: which ones; none means all.
            parameters: of the request, such as ``{"top_k": 3}``.

        Returns:
            Name -> array; BYTES as arrays of ``bytes`` objects, BF16 as float32.

        Raises:
            VisionClientError: the call failed; see the tree of errors.
            TypeError: an array's dtype, or a parameter's type, cannot be sent.
        """
        tensors_out: dict[str, NDArray[Any]] = self._run(
            self._inference(model, tensors, outputs, parameters, timeout, headers, traceparent)
        )
        return tensors_out

    def ready(self, *, model: Optional[str] = None, timeout: Optional[float] = None) -> bool:
        """Whether a server answers and has the model ready; False, not an error, if not."""
        seconds = self._settings.timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + seconds
        request = service_pb2.ModelReadyRequest(name=self._settings.model if model is None else check_model(model))
        self._refuse_if_closed()
        self._look_up(seconds)
        # All at once: one that is silent must not use up the others' time.
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = []
        for member in list(self._balancer.members):
            left = max(0.001, deadline - time.monotonic())
            try:
                send = self._connection(member).stub.ModelReady.future
            except grpc.RpcError:  # no connection is possible
                continue
            asked.append(send(request, timeout=left, metadata=self._settings.metadata))
            asked[-1].add_done_callback(answers.put)
        try:
            return any(_says_yes(answers.get(timeout=seconds + GRACE_S)) for _ in asked)
        except queue.Empty:
            return False
        finally:
            for one in asked:
                one.cancel()

    def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """Name, version and extensions of a server; raises VisionClientError if none answers."""
        question = service_pb2.ServerMetadataRequest()
        info: ServerInfo = self._run(self._question("ServerMetadata", question, server_info, timeout))
        return info

    def models(self, *, timeout: Optional[float] = None) -> list[ModelInfo]:
        """The models of a server's repository and their states; raises VisionClientError if none answers.

        A server that shows its repository only to those with its admin token names the models that are loaded.
        """
        infos: list[ModelInfo]
        try:
            infos = self._run(self._index(timeout))
        except AuthenticationError:
            infos = self._run(self._statistics(timeout))
        return infos

    def close(self) -> None:
        """Closes the connections; calls under way end with a ValueError. Idempotent.

        A server that may not survive cancelled calls gets the time to answer those that it has: 2 s, or up to 10 s
        while it answers some; and then, in the background, 5 s more. Whoever waits for them gets the answer.
        """
        with self._ending:
            with self._lock:
                already, self._closed = self._closed, True
            if not already:
                self._end_lost()
                for pause in self._last_calls():
                    time.sleep(pause)
                self._unregister_all()
            with self._lock:
                connections = [*self._connections.values(), *self._left_behind]
                self._connections, self._left_behind = {}, []
                busy = {flight.connection for flight in list(self._in_air) if not flight.may_cancel()}
            end([connection for connection in connections if connection not in busy])
            linger([connection for connection in connections if connection in busy], self._in_air)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    # -- many images ---------------------------------------------------------------------------------------------

    def _stream(
        self, images: Iterable[ImageSource], call_of: Callable[[Batch], Call], timeout: float
    ) -> Generator[Result, None, None]:
        flying: deque[tuple[Batch, Optional[Flight]]] = deque()
        self._look_up(timeout)
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
                answers = flight.land()
            except RequestTooLargeError as error:
                answers = self._one_by_one(batch, call_of, error)
            except VisionClientError as error:
                if splits(error, batch):
                    answers = self._one_by_one(batch, call_of, error)
                elif self._degrades(error):
                    answers = self._degraded(batch.travelling(), error)
                else:
                    raise
        yield from batch.merge(answers)

    def _one_by_one(self, batch: Batch, call_of: Callable[[Batch], Call], error: VisionClientError) -> list[Result]:
        """The answers to a batch that was too large: for a message, or for the server's shared memory."""
        if len(batch.images) == 1:
            return [Result(batch.travelling()[0], error=BadImageError("too_large", str(error)))]
        answers: list[Result] = []
        for single in batch.singles():
            answers += self._land(single, Flight(self, call_of(single)), call_of)
        return answers

    def _degraded(self, sources: Sequence[Any], error: VisionClientError) -> list[Result]:
        assert self._settings.fallback is not None
        answers = [self._settings.fallback(source, error) for source in sources]
        return degraded(sources, answers, error)


def _says_yes(answer: Any) -> bool:
    return not answer.cancelled() and answer.exception() is None and says_yes(answer.result())
