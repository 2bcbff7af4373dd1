"""Plain JPEGs by libjpeg-turbo's own interface: the same pixels as Pillow's, in about half the time.

Only files that are plainly in order are read here. Whatever else a JPEG may be (CMYK, 12 bits, a stray marker, an
odd segment, cut short), None is the answer, and Pillow has the last word on it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

# Markers (ITU T.81, table B.1). Baseline, extended and progressive Huffman frames; the other SOFs go to Pillow.
FRAMES = (0xC0, 0xC1, 0xC2)
SCAN, APP0, APP2, ADOBE = 0xDA, 0xE0, 0xE2, 0xEE
# Tables, restart interval, comment: they say nothing about size or orientation.
PASSED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, APP0, ADOBE))
# What a segment's content begins with, and how long it is at least where it does: Pillow chokes on shorter ones.
LEAST = {APP0: (b"JFIF", 7), APP2: (b"ICC_PROFILE\0", 14), ADOBE: (b"Adobe", 7)}
# Of a file that is plainly in order; decoders copy the segments of longer headers over and over.
MOST_SEGMENTS, LONGEST_HEAD = 64, 1024 * 1024
# The scales that the decoder has fast inverse transforms for, in eighths.
SCALES = (1, 2, 4)
# A buffer kept by each thread saves the page faults of a fresh one, which cost more than the crop of a small image.
KEPT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Header:
    """What the segments before the image data say.

    Attributes:
        width, height: in pixels.
        plain: there is no segment that could hold an orientation or further images.
        single_scan: the first scan holds the whole image, and no decoder looks at another one.
    """

    width: int
    height: int
    plain: bool
    single_scan: bool


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffer: NDArray[np.uint8] = np.empty(0, np.uint8)


_kept = _Kept()


def read_header(data: bytes) -> Header | None:
    """Reads the segments up to the first scan; None for a file that is not plainly in order.

    Args:
        data: begins with the SOI marker.
    """
    at, end = 2, min(len(data) - 9, LONGEST_HEAD)
    size: tuple[int, int] | None = None
    plain, components, progressive = True, 0, False
    for _ in range(MOST_SEGMENTS):
        if at >= end or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        length = data[at + 2] << 8 | data[at + 3]
        if marker == SCAN:
            return Header(*size, plain, not progressive and data[at + 4] == components) if size else None
        name, least = LEAST.get(marker, (b"", 0))
        if length < 2 + (least if data.startswith(name, at + 4) else 0):
            return None
        if marker in FRAMES:
            # Precision, height, width, number of components; three are YCbCr or RGB, one is grey.
            if size or length < 8 or data[at + 4] != 8 or data[at + 9] not in (1, 3):
                return None
            size = (data[at + 7] << 8 | data[at + 8], data[at + 5] << 8 | data[at + 6])
            if 0 in size:
                return None
            components, progressive = data[at + 9], marker == FRAMES[-1]
        elif marker not in PASSED:
            if not 0xE0 <= marker <= 0xEF:
                return None
            plain = plain and marker == APP2 and data.startswith(b"ICC_PROFILE\0", at + 4)
        at += 2 + length
    return None


def decode(data: bytes, header: Header, short: int = 0) -> NDArray[Any] | None:
    """Decodes to RGBX, uint8 ``[height, width, 4]``; None where the decoder has the least complaint.

    The array is valid until the same thread's next call.

    Args:
        header: of ``data``.
        short: 0 for every pixel; else decoding is scaled by 1/8, 1/4 or 1/2 (in the inverse DCT), to the smallest
            of these that leaves at least this many pixels in both directions, where there is one.
    """
    width, height = header.width, header.height
    least: dict[str, int] = {}
    if short:
        for eighths in SCALES:
            scaled = scaled_size(width, eighths), scaled_size(height, eighths)
            if min(scaled) >= short:
                width, height = scaled
                least = {"min_width": width, "min_height": height}
                break
    try:
        buffer = _buffer(width * height * 4)
        pixels: NDArray[Any] = simplejpeg.decode_jpeg(data, colorspace="RGBA", buffer=buffer, **least)
    except Exception:  # noqa: BLE001 - whatever this decoder says, the other one is asked
        return None
    return pixels if pixels.shape == (height, width, 4) else None


def _buffer(count: int) -> NDArray[np.uint8]:
    if count > KEPT_BYTES:
        return np.empty(count, np.uint8)
    if _kept.buffer.size < count:
        _kept.buffer = np.empty(count, np.uint8)
    return _kept.buffer[:count]


def scaled_size(size: int, eighths: int) -> int:
    """A side's length under DCT scaling: rounded up, as libjpeg does (``jdiv_round_up`` in jdmaster.c)."""
    return -(-size * eighths // 8)
