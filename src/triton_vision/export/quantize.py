"""INT8 as Q/DQ nodes in the ONNX graph, calibrated on pixels: what TensorRT takes, and CPU engines run as well."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from triton_vision.export.networks import INPUT

# What is worth eight bits in a convolutional network; everything else stays as it is.
OPERATORS = ["Conv", "Gemm", "MatMul"]
BATCH = 8


class _Pixels(CalibrationDataReader):
    """Calibration pixels, UINT8 ``[N, 224, 224, 3]``, in batches."""

    def __init__(self, pixels: Any) -> None:
        self._batches: Iterator[Any] = iter([pixels[at : at + BATCH] for at in range(0, len(pixels), BATCH)])

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {INPUT: batch}


def quantize(graph: bytes, pixels: Any) -> bytes:
    """The FP32 graph with Q/DQ pairs around its convolutions and matrix products.

    Weights per channel and activations per tensor, both symmetric, without a quantized bias: TensorRT takes no other
    (its documentation of explicit quantization). Activations' ranges are the extremes seen on the pixels.

    Args:
        graph: the FP32 graph.
        pixels: UINT8 ``[N, 224, 224, 3]`` of the kind that the network will see.
    """
    logging.getLogger().setLevel(logging.ERROR)  # it advises, on the root logger, to do what is done here
    with tempfile.TemporaryDirectory() as folder:
        plain, merged, done = (Path(folder, f"{name}.onnx") for name in ("plain", "merged", "done"))
        plain.write_bytes(graph)
        # Shapes, and batch norms folded into their convolutions.
        quant_pre_process(str(plain), str(merged), skip_symbolic_shape=True)
        quantize_static(
            str(merged),
            str(done),
            _Pixels(pixels),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=OPERATORS,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                # Their inputs alone: an output is cut by the activation behind it first, whose range is much smaller.
                "OpTypesToExcludeOutputQuantization": OPERATORS,
            },
        )
        model = onnx.load(str(done))
    # The optimizer declares every operator set that it knows; other engines ask what they are.
    used = {node.domain for node in model.graph.node}
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return bytes(model.SerializeToString())
