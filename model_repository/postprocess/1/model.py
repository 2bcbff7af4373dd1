"""Logits in, labels out."""

from triton_vision.stages import Postprocess, adapt

TritonPythonModel = adapt(Postprocess)
