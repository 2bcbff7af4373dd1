"""From what gRPC reports of a failed call to the error that says what to do."""

from __future__ import annotations

import re
from typing import Any, Optional

import grpc

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

TOO_LARGE = re.compile(r"larger than max|message.*too large|maximum message size")
# How gRPC itself begins its reports of a connection that ended in the middle of a call; a model's own words come later.
CONNECTION_LOST = re.compile(
    r"stream removed|(received )?rst_stream|rst stream|failed parsing http|connection reset|recvmsg|broken pipe"
    r"|socket closed|goaway|transport closed"
)
# With which Triton says that it has no such model.
MODEL_CODES = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
# What a server that has been reached never answers.
NOT_REACHED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
# What a server of this suite adds to a full queue's words.
EXPECTED_WAIT = re.compile(r"would take about (\d+(?:\.\d+)?) s\b")
# A stage's words for a request that one image spoils; each ensemble around it puts its own before them.
REFUSAL = re.compile(r"(?:in ensemble '.+?', )*image (\d+): (.+)", re.DOTALL)
# What Triton says to a request for classes where a model has other tensors.
NOT_OURS = re.compile(
    r"unexpected inference (input 'IMAGE'|output '(LABELS|CLASS_IDS|SCORES|STATUS)')|Got input\(s\) \['IMAGE'\]"
)
# What a model's failure may tell of the server's insides: where in its Python code it was, the names of its shared
# memory, paths.
PYTHON_TRACE = re.compile(r"\s*\bAt:\s*\n.*", re.DOTALL)
INSIDES = re.compile(r"/?triton_python_backend_shm_region_[\w-]+|(?<![\w/:.])/(?:[\w.+@~-]+/)+[\w.+@~-]*")


def translate(
    code: Any,
    details: str,
    *,
    model: str,
    address: str,
    timeout: float,
    connected: bool,
    unsent_for: Optional[float] = None,
    tls: bool = False,
) -> VisionClientError:
    """The typed error for a gRPC status.

    Args:
        code: a ``grpc.StatusCode``.
        details: the status's text.
        timeout: the call's, in seconds.
        connected: whether the connection had been up.
        unsent_for: for how many seconds the server had not answered a question that comes before the call; None if
            the call itself was sent.
        tls: whether the client encrypts.
    """
    code_is = grpc.StatusCode
    if code in (code_is.INTERNAL, code_is.UNKNOWN, code_is.INVALID_ARGUMENT, code_is.UNAVAILABLE):
        details = INSIDES.sub("…", PYTHON_TRACE.sub("", details))
    lower = details.lower()
    if "increase the shared memory pool size" in lower:
        full = ServerOverloadedError(
            f"the shared memory of {address} has no room for this request, or for those that it was batched with: send "
            "fewer or smaller images in a request, or give the server more /dev/shm (docker run --shm-size)"
        )
        full.no_room = True
        return full
    refusal = REFUSAL.match(details)
    if code == code_is.INVALID_ARGUMENT and refusal:
        return BadImageError.read(refusal[2], int(refusal[1]))
    if code == code_is.INVALID_ARGUMENT and NOT_OURS.search(details):
        return ServerError(f"model {model!r} at {address} does not classify images: name an image ensemble ({details})")
    if code in (code_is.UNAUTHENTICATED, code_is.PERMISSION_DENIED) or "protocol is restricted" in lower:
        return AuthenticationError(f"{address} refuses the call: check headers and token ({details})")
    if "http2 header with status: 413" in lower or "http2 header with status: 431" in lower:
        return RequestTooLargeError(f"a proxy at {address} refuses the message: send smaller images ({details})")
    if code == code_is.UNIMPLEMENTED and "http2 header" in lower:
        return _no_grpc(address, tls)
    if code == code_is.NOT_FOUND or ("unknown model" in lower and code in MODEL_CODES):
        return ModelNotFoundError(
            f"{address} serves no model {model!r}: see what it serves, or name another model ({details})"
        )
    if code == code_is.DEADLINE_EXCEEDED:
        if connected and unsent_for is None:
            # A proxy may have a limit of its own, and say so.
            own = f" ({details})" if details and lower != "deadline exceeded" else ""
            return DeadlineExceededError(
                f"{address} did not answer before the call's {timeout:g} s were over: allow more, or send less{own}"
            )
        seconds = timeout if unsent_for is None else unsent_for
        what = "no answer from" if connected else "no connection to"
        return ServerUnavailableError(f"{what} {address} within {seconds:.3g} s: check the address and the network")
    if code == code_is.UNAVAILABLE:
        return _unavailable(details, lower, model, address, tls)
    if code == code_is.INTERNAL and "is not healthy" in lower:
        return dead_model(model, address, details)
    if code == code_is.RESOURCE_EXHAUSTED:
        if TOO_LARGE.search(lower):
            return RequestTooLargeError(
                f"{address} refuses the message: send fewer or smaller images at once ({details})"
            )
        if "metadata" in lower:
            return ServerError(f"{address} refuses the headers: send fewer or shorter ones ({details})")
        return ServerOverloadedError(f"{address} takes no more calls: try again later, or send less ({details})")
    if code == code_is.UNIMPLEMENTED:
        return ServerError(f"{address} speaks gRPC, but is not a Triton server ({details})")
    if code in (code_is.UNKNOWN, code_is.INTERNAL, code_is.CANCELLED) and CONNECTION_LOST.match(lower):
        return ServerUnavailableError(f"the connection to {address} broke off: check the network ({details})")
    if "exception serializing request" in lower:
        return ServerError(f"the request could not be put together, or was interrupted ({details})")
    # Who else than the server, or a proxy, has cancelled it?
    suspect = code in (code_is.INTERNAL, code_is.UNKNOWN, code_is.DATA_LOSS, code_is.ABORTED, code_is.CANCELLED)
    advice = "; that server's log may say more" if suspect else ""
    error = ServerError(f"{address} answers: {details or code.name}{advice}")
    error.suspect = suspect
    return error


def dead_model(model: str, address: str, details: str) -> ServerUnavailableError:
    """The error of a model that will not answer any more."""
    dead = ServerUnavailableError(f"model {model!r} at {address} is broken; restart that server ({details})")
    dead.broken = True
    return dead


def is_refusal(error: Any) -> bool:
    """Whether a ``grpc.RpcError`` is the server's own No, rather than a server, a network or a proxy in trouble."""
    details = (error.details() or "").lower()
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "restricted" in details
    return error.code() in REFUSALS and not CONNECTION_LOST.match(details)


def reaches(error: Any) -> bool:
    """Whether an error shows that a server has been reached: also that it wants a token for such a question."""
    return error.code() not in NOT_REACHED or "restricted" in (error.details() or "").lower()


def _no_grpc(address: str, tls: bool) -> ServerUnavailableError:
    if tls:
        return ServerUnavailableError(
            f"{address} breaks off the encrypted connection: it may want the client's certificate, or another one (see "
            "tls=), encrypt nothing itself, or not be the server's gRPC port (8001 unless it was changed)"
        )
    return ServerUnavailableError(
        f"{address} accepts connections, but does not speak gRPC (it wants TLS, or is just starting): "
        "use the server's gRPC port (8001 unless it was changed)"
    )


def _unavailable(details: str, lower: str, model: str, address: str, tls: bool) -> VisionClientError:
    if "too many open files" in lower:
        return ServerUnavailableError(
            f"this process has too few file descriptors left to connect to {address}: raise its limit (ulimit -n), "
            "or close what it no longer needs, such as other clients"
        )
    if "exceeds maximum queue size" in lower or "queue size" in lower:
        full = ServerOverloadedError(f"the queue of {address} is full: try again later, or send less ({details})")
        expected = EXPECTED_WAIT.search(lower)
        full.wait = float(expected[1]) if expected else None
        return full
    if "timeout expired" in lower:
        late = ServerOverloadedError(f"the request waited too long in the queue of {address} ({details})")
        late.waited = True
        return late
    if "http2 header with status: 429" in lower:
        return ServerOverloadedError(f"a proxy at {address} takes no more calls: try again later ({details})")
    if "http2 header with status" in lower:
        return ServerUnavailableError(f"a proxy at {address} has no server that answers ({details})")
    if "server not ready" in lower:
        return ServerUnavailableError(f"{address} is not ready: it is starting or ending ({details})")
    if "not ready" in lower or "no available versions" in lower:
        return ModelNotFoundError(f"model {model!r} at {address} is not ready ({details})")
    if any(word in lower for word in ("ssl", "handshake", "certificate", "verification check failed")):
        return ServerUnavailableError(f"no secure connection to {address}: check its certificate and tls= ({details})")
    # Triton's HTTP and metrics ports close the connection at once; other HTTP servers answer in HTTP/1.
    if "http1" in lower or "settings frame" in lower or ("failed to connect" in lower and "socket closed" in lower):
        return _no_grpc(address, tls)
    return ServerUnavailableError(
        f"no server answers at {address}: is it running, and is the address right? ({details})"
    )


def may_retry(error: VisionClientError) -> bool:
    """Whether another try may help: nothing was reached, a model is broken or not there (yet), a queue was full, or
    the server itself failed.

    Never after a wait in a queue: the time is gone, and the next queue may be as long.
    """
    if isinstance(error, ServerOverloadedError):
        return not error.waited
    suspect = isinstance(error, ServerError) and error.suspect
    return suspect or isinstance(error, (ServerUnavailableError, ModelNotFoundError))
