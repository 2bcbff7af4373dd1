"""Choosing a core's variant: the best one that this server and this machine can run with the artifacts there are."""

from __future__ import annotations

from collections.abc import Callable

from triton_vision.repository.model import Model

EMBEDDED = "embedded"
# Best first. None is every model's own config.pbtxt: TensorRT. ResNet-50 in batches of 8 was measured to cost 86 ms of
# CPU an image in OpenVINO (27 with INT8), 103 in ONNX Runtime (161) and 120 in LibTorch; on a GPU nothing was measured.
ON_GPU: tuple[str | None, ...] = (None, "libtorch", "onnxruntime", EMBEDDED)
ON_CPU: tuple[str | None, ...] = (EMBEDDED, "onnxruntime", "libtorch")


def ranked(*, gpu: bool) -> tuple[str | None, ...]:
    """The variants for a machine with or without a GPU, best first."""
    return ON_GPU if gpu else ON_CPU


def pick(is_usable: Callable[[str | None], bool], *, gpu: bool, tensorrt: bool) -> str | None:
    """The variant to serve.

    Args:
        is_usable: whether a variant's own models can all be served.
        gpu: whether the machine has a GPU.
        tensorrt: whether the server has TensorRT.

    Returns:
        The best that is usable. If there is none: TensorRT where server and machine are made for it, else
        ``embedded``, so that what is missing is named.
    """
    return next(filter(is_usable, ranked(gpu=gpu)), None if gpu and tensorrt else EMBEDDED)


def is_own(model: Model, name: str | None) -> bool:
    """Whether a model has a configuration of that variant."""
    if name is None:
        return model.backend == "tensorrt"
    return model.config_file == f"configs/{name}.pbtxt"
