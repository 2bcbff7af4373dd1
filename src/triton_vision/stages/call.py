"""One request of an ``execute``: what it brought, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from triton_vision.stages.errors import InvalidRequest, shown
from triton_vision.stages.kit import Array, Parameters

NO_ROWS = range(0)


class Call:
    """One request of an ``execute``, its rows in the batch, and what became of it."""

    __slots__ = (
        "bytes",
        "error",
        "id",
        "inputs",
        "masks",
        "options",
        "outputs",
        "request",
        "rows",
        "sender",
        "status",
        "until",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        # Of a request that has been set aside, which is answered through its sender.
        self.id = ""
        self.sender: Any = None
        self.rows = NO_ROWS
        self.bytes = 0
        self.inputs: list[Array] = []
        self.status: Array | None = None
        self.masks = False
        self.options: Any = None
        # When its timeout passes, on the clock of time.perf_counter; 0: never.
        self.until = 0.0
        self.outputs: tuple[Array, ...] = ()
        self.error: tuple[str, str] | None = None  # message, and the name of Triton's error code

    def set_aside(self) -> None:
        """Lets go of the request, and with it of shared memory; what is still needed of it is kept."""
        self.id = self.request.request_id()
        self.sender = self.request.get_response_sender()
        self.request = None
        self.inputs = []

    def request_id(self) -> str:
        """What its caller calls it."""
        return self.id if self.request is None else str(self.request.request_id())

    def is_cancelled(self) -> bool:
        """Whether its caller has gone; a question of 70 us."""
        return bool((self.request or self.sender).is_cancelled())


def read_parameters(text: str) -> Parameters:
    """A request's parameters, as the Python backend gives them; raises InvalidRequest where they are not an object."""
    if not text or text == "{}":
        return {}
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidRequest("the request's parameters are not a JSON object")
    return parameters


def read_masks(parameters: Parameters) -> bool:
    """Whether ``on_bad_image`` is ``mask``; raises InvalidRequest for a value that it cannot have."""
    value = parameters.get("on_bad_image", "fail")
    if value not in ("fail", "mask"):
        raise InvalidRequest(f"parameter on_bad_image is {shown(value)}, and must be 'fail' or 'mask'")
    return bool(value == "mask")


def size_of(array: Array) -> int:
    """The size of what a tensor carries: of a STRING its contents."""
    if array.dtype != np.object_:
        return array.nbytes
    return sum(len(item) for item in array.ravel() if isinstance(item, bytes))
