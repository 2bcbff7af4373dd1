"""Any tensors there and back, and answers that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton_vision_client import (
    ImageClient,
    ServerError,
)
from tritonclient.grpc import service_pb2

from tests.unit.client.scripted import Start, answer


def echo(request: Any, context: Any) -> Any:  # noqa: ARG001
    """The inputs as outputs of the same names."""
    response = service_pb2.ModelInferResponse(model_name=request.model_name)
    for given in request.inputs:
        response.outputs.add(name=given.name, datatype=given.datatype, shape=given.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6).reshape(2, 3).astype(kind) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")),
        *(np.linspace(-1, 1, 6).reshape(3, 2).astype(kind) for kind in ("f2", "f4", "f8", ">f4", ">i4")),
        np.array([True, False]),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(5.0),
        np.zeros((0, 3), np.int32),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_tensors_of_every_kind_come_back_as_they_went(start: Start, array: Any) -> None:
    url, _ = start(echo)
    with ImageClient(url) as client:
        found = client.infer("m", {"T": array})["T"]
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


def test_bytes_and_text_are_sent_whole(start: Start) -> None:
    url, servicer = start(echo)
    given = [[b"end\0\0", "naïve"], [bytearray(b"\xff"), memoryview(b"")]]
    with ImageClient(url) as client:
        found = client.infer("m", {"T": np.array(given, np.object_)})["T"]
        assert found.tolist() == [[b"end\0\0", "naïve".encode()], [b"\xff", b""]]
        assert client.infer("m", {"T": [b"a\0", b"b"]})["T"].tolist() == [b"a\0", b"b"]
        with pytest.raises(TypeError, match="NoneType"):
            client.infer("m", {"T": np.array([None], np.object_)})
        servicer.script = lambda request, context: _cut(echo(request, context))
        with pytest.raises(ServerError, match="cannot be read"):
            client.infer("m", {"T": [b"whole"]})
        servicer.script = lambda request, context: _typed(echo(request, context))
        with pytest.raises(ServerError, match="with the contents of 0"):
            client.infer("m", {"T": [b"whole"]})


def _cut(response: Any) -> Any:
    response.raw_output_contents[0] = response.raw_output_contents[0][:-1]
    return response


def _typed(response: Any) -> Any:
    del response.raw_output_contents[:]
    return response


def test_an_answer_of_other_datatypes_is_none(start: Start) -> None:
    def other(request: Any, context: Any) -> Any:
        response = answer(request, context)
        for output in response.outputs:
            if output.name == "SCORES":
                output.datatype = "INT32"
        return response

    url, _ = start(other)
    with ImageClient(url) as client, pytest.raises(ServerError, match="as an image ensemble does"):
        client.classify(b"x")
