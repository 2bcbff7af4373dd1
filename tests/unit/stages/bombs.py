"""Files that are small, or in order, and cost their decoder far more than their size suggests."""

from __future__ import annotations

import struct
import zlib

from PIL import Image

from tests.conftest import encoded

SMALL = Image.new("RGB", (64, 48))


def segment(marker: int, content: bytes) -> bytes:
    """A JPEG's segment."""
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content


def chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG's chunk."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def many_scans(side: int, scans: int) -> bytes:
    """A progressive grey JPEG whose scans each say in a few bytes that nothing is to be added anywhere."""
    blocks = (side // 8) ** 2
    head = b"\xff\xd8" + segment(0xDB, b"\0" + b"\1" * 64)
    head += segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    # One code each, of one bit: no difference in DC; an end-of-band run of 2^14 blocks and more in AC.
    head += segment(0xC4, b"\x00" + bytes([1] + [0] * 15) + b"\0")
    head += segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\xe0")
    runs = "".join("0" + format(min(16383, max(0, left - 16384)), "014b") for left in range(blocks, 0, -32767))
    first = segment(0xDA, b"\1\1\x00\0\0\0") + bytes(-(-blocks // 8))
    return head + first + (segment(0xDA, b"\1\1\x00\1\x3f\0") + _bits(runs)) * scans + b"\xff\xd9"


def bmp(size: tuple[int, int], compression: int, bits: int, data: bytes) -> bytes:
    """A BMP with a palette of black."""
    colours = 1 << bits
    offset = 54 + 4 * colours
    return (
        b"BM"
        + struct.pack("<IHHI", offset + len(data), 0, 0, offset)
        + struct.pack("<IiiHHIIiiII", 40, *size, 1, bits, compression, len(data), 0, 0, colours, 0)
        + bytes(4 * colours)
        + data
    )


def tiff(*entries: tuple[int, int, int, int]) -> bytes:
    """A TIFF of one directory: (tag, type, count, value) each."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + bytes(4)


def inside_jpeg(what: bytes) -> bytes:
    """A JPEG with something behind its first marker."""
    whole = encoded(SMALL, "JPEG")
    return whole[:2] + what + whole[2:]


def inside_png(what: bytes) -> bytes:
    """A PNG with something behind its header chunk."""
    whole = encoded(SMALL, "PNG")
    return whole[:33] + what + whole[33:]


def _bits(text: str) -> bytes:
    text += "1" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")
