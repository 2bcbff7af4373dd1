"""Requests, responses and errors on the wire (KServe's inference protocol v2 over gRPC), without any I/O."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triton_vision_client._errors import (
    BadImageError,
    ServerError,
)
from triton_vision_client._results import ModelInfo, Prediction, Result, ServerInfo

# Triton's datatypes (its model configuration documentation) and numpy's.
NUMPY_TYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{sign}INT{bits}": np.dtype(f"{sign.lower()}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
DATATYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}
# numpy has none of its own; the package ml_dtypes, and those that use it, call theirs so.
BFLOAT16 = "bfloat16"
OUTPUT_TYPES = {"LABELS": "BYTES", "CLASS_IDS": "INT32", "SCORES": "FP32", "STATUS": "BYTES"}
OUTPUTS = tuple(OUTPUT_TYPES)
# How many images a request may carry: the ensembles' max_batch_size.
MAX_BATCH = 32
LOOPBACK = re.compile(
    r"(dns:/*|ipv[46]:/*)?(localhost|127\.[\d.]+|\[::1\]|\[0:0:0:0:0:0:0:1\])(:|$)|unix:", re.IGNORECASE
)


# A connection on which nothing has come for so long is asked whether it is alive, while a call waits for its answer.
# Triton's defaults take that: gRPC sends two pings at most without data of its own in between, and a server closes a
# connection only at the third that comes too soon.
KEEPALIVE_S = 5
# How long the answer may take: on a slow line it waits behind an image, yet of a call's default timeout there shall be
# something left for another server.
ANSWER_S = 15
# How soon a server that is back is found, in milliseconds; gRPC's own default waits up to two minutes.
FIRST_RECONNECT_MS, LAST_RECONNECT_MS, CONNECT_MS = 100, 1000, 3000


def channel_options(url: str, authority: Optional[str] = None) -> list[tuple[str, Union[int, str]]]:
    """gRPC's options for a connection to ``url``, whose certificate holds the name ``authority``."""
    # No limit of our own: protobuf's (2 GiB) and the server's hold.
    options: list[tuple[str, Union[int, str]]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", ANSWER_S * 1000),
        # gRPC also pings to measure bandwidth, and while one such ping is unanswered, none of the others is sent.
        ("grpc.http2.ping_timeout_ms", ANSWER_S * 1000),
        ("grpc.http2.max_pings_without_data", 2),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LAST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        # Clients of one process that talk to the same server must not share what happens to one's connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if authority is not None:
        options += [("grpc.ssl_target_name_override", authority), ("grpc.default_authority", authority)]
    if LOOPBACK.match(url):
        # A proxy of the environment is there for other hosts, whether or not no_proxy says so.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def build_request(
    model: str,
    images: Sequence[bytes],
    top_k: Optional[int],
    mask: bool,
    timeout: float,
    region: Optional[tuple[str, int]] = None,
) -> Any:
    """A ``ModelInferRequest`` of encoded images.

    Args:
        region: the name of the shared-memory region that holds the images, and how many bytes they take there; None
            sends them in the message.
        top_k: how many classes; None leaves it to the server.
        mask: whether a bad image is to cost only itself.
        timeout: seconds, after which the server may drop what it has not begun.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    given = request.inputs.add(name="IMAGE", datatype="BYTES", shape=[len(images), 1])
    for name in OUTPUTS:
        request.outputs.add(name=name)
    if top_k is not None:
        request.parameters["top_k"].int64_param = top_k
    if mask:
        request.parameters["on_bad_image"].string_param = "mask"
    request.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
    if region is None:
        request.raw_input_contents.append(
            b"".join(part for image in images for part in (struct.pack("<I", len(image)), image))
        )
    else:
        given.parameters["shared_memory_region"].string_param = region[0]
        given.parameters["shared_memory_byte_size"].int64_param = region[1]
    return request


def parameters_of(request: Any, parameters: Mapping[str, Union[bool, int, float, str]]) -> None:
    """Adds request parameters.

    Raises:
        TypeError: a value is not a bool, int, float or str.
        ValueError: an integer takes more than 64 bits.
    """
    for key, value in parameters.items():
        if isinstance(value, (bool, np.bool_)):
            request.parameters[key].bool_param = bool(value)
        elif isinstance(value, (int, np.integer)):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"parameter {key!r} must be an integer of 64 bits, not {value}")
            request.parameters[key].int64_param = int(value)
        elif isinstance(value, (float, np.floating)):
            request.parameters[key].double_param = float(value)
        elif isinstance(value, str):
            request.parameters[key].string_param = value
        else:
            raise TypeError(f"parameter {key!r} must be a bool, an int, a float or a str, not {type(value).__name__}")


def build_tensors(
    model: str,
    tensors: Mapping[str, Any],
    outputs: Sequence[str],
    parameters: Mapping[str, Union[bool, int, float, str]],
    version: str = "",
) -> Any:
    """A ``ModelInferRequest`` of any tensors.

    Raises:
        TypeError: an array's dtype has no Triton datatype, or a parameter's type none of its own.
    """
    if isinstance(outputs, str):
        raise TypeError(f"outputs are several names, such as [{outputs!r}], not one")
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for name, value in tensors.items():
        array = _as_array(value)
        datatype, content = _pack(name, array)
        request.inputs.add(name=name, datatype=datatype, shape=list(array.shape))
        request.raw_input_contents.append(content)
    for name in outputs:
        request.outputs.add(name=name)
    parameters_of(request, parameters)
    return request


def _as_array(value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    array = np.asarray(value)
    # numpy's own bytes and text end at their last character that is not NUL.
    return np.array(value, np.object_) if array.dtype.kind in "SU" else array


def _pack(name: str, array: NDArray[Any]) -> tuple[str, bytes]:
    if array.dtype.kind in "OSU":
        parts = []
        for item in array.ravel():
            if isinstance(item, str):
                content = item.encode()
            elif isinstance(item, (bytes, bytearray, memoryview)):
                content = bytes(item)
            else:
                raise TypeError(f"tensor {name!r}: an element is a {type(item).__name__}, not bytes or text")
            parts += [struct.pack("<I", len(content)), content]
        return "BYTES", b"".join(parts)
    if array.dtype.name == BFLOAT16:
        return "BF16", np.ascontiguousarray(array).tobytes()
    datatype = DATATYPES.get(array.dtype.newbyteorder("="))
    if datatype is None:
        raise TypeError(f"tensor {name!r}: {array.dtype} has no Triton datatype")
    return datatype, np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def whole(response: Any) -> Any:
    """The response itself; raises ServerError for what gRPC's asyncio side makes of bytes that it cannot read, None."""
    if response is None:
        raise _unreadable("the answer cannot be read")
    return response


def says_yes(response: Any) -> bool:
    """Whether the answer to a question about readiness is yes; an empty one, a broken proxy's, is not."""
    return response is not None and bool(response.ready)


def server_info(response: Any) -> ServerInfo:
    """From the protocol's ServerMetadata; raises ServerError if it cannot be read."""
    whole(response)
    return ServerInfo(response.name, response.version, tuple(response.extensions))


def model_infos(response: Any) -> list[ModelInfo]:
    """From the protocol's RepositoryIndex; raises ServerError if it cannot be read."""
    whole(response)
    return [ModelInfo(entry.name, entry.version, entry.state, entry.reason) for entry in response.models]


def loaded_models(response: Any) -> list[ModelInfo]:
    """From the protocol's ModelStatistics, which lists what is loaded; raises ServerError if it cannot be read."""
    whole(response)
    return [ModelInfo(entry.name, entry.version, "READY") for entry in response.model_stats]


def _unreadable(text: str) -> ServerError:
    """Another server may do better."""
    error = ServerError(text)
    error.suspect = True
    return error


def parse_tensors(response: Any) -> dict[str, NDArray[Any]]:
    """The response's tensors by name; BYTES as arrays of ``bytes`` objects, BF16 as float32.

    Raises:
        ServerError: the response is not whole.
    """
    tensors: dict[str, NDArray[Any]] = {}
    if len(whole(response).outputs) != len(response.raw_output_contents):
        raise _unreadable(
            f"model {response.model_name!r} answers {len(response.outputs)} tensors with the contents of "
            f"{len(response.raw_output_contents)}"
        )
    for output, content in zip(response.outputs, response.raw_output_contents):
        shape = tuple(output.shape)
        try:
            if output.datatype == "BYTES":
                flat = np.array(_elements(content, int(np.prod(shape))), np.object_)
            elif output.datatype == "BF16":
                # The upper half of an FP32.
                flat = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                flat = np.frombuffer(content, NUMPY_TYPES[output.datatype]).copy()
            tensors[output.name] = flat.reshape(shape)
        except (KeyError, ValueError, struct.error):
            raise _unreadable(f"tensor {output.name!r} ({output.datatype}, {list(shape)}) cannot be read") from None
    return tensors


def check_top_k(top_k: Any) -> Optional[int]:
    """The number itself; raises TypeError or ValueError for what the server would refuse anyway."""
    if top_k is None:
        return None
    if isinstance(top_k, (bool, np.bool_)) or not isinstance(top_k, (int, np.integer)):
        raise TypeError(f"top_k must be an integer, not {type(top_k).__name__}")
    if not 1 <= top_k < 2**31:
        raise ValueError(f"top_k must be at least 1 and no larger than the number of classes, not {top_k}")
    return int(top_k)


def parse_response(response: Any, sources: Sequence[Any]) -> list[Result]:
    """One Result for each source, in order.

    Raises:
        ServerError: the response is not an answer to that many images.
    """
    raw = {output.name: content for output, content in zip(whole(response).outputs, response.raw_output_contents)}
    shapes = {output.name: tuple(output.shape) for output in response.outputs}
    types = {output.name: output.datatype for output in response.outputs}
    count = len(sources)
    try:
        if any(types[name] != datatype for name, datatype in OUTPUT_TYPES.items()):
            raise ValueError("other datatypes")
        k = shapes["SCORES"][1]
        ids = np.frombuffer(raw["CLASS_IDS"], np.int32).reshape(count, k).tolist()
        scores = np.frombuffer(raw["SCORES"], np.float32).reshape(count, k).tolist()
        labels = _strings(raw["LABELS"], count * k)
        status = _strings(raw["STATUS"], count)
    except (KeyError, IndexError, ValueError, struct.error):
        raise _unreadable(f"model {response.model_name!r} did not answer as an image ensemble does") from None
    results = []
    for row, source in enumerate(sources):
        if status[row]:
            results.append(Result(source, error=BadImageError.read(status[row], row)))
        else:
            names = labels[row * k : row * k + k]
            results.append(Result(source, tuple(map(Prediction, names, ids[row], scores[row]))))
    return results


def _strings(raw: bytes, count: int) -> list[str]:
    return [element.decode("utf-8", "replace") for element in _elements(raw, count)]


def _elements(raw: bytes, count: int) -> list[bytes]:
    """A BYTES tensor: each element its length in four bytes, little endian, then its bytes."""
    elements, at = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", raw, at)
        elements.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(raw):
        raise ValueError("the elements do not fill the tensor")
    return elements
