"""Choosing a core's variant: the best one that this server and this machine can run with the artifacts there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triton_vision.repository.model import Model

EMBEDDED = "embedded"
# Best first. None is every model's own config.pbtxt: TensorRT. On a CPU ONNX Runtime was measured ahead of
# TorchScript; the order on a GPU behind TensorRT was not.
ON_GPU: tuple[str | None, ...] = (None, "libtorch", "onnxruntime", EMBEDDED)
ON_CPU: tuple[str | None, ...] = ("onnxruntime", "libtorch", EMBEDDED)


def pick(
    candidates: Mapping[str | None, Mapping[str, Model]], reason: Callable[[Model], str], *, gpu: bool, tensorrt: bool
) -> tuple[str | None, list[str]]:
    """The variant to serve, and a sentence for each better one whose artifacts are there and cannot be used.

    Args:
        candidates: each variant's name -> the repository's models as that variant reads them.
        reason: why a model could not be served; empty if it could.
        gpu: whether the machine has a GPU.
        tensorrt: whether the server has TensorRT.

    Returns:
        The first whose own models, those with a configuration of that name, can all be served. If there is none:
        TensorRT where server and machine are made for it, else ``embedded``, so that what is missing is named.
    """
    passed: list[str] = []
    for name in ON_GPU if gpu else ON_CPU:
        models = candidates.get(name, {})
        own = [model for model in models.values() if _is_own(model, name)]
        faults = {model.name: why for model in own if (why := reason(model))}
        if own and not faults:
            return name, passed
        # What this server has no backend for, and what is not there, was never to be had.
        if own and not any(why.startswith(("needs", "has no")) for why in faults.values()):
            what = name or "of config.pbtxt"
            passed += [f"{model}: passed over the variant {what}: {why}" for model, why in faults.items()]
    return (None if gpu and tensorrt else EMBEDDED), passed


def _is_own(model: Model, name: str | None) -> bool:
    if name is None:
        return model.backend == "tensorrt"
    return model.config_file == f"configs/{name}.pbtxt"
