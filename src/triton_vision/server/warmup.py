"""Sending one real image through an ensemble, so that a server counts as ready only when it answers."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from triton_vision.probe import photo_for, verdict
from triton_vision.server.errors import ModelLoadError
from triton_vision.server.index import plain_reason

# The HTTP status that Triton would answer; what is not here is a failure of the server's own.
HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.ALREADY_EXISTS: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
}
# For so long a photo that is turned away is sent again, and after such pauses. Callers may be faster for longer than
# that, and a server that comes up under load must not end because of it.
INSIST_S, PAUSE_S = 10.0, 0.05


def classify_once(
    address: str,
    ensemble: str,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Sends a photo through an ensemble; a refusal of the photo is an answer, too.

    Args:
        address: ``HOST:PORT`` of the gRPC endpoint.
        timeout: seconds for all of it.
        headers: sent with the call, such as the token that opens inference.
        folder: the ensemble's directory, whose ``probe.jpg`` replaces the package's photo; None takes the package's.

    Raises:
        ModelLoadError: the ensemble did not answer, with its reason.
    """
    metadata = tuple((headers or {}).items())
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    image = service_pb2.ModelInferRequest.InferInputTensor(name="IMAGE", datatype="BYTES", shape=[1, 1])
    with grpc.insecure_channel(address, options=options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(photo: bytes, seconds: float) -> tuple[int, str]:
            content = struct.pack("<I", len(photo)) + photo
            request = service_pb2.ModelInferRequest(model_name=ensemble, inputs=[image], raw_input_contents=[content])
            try:
                stub.ModelInfer(request, timeout=seconds, metadata=metadata)
            except grpc.RpcError as error:
                return HTTP_STATUS.get(error.code(), 500), plain_reason(error.details() or error.code().name)
            return 200, ""

        insist(ensemble, ask, timeout, folder)


def insist(
    ensemble: str, ask: Callable[[bytes, float], tuple[int, str]], timeout: float, folder: Path | None = None
) -> None:
    """Sends the ensemble's photo; for some seconds again where a queue is full of others' work, which then is left.

    Args:
        ask: sends a photo, with so many seconds for the answer; returns the HTTP status and the error's message.
        timeout, folder: as for ``classify_once``.

    Raises:
        ModelLoadError: as ``classify_once``.
    """
    try:
        photo = photo_for(folder)
    except OSError as error:
        raise ModelLoadError({ensemble: f"{error.filename} cannot be read: {error.strerror}"}) from None
    began = time.monotonic()
    while True:
        status, message = ask(photo, max(0.1, began + timeout - time.monotonic()))
        found = verdict(status, message)
        if found in ("closed", "broken"):
            raise ModelLoadError({ensemble: message or f"HTTP {status}"}, "does not answer a photo")
        if found != "busy" or time.monotonic() - began > min(INSIST_S, timeout):
            return
        time.sleep(PAUSE_S)
