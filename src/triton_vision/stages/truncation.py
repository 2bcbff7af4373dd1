"""Telling a file that ends early from one that is damaged, once its decoder has given up."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable


def is_cut(name: str, data: bytes) -> bool:
    """Whether the file's own structure says that it should be longer than it is.

    Args:
        name: the format, as ``decode.DECODERS`` names it.
        data: what there is of the file.
    """
    check = CHECKS.get(name)
    try:
        return check is not None and check(data)
    except (struct.error, IndexError):  # the structure itself runs off the end
        return True


def _jpeg(data: bytes) -> bool:
    """Whether the segments before the image data run off the end (ITU T.81, annex B)."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF or data[at + 1] == 0xDA:
            return False
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return True


def _png(data: bytes) -> bool:
    """Whether a chunk runs off the end, or the last one, IEND, is not there (PNG, section 5.3)."""
    at = 8
    while data[at + 4 : at + 8] != b"IEND":
        at += 12 + int(struct.unpack_from(">I", data, at)[0])
        if at > len(data):
            return True
    return at + 12 > len(data)


def _gif(data: bytes) -> bool:
    """Whether the header, its palette and the first image's descriptor are there in full (GIF89a, 17 to 20)."""
    flags = data[10]
    palette = 3 << ((flags & 7) + 1) if flags & 0x80 else 0
    return len(data) < 13 + palette + 10


def _bmp(data: bytes) -> bool:
    """Whether the file is shorter than its header says."""
    return int(struct.unpack_from("<I", data, 2)[0]) > len(data) or len(data) < 26


def _ppm(data: bytes) -> bool:
    """Whether the header's numbers are there: width, height, and all but bitmaps have a highest value too."""
    header = re.sub(rb"#[^\n]*", b"", data[:512]).split()
    return len(data) < 512 and len(header) < (3 if data[:2] in (b"P1", b"P4") else 4)


def _riff(data: bytes) -> bool:
    """WebP: the RIFF chunk's size, which leaves out its own eight bytes of head."""
    return 8 + int(struct.unpack_from("<I", data, 4)[0]) > len(data)


def _boxes(data: bytes) -> bool:
    """AVIF: whether the top-level boxes (ISO/IEC 14496-12) run off the end."""
    at = 0
    while at < len(data):
        size = int(struct.unpack_from(">I", data, at)[0])
        if size == 1:
            size = int(struct.unpack_from(">Q", data, at + 8)[0])
        if size < 8:
            return False  # 0: to the end of the file; anything else is damage
        at += size
    return at > len(data) or b"mdat" not in data


def _tiff(data: bytes) -> bool:
    """Whether the first directory, or the strips or tiles that it lists, lie behind the end (TIFF 6.0, section 2)."""
    order = "<" if data[:2] == b"II" else ">"
    at = int(struct.unpack_from(order + "I", data, 4)[0])
    fields: dict[int, tuple[int, ...]] = {}
    for entry in range(int(struct.unpack_from(order + "H", data, at)[0])):
        tag, kind, count = struct.unpack_from(order + "HHI", data, at + 2 + 12 * entry)
        # Strip offsets and byte counts, tile offsets and byte counts; SHORT or LONG, inline where they fit.
        if tag in (273, 279, 324, 325) and tag not in fields and kind in (3, 4):
            layout = f"{order}{count}{'H' if kind == 3 else 'I'}"
            where = at + 10 + 12 * entry
            if struct.calcsize(layout) > 4:
                where = int(struct.unpack_from(order + "I", data, where)[0])
            fields[tag] = struct.unpack_from(layout, data, where)
    return any(
        start + size > len(data)
        for offsets, counts in ((273, 279), (324, 325))
        for start, size in zip(fields.get(offsets, ()), fields.get(counts, ()), strict=False)
    )


CHECKS: dict[str, Callable[[bytes], bool]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "GIF": _gif,
    "BMP": _bmp,
    "PPM": _ppm,
    "WebP": _riff,
    "AVIF": _boxes,
    "TIFF": _tiff,
}
