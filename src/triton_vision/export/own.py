"""Networks brought along as a TorchScript or an ONNX file, made to take the contract's tensors."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from triton_vision.export.networks import INPUT, OUTPUT, SIDE, PrepareError

OLDEST_OPSET = 13
# What the ONNX Runtime of Triton 24.10 reads (its table of versions): newer files need a newer server.
COMMON_OPSET, COMMON_IR = 21, 10
BATCHES = (1, 2, 3)
# The names that are about to be given out.
OURS = (INPUT, OUTPUT, "pixels.float", "pixels.planes", "pixels.scaled", "pixels.scale", "pixels.shift")


def kind_of(path: Path) -> str:
    """``onnx``, ``torchscript`` or ``state_dict``, by the file's content where that tells, else by its name."""
    if path.suffix.lower() == ".onnx":
        return "onnx"
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save and torch.jit.save both write zip files; the latter's hold code.
            return "torchscript" if any("/code/" in name for name in archive.namelist()) else "state_dict"
    except (OSError, zipfile.BadZipFile):
        return "state_dict"


def load_script(path: Path) -> tuple[nn.Module, bool, int]:
    """A TorchScript file's module in eval mode, whether it takes UINT8 pixels itself, and how many classes it has.

    It may take UINT8 ``[N, 224, 224, 3]``, or FP32 ``[N, 3, 224, 224]``, normalised.

    Raises:
        PrepareError: it cannot be loaded, or takes neither, or does not answer one row of logits for each image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated
            module = torch.jit.load(str(path), map_location="cpu").eval()
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for a broken file
        raise PrepareError(f"{path.name} cannot be loaded as TorchScript ({type(error).__name__})") from None
    answers: dict[tuple[bool, int], Any] = {}
    for pixels in (True, False):
        for batch in BATCHES:
            shape = (batch, SIDE, SIDE, 3) if pixels else (batch, 3, SIDE, SIDE)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
            try:
                with torch.no_grad():
                    answers[pixels, batch] = module(images if pixels else images / 128.0 - 1.0)
            except Exception:  # noqa: BLE001 - what a network says to tensors that it was not made for
                continue
    takes = {kind for kind, _ in answers}
    for pixels in (True, False):
        given = {batch: answers[pixels, batch] for batch in BATCHES if (pixels, batch) in answers}
        if all(batch in given and _is_logits(given[batch], batch) for batch in BATCHES):
            _check_logits(given[3].numpy(), path.name)
            return module, pixels, int(given[3].shape[1])
        if len(given) < len(BATCHES) and given and len(takes) == 1:
            raise PrepareError(f"{path.name} works for one batch size alone; save it with a dynamic batch")
    got = next((_shape(answer) for (_, batch), answer in answers.items() if batch == 2), "an error")
    raise PrepareError(
        f"{path.name} must take FP32 [N, 3, {SIDE}, {SIDE}] or UINT8 [N, {SIDE}, {SIDE}, 3] and answer FP32 "
        f"[N, classes]; to two images it answers {got}"
    )


def _is_logits(answer: Any, batch: int) -> bool:
    return (
        isinstance(answer, torch.Tensor) and answer.ndim == 2 and len(answer) == batch and answer.dtype == torch.float32
    )


def _shape(answer: Any) -> str:
    if not isinstance(answer, torch.Tensor):
        return f"a {type(answer).__name__}"
    return f"{str(answer.dtype).removeprefix('torch.')} {list(answer.shape)}"


def _check_logits(answers: Any, name: str) -> None:
    """Raises PrepareError for what is a softmax already: the postprocessing would flatten it by another one."""
    if answers.shape[1] > 1 and (answers >= 0).all() and np.abs(answers.sum(axis=1) - 1).max() < 1e-3:
        raise PrepareError(
            f"{name} answers probabilities; save it without its final softmax, the postprocessing has one"
        )


def load_graph(path: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[bytes, int, str, str]:
    """An ONNX file's graph with the contract's tensors, how many classes it has, its SHA-256, and what to note.

    The SHA-256 is that of the whole graph, with weights that lie in files beside it.

    A graph that takes normalised FP32 planes gets the cast, the transposition and the normalisation put in front; one
    that takes UINT8 pixels gets its tensors renamed. The batch becomes dynamic.

    Args:
        mean, std: per channel (RGB), on pixel values from 0 to 255.

    Raises:
        PrepareError: it is no ONNX, or takes or answers something else, or works for one batch size alone.
    """
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except Exception as error:  # noqa: BLE001 - protobuf, onnx and the file system each raise their own
        raise PrepareError(f"{path.name} cannot be read as ONNX ({type(error).__name__})") from None
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < OLDEST_OPSET:
        raise PrepareError(f"{path.name} has ONNX opset {opset}; export it with {OLDEST_OPSET} or newer")
    constants = {tensor.name for tensor in model.graph.initializer}
    # Older exporters list every weight among the inputs, with itself as the default.
    inputs = [entry for entry in model.graph.input if entry.name not in constants]
    note = ""
    if opset > COMMON_OPSET:
        note = f"{path.name} has opset {opset}, which needs a newer Triton than 24.10 with the onnxruntime variant"
    else:
        model.ir_version = min(max(model.ir_version, 4), COMMON_IR)
    if len(inputs) != 1 or len(model.graph.output) != 1:
        raise PrepareError(
            f"{path.name} has {len(inputs)} inputs and {len(model.graph.output)} outputs; it must have one of each"
        )
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    _make_room(model.graph)
    before = model.SerializeToString()
    given_name = model.graph.input[0].name
    _adapt_input(model, model.graph.input[0], mean, std, path.name)
    _adapt_output(model, path.name)
    after = model.SerializeToString()
    return after, _classes(before, given_name, after, mean, std, path.name), digest, note


def _make_room(graph: Any) -> None:
    """Renames tensors that have one of OURS for a name, in the graph and in the graphs within it."""
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in OURS:
                    names[index] = f"own.{name}"
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _make_room(inner)
    for entries in (graph.input, graph.output, graph.initializer, graph.value_info):
        for entry in entries:
            if entry.name in OURS:
                entry.name = f"own.{entry.name}"


def _adapt_input(model: Any, given: Any, mean: tuple[float, ...], std: tuple[float, ...], name: str) -> None:
    kind = given.type.tensor_type.elem_type
    dims = [size.dim_value for size in given.type.tensor_type.shape.dim]
    graph = model.graph
    if kind == TensorProto.UINT8 and _fits(dims, [SIDE, SIDE, 3]):
        for node in graph.node:
            for index, source in enumerate(node.input):
                if source == given.name:
                    node.input[index] = INPUT
    elif kind == TensorProto.FLOAT and _fits(dims, [3, SIDE, SIDE]):
        values = np.asarray(std, np.float64).reshape(1, 3, 1, 1), np.asarray(mean, np.float64).reshape(1, 3, 1, 1)
        scale, shift = (1.0 / values[0]).astype(np.float32), (-values[1] / values[0]).astype(np.float32)
        graph.initializer.extend(
            [numpy_helper.from_array(scale, "pixels.scale"), numpy_helper.from_array(shift, "pixels.shift")]
        )
        front = [
            helper.make_node("Cast", [INPUT], ["pixels.float"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", ["pixels.float"], ["pixels.planes"], perm=[0, 3, 1, 2]),
            helper.make_node("Mul", ["pixels.planes", "pixels.scale"], ["pixels.scaled"]),
            helper.make_node("Add", ["pixels.scaled", "pixels.shift"], [given.name]),
        ]
        nodes = [*front, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    else:
        shape = [size or "?" for size in dims]
        raise PrepareError(
            f"{name} takes {TensorProto.DataType.Name(kind)} {shape}; it must take FP32 [N, 3, {SIDE}, {SIDE}], "
            f"normalised, or UINT8 [N, {SIDE}, {SIDE}, 3] with a Cast right behind it"
        )
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["batch", SIDE, SIDE, 3]))


def _fits(dims: list[int], wanted: list[int]) -> bool:
    """Whether a shape may be the wanted one behind its batch; 0 is a dimension that may be any."""
    return len(dims) == 4 and all(size in (0, want) for size, want in zip(dims[1:], wanted, strict=True))


def _adapt_output(model: Any, name: str) -> None:
    answer = model.graph.output[0]
    kind, dims = answer.type.tensor_type.elem_type, answer.type.tensor_type.shape.dim
    if kind != TensorProto.FLOAT or len(dims) not in (0, 2):
        raise PrepareError(
            f"{name} answers {TensorProto.DataType.Name(kind)} with {len(dims)} dimensions; "
            "it must answer FP32 [N, classes]"
        )
    model.graph.node.append(helper.make_node("Identity", [answer.name], [OUTPUT]))
    classes = dims[1].dim_value if len(dims) == 2 else 0
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", classes or "classes"]))
    # What was inferred for a fixed batch no longer holds.
    del model.graph.value_info[:]


def _classes(
    before: bytes, input_name: str, after: bytes, mean: tuple[float, ...], std: tuple[float, ...], name: str
) -> int:
    """Runs the file's own graph on one image after the other and the adapted one on all: they must agree."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
    try:
        own = onnxruntime.InferenceSession(before, providers=["CPUExecutionProvider"])
        rows = []
        for image in pixels:
            given: Any = image[np.newaxis]
            if own.get_inputs()[0].type == "tensor(float)":
                given = ((given - np.asarray(mean)) / np.asarray(std)).transpose(0, 3, 1, 2).astype(np.float32)
            rows.append(own.run(None, {input_name: given})[0])
        expected = np.concatenate(rows)
        session = onnxruntime.InferenceSession(after, providers=["CPUExecutionProvider"])
        (found,) = session.run([OUTPUT], {INPUT: pixels})
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises kinds of its own
        reason = str(error).splitlines()[0][:200]
        raise PrepareError(
            f"{name} does not run on a batch of three images; export it with a dynamic batch ({reason})"
        ) from None
    if found.shape != expected.shape or found.ndim != 2:
        raise PrepareError(f"{name} answers {list(found.shape)} to three images; it must answer [3, classes]")
    _check_logits(expected, name)
    if not float(np.abs(found - expected).max()) <= 1e-3 * max(1.0, float(np.ptp(expected))):
        raise PrepareError(f"{name} answers otherwise in a batch than image by image; export it with a dynamic batch")
    return int(found.shape[1])


def named_classes(graph: bytes, classes: int) -> bytes:
    """The graph with its number of classes written into its output."""
    model = onnx.load_from_string(graph)
    size = model.graph.output[0].type.tensor_type.shape.dim[1]
    size.ClearField("dim_param")
    size.dim_value = classes
    return bytes(model.SerializeToString())
