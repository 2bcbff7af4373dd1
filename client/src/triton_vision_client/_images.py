"""From whatever a caller has to the bytes of one encoded image."""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO, Union

import numpy as np
from numpy.typing import NDArray

from triton_vision_client._errors import BadImageError

# A path, an encoded file's bytes, a binary file object, an HxWx3 uint8 array of RGB, or a PIL image (which is typed
# as Any, so that Pillow need not be installed).
ImageSource = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, BinaryIO, NDArray[np.uint8], Any]


def encode(image: ImageSource) -> bytes:
    """The bytes to send: a file as it is, an array or PIL image without loss as a binary PPM.

    A PIL image is turned upright by its EXIF orientation and converted to RGB, as the server does with its file.

    Raises:
        OSError: the path or file object cannot be read.
        TypeError: this is nothing that can be an image.
        ValueError: the array is not ``[height, width, 3]`` of uint8, or is empty.
    """
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        with open(image, "rb") as file:
            return file.read()
    if isinstance(image, np.ndarray):
        return _ppm(image)
    if hasattr(image, "read"):
        content = image.read()
        if not isinstance(content, bytes):
            raise TypeError("the file object must be opened in binary mode ('rb')")
        return content
    # A PIL image exists only where Pillow has been imported.
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        return _ppm(_pixels(image))
    raise TypeError(
        f"an image is a path, bytes, a binary file, a PIL image or an HxWx3 uint8 array, not {type(image).__name__}"
    )


def encode_or_refuse(image: ImageSource) -> Union[bytes, BadImageError]:
    """As ``encode``, but what goes wrong is returned, for a caller who has more images."""
    try:
        return encode(image)
    except OSError as error:
        return BadImageError("unreadable", error.strerror or str(error))
    except (TypeError, ValueError) as error:
        return BadImageError("unreadable", str(error))


def _pixels(image: Any) -> NDArray[Any]:
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16") or upright.mode == "I":
        # The server's rule for 16-bit grey.
        grey = (np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8)
        upright = Image.fromarray(grey)
    return np.asarray(upright.convert("RGB"))


def _ppm(array: NDArray[Any]) -> bytes:
    """Netpbm's binary PPM (P6, maximum 255) of an ``[height, width, 3]`` array."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(
            f"an array must be [height, width, 3] of uint8 RGB, and this is {list(array.shape)} of {array.dtype}"
        )
    if not array.size:
        raise ValueError(f"the array is empty: {list(array.shape)}")
    return b"P6 %d %d 255\n" % (array.shape[1], array.shape[0]) + array.tobytes()
