"""Encoded image in, pixels out."""

from triton_vision.stages import Preprocess, adapt

TritonPythonModel = adapt(Preprocess)
