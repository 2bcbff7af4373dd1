"""Sending one real image through an ensemble, so that a server counts as ready only when it answers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from triton_vision_client import ImageClient, VisionClientError

from triton_vision.server.errors import ModelLoadError


def classify_once(address: str, ensemble: str, timeout: float = 60.0, headers: Mapping[str, str] | None = None) -> None:
    """Classifies the package's own photo.

    Args:
        address: ``HOST:PORT`` of the gRPC endpoint.
        headers: sent with the call, such as the token that opens inference.

    Raises:
        ModelLoadError: the ensemble did not answer, with its reason.
    """
    photo = resources.files("triton_vision.server").joinpath("warm.jpg").read_bytes()
    try:
        with ImageClient(address, model=ensemble, timeout=timeout, headers=headers) as client:
            client.classify(photo)
    except VisionClientError as error:
        raise ModelLoadError({ensemble: f"it loads but does not answer a photo: {error}"}) from error
