"""PNG files whose extras are damaged."""

from __future__ import annotations

import struct
import zlib

SIGNATURE_BYTES = 8
# Of the ancillary chunks, those that pixels depend on: transparency, and EXIF with the orientation.
NEEDED = frozenset((b"tRNS", b"eXIf"))


def without_extras(data: bytes) -> bytes | None:
    """The file without the ancillary chunks that its pixels do not need, and without any whose checksum is wrong.

    Pillow refuses a PNG for a damaged colour profile or a text that unpacks to more than a megabyte; viewers skip what
    they cannot read. What begins with a small letter is ancillary (PNG, section 5.4).

    Returns:
        None where there is nothing to leave out.
    """
    kept, at = [data[:SIGNATURE_BYTES]], SIGNATURE_BYTES
    whole = True
    while at + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        chunk = data[at : at + 12 + size]
        if not kind[0] & 0x20 or (kind in NEEDED and chunk[-4:] == struct.pack(">I", zlib.crc32(chunk[4:-4]))):
            kept.append(chunk)
        else:
            whole = False
        at += 12 + size
    kept.append(data[at:])
    return None if whole else b"".join(kept)
