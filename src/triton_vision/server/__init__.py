"""Finding, starting, watching and ending a Triton server."""

from typing import TYPE_CHECKING, Any

from triton_vision.server.errors import ModelLoadError, ServerError, ServerStartError, SetupError

if TYPE_CHECKING:
    from triton_vision.server.process import TritonServer

__all__ = ["ModelLoadError", "ServerError", "ServerStartError", "SetupError", "TritonServer"]


def __getattr__(name: str) -> Any:
    # gRPC takes a third of a second to import, which no command that starts no server has to wait for.
    if name == "TritonServer":
        from triton_vision.server.process import TritonServer

        return TritonServer
    raise AttributeError(name)
