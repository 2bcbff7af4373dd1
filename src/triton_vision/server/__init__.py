"""Finding, starting, watching and ending a Triton server."""

from triton_vision.server.errors import ModelLoadError, ServerError, ServerStartError, SetupError
from triton_vision.server.process import TritonServer

__all__ = ["ModelLoadError", "ServerError", "ServerStartError", "SetupError", "TritonServer"]
