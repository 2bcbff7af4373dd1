"""Requests, responses and errors on the wire (KServe's inference protocol v2 over gRPC), without any I/O."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, Optional

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from triton_vision_client._errors import (
    AuthenticationError,
    BadImageError,
    DeadlineExceededError,
    ModelNotFoundError,
    RequestTooLargeError,
    ServerError,
    ServerOverloadedError,
    ServerUnavailableError,
    VisionClientError,
)
from triton_vision_client._results import Prediction, Result

OUTPUTS = ("LABELS", "CLASS_IDS", "SCORES", "STATUS")
# How many images a request may carry: the ensembles' max_batch_size.
MAX_BATCH = 32
LOOPBACK = re.compile(
    r"(dns:/*|ipv[46]:/*)?(localhost|127\.[\d.]+|\[::1\]|\[0:0:0:0:0:0:0:1\])(:|$)|unix:", re.IGNORECASE
)
REFUSAL = re.compile(r"image (\d+): ([a-z_]+): (.*)", re.DOTALL)


def channel_options(url: str) -> list[tuple[str, int]]:
    """gRPC's options for a connection to ``url``."""
    # No limit of our own: protobuf's (2 GiB) and the server's hold.
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    if LOOPBACK.match(url):
        # A proxy of the environment is there for other hosts, whether or not no_proxy says so.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def build_request(model: str, images: Sequence[bytes], top_k: Optional[int], mask: bool, timeout: float) -> Any:
    """A ``ModelInferRequest`` of encoded images.

    Args:
        top_k: how many classes; None leaves it to the server.
        mask: whether a bad image is to cost only itself.
        timeout: seconds, after which the server may drop what it has not begun.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="IMAGE", datatype="BYTES", shape=[len(images), 1])
    for name in OUTPUTS:
        request.outputs.add(name=name)
    if top_k is not None:
        request.parameters["top_k"].int64_param = top_k
    if mask:
        request.parameters["on_bad_image"].string_param = "mask"
    request.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
    request.raw_input_contents.append(
        b"".join(part for image in images for part in (struct.pack("<I", len(image)), image))
    )
    return request


def check_top_k(top_k: Optional[int]) -> None:
    """Raises TypeError or ValueError for what the server would refuse anyway."""
    if top_k is not None and type(top_k) is not int:
        raise TypeError(f"top_k must be an integer, not {type(top_k).__name__}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")


def parse_response(response: Any, sources: Sequence[Any]) -> list[Result]:
    """One Result for each source, in order.

    Raises:
        ServerError: the response is not an answer to that many images.
    """
    raw = {output.name: content for output, content in zip(response.outputs, response.raw_output_contents)}
    shapes = {output.name: tuple(output.shape) for output in response.outputs}
    count = len(sources)
    try:
        k = shapes["SCORES"][1]
        ids = np.frombuffer(raw["CLASS_IDS"], np.int32).reshape(count, k).tolist()
        scores = np.frombuffer(raw["SCORES"], np.float32).reshape(count, k).tolist()
        labels = _strings(raw["LABELS"], count * k)
        status = _strings(raw["STATUS"], count)
    except (KeyError, IndexError, ValueError, struct.error):
        raise ServerError(f"model {response.model_name!r} did not answer as an image ensemble does") from None
    results = []
    for row, source in enumerate(sources):
        if status[row]:
            results.append(Result(source, error=_refusal(status[row], row)))
        else:
            names = labels[row * k : row * k + k]
            results.append(Result(source, tuple(map(Prediction, names, ids[row], scores[row]))))
    return results


def _strings(raw: bytes, count: int) -> list[str]:
    """A BYTES tensor: each element its length in four bytes, little endian, then its bytes."""
    strings, at = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at)
        strings.append(raw[at + 4 : at + 4 + length].decode("utf-8", "replace"))
        at += 4 + length
    return strings


def _refusal(status: str, index: Optional[int]) -> BadImageError:
    reason, _, detail = status.partition(": ")
    return BadImageError(reason, detail, index)


def translate(
    code: Any, details: str, *, model: str, address: str, timeout: float, connected: bool
) -> VisionClientError:
    """The typed error for a gRPC status.

    Args:
        code: a ``grpc.StatusCode``.
        details: the status's text.
        connected: whether the connection had been up.
    """
    code_is = grpc.StatusCode
    lower = details.lower()
    refusal = REFUSAL.search(details)
    if code == code_is.INVALID_ARGUMENT and refusal:
        return BadImageError(refusal[2], refusal[3], int(refusal[1]))
    if code in (code_is.UNAUTHENTICATED, code_is.PERMISSION_DENIED) or "protocol is restricted" in lower:
        return AuthenticationError(f"{address} refuses the call: check headers and token ({details})")
    if "unknown model" in lower or code == code_is.NOT_FOUND:
        return ModelNotFoundError(
            f"{address} serves no model {model!r}: see what it serves, or name another model ({details})"
        )
    if code == code_is.DEADLINE_EXCEEDED:
        if connected:
            return DeadlineExceededError(f"{address} did not answer within {timeout:g} s")
        return ServerUnavailableError(
            f"no connection to {address} within {timeout:g} s: check the address and the network"
        )
    if code == code_is.UNAVAILABLE:
        return _unavailable(details, lower, model, address)
    if code == code_is.INTERNAL and "is not healthy" in lower:
        return ServerUnavailableError(f"model {model!r} at {address} is broken; restart that server ({details})")
    if code == code_is.RESOURCE_EXHAUSTED:
        return RequestTooLargeError(f"{address} refuses the message: send fewer or smaller images at once ({details})")
    if code == code_is.UNIMPLEMENTED:
        return ServerError(f"{address} speaks gRPC, but is no Triton server ({details})")
    return ServerError(f"{address}: {details or code.name}")


def _unavailable(details: str, lower: str, model: str, address: str) -> VisionClientError:
    if "exceeds maximum queue size" in lower or "queue size" in lower:
        return ServerOverloadedError(f"the queue of {address} is full: try again later, or send less ({details})")
    if "timeout expired" in lower or "request timeout" in lower:
        return ServerOverloadedError(f"the request waited too long in the queue of {address} ({details})")
    # Triton's HTTP and metrics ports close the connection at once; other HTTP servers answer in HTTP/1.
    if "http1" in lower or "settings frame" in lower or ("failed to connect" in lower and "socket closed" in lower):
        return ServerUnavailableError(
            f"{address} accepts connections, but does not speak gRPC (or wants TLS): "
            "use the server's gRPC port (8001 unless it was changed)"
        )
    if "not ready" in lower or "no available versions" in lower:
        return ModelNotFoundError(f"model {model!r} at {address} is not ready ({details})")
    if "ssl" in lower or "handshake" in lower or "certificate" in lower:
        return ServerUnavailableError(f"no secure connection to {address}: check its certificate and tls= ({details})")
    return ServerUnavailableError(
        f"no server answers at {address}: is it running, and is the address right? ({details})"
    )


def may_retry(error: VisionClientError, details: str) -> bool:
    """Whether another try may help: nothing was reached, or a queue was full; never after a wait in a queue."""
    if isinstance(error, ServerOverloadedError):
        return "timeout" not in details.lower()
    return isinstance(error, ServerUnavailableError)
