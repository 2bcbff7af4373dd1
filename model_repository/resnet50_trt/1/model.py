"""Pixels in, logits out, on the CPU."""

from triton_vision.stages import EmbeddedCore, adapt

TritonPythonModel = adapt(EmbeddedCore)
