"""From whatever a caller has to the bytes of one encoded image."""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
import zlib
from typing import Any, BinaryIO, Union

import numpy as np
from numpy.typing import NDArray

from triton_vision_client._errors import BadImageError, RequestTooLargeError

# A path, an encoded file's bytes, a binary file object, an HxWx3 uint8 array of RGB, or a PIL image (which is typed
# as Any, so that Pillow need not be installed).
ImageSource = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, BinaryIO, NDArray[np.uint8], Any]


# protobuf's limit on a message, 2 GiB, with room for what is not the image.
MAX_MESSAGE_BYTES = 2**31 - 65536
# The servers' default limit on an encoded file. An array that is larger as a PPM goes as a PNG.
MAX_PPM_BYTES = 32 << 20


def encode(image: ImageSource) -> bytes:
    """The bytes to send: a file as it is, an array or PIL image without loss, as a binary PPM or (a large one) a PNG.

    A PIL image is turned upright by its EXIF orientation and converted to RGB, as the server does with its file.

    Raises:
        OSError: the path or file object cannot be read.
        TypeError: this is nothing that can be an image.
        ValueError: the array is not ``[height, width, 3]`` of uint8, or is empty.
        RequestTooLargeError: it would not fit into a message of its own.
    """
    if isinstance(image, (str, os.PathLike)):
        known = os.stat(image)
        if not stat.S_ISREG(known.st_mode) and not stat.S_ISDIR(known.st_mode):  # opening a folder says what it is
            raise OSError(errno.EINVAL, "a pipe or device, which may never end: read it and pass the bytes", str(image))
        _check_size(known.st_size)  # before it is read
    content = _encode(image)
    _check_size(len(content))
    return content


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise RequestTooLargeError(
            f"{size / 2**30:.1f} GiB, and a message carries less than 2 GiB: send a smaller image"
        )


def _encode(image: ImageSource) -> bytes:
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        with open(image, "rb") as file:
            return file.read()
    if isinstance(image, np.ndarray):
        return _lossless(image)
    if hasattr(image, "read"):
        content = image.read()
        if not isinstance(content, bytes):
            raise TypeError("the file object must be opened in binary mode ('rb')")
        return content
    # A PIL image exists only where Pillow has been imported.
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        return _lossless(_pixels(image))
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
    except RequestTooLargeError as error:
        return BadImageError("too_large", str(error))
    except Exception as error:  # noqa: BLE001 - a file object's own read may raise anything
        return BadImageError("unreadable", f"{type(error).__name__}: {error}")


def _pixels(image: Any) -> NDArray[Any]:
    from PIL import Image

    upright = _upright(image)
    if upright.mode.startswith("I;16") or upright.mode == "I":
        # The server's rule for 16-bit grey.
        grey = (np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8)
        upright = Image.fromarray(grey)
    if upright.mode == "La":
        upright = upright.convert("LA")  # Pillow knows no shorter way
    return np.asarray(upright.convert("RGB"))


def _upright(image: Any) -> Any:
    """The image as its EXIF orientation (TIFF 6.0, tag 274) wants it to be seen.

    Pillow's own ``exif_transpose`` writes the EXIF anew, and fails where that holds what a writer may not write.
    """
    from PIL.Image import Transpose

    ways = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        value = image.getexif().get(274, 1)
        # It may be stored as any kind of number, a fraction among them.
        way = next((way for number, way in ways.items() if number == value), None)
    except Exception:  # noqa: BLE001 - damaged EXIF says nothing about the pixels
        way = None
    return image if way is None else image.transpose(way)


def _lossless(array: NDArray[Any]) -> bytes:
    """A file of exactly the array's pixels: Netpbm's binary PPM (P6, maximum 255), or a PNG if that is large."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(
            f"an array must be [height, width, 3] of uint8 RGB, and this is {list(array.shape)} of {array.dtype}"
        )
    if not array.size:
        raise ValueError(f"the array is empty: {list(array.shape)}")
    if array.size > MAX_PPM_BYTES - 64:
        return _png(array)
    return b"P6 %d %d 255\n" % (array.shape[1], array.shape[0]) + array.tobytes()


def _png(array: NDArray[Any]) -> bytes:
    """A PNG (8-bit RGB) of an ``[height, width, 3]`` array, compressed fast rather than well (RFC 2083)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = array.shape[:2]
    rows = np.ascontiguousarray(array).reshape(height, width * 3)
    # Filter 2 ("up"): each byte less the one above it, modulo 256, which makes photos compressible.
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(filtered.data, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
