"""What becomes of an image before it is sent."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from triton_vision_client._images import encode

PIXELS = np.random.default_rng(1).integers(0, 256, (30, 50, 3), dtype=np.uint8)


def opened(exif: bytes) -> Image.Image:
    """A PIL image whose file holds this TIFF structure as EXIF."""
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG", exif=b"Exif\0\0" + exif)
    return Image.open(io.BytesIO(file.getvalue()))


def oriented(number: int, *, kind: int = 3) -> bytes:
    """EXIF that holds the orientation alone, as a SHORT (3) or a RATIONAL (5)."""
    value = struct.pack("<HH", number, 0) if kind == 3 else struct.pack("<I", 26)
    return struct.pack("<2sHIHHHI", b"II", 42, 8, 1, 274, kind, 1) + value + bytes(4) + struct.pack("<II", number, 1)


def sent(image: Image.Image) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(encode(image))))


@pytest.mark.parametrize("kind", [3, 5])
@pytest.mark.parametrize("number", range(10))
def test_an_image_is_sent_upright(number: int, kind: int) -> None:
    expected = np.asarray(ImageOps.exif_transpose(opened(oriented(number, kind=3))))
    np.testing.assert_array_equal(sent(opened(oriented(number, kind=kind))), expected)


def test_exif_that_pillow_cannot_write_is_no_obstacle() -> None:
    entries = struct.pack("<HHIHH", 274, 3, 1, 6, 0) + struct.pack("<HHII", 283, 10, 1, 38)
    exif = struct.pack("<2sHIH", b"II", 42, 8, 2) + entries + bytes(4) + struct.pack("<ii", -72, 1)
    with pytest.raises(struct.error):
        ImageOps.exif_transpose(opened(exif))
    np.testing.assert_array_equal(sent(opened(exif)), np.rot90(PIXELS, -1))
