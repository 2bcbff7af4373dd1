"""What a file's structure says about the work that it takes, before any decoder has seen it.

Small files can keep a decoder busy for hours: thousands of scans over the same image, millions of empty segments,
formats whose decoders are written in Python. Each look here takes time that grows with the file at most, stops where
a limit is reached, and never judges whether the file is in order: that is the decoder's business.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from triton_vision.stages.limits import MIB, Limits, Quick, TakesLong, too_complex

# Seconds of CPU, measured on one core of a server and rounded up: a segment that the decoder reads in Python, a
# compressed text or profile in a PNG (up to a megabyte inflated), 64 samples in a further scan of a JPEG, and a byte of
# its scans. EXIF and what may hold it in a PNG: Pillow unpacks all of it, to look for the orientation.
SEGMENT_S, INFLATED_S, BLOCK_S, SCAN_BYTE_S = 20e-6, 5e-3, 15e-9, 20e-9
EXIF_BYTE_S, EXIF_BYTES = 0.4e-6, 26
# Seconds of CPU and bytes of memory for each pixel. Memory depends on what the file holds (Pillow's modes) more than
# on its format, except where a decoder keeps copies of its own.
PIXEL_S = {"JPEG": 8e-9, "PNG": 20e-9, "WebP": 45e-9, "GIF": 10e-9, "BMP": 10e-9, "TIFF": 40e-9, "PPM": 40e-9}
PIXEL_BYTES = {"1": 5.2, "L": 5.2, "P": 5.2, "RGB": 4.4, "I;16": 9.5, "F": 12.5, "I": 17.0}
OTHER_S, OTHER_BYTES = 150e-9, 8.5
COPIES = {"WebP": 12.5, "AVIF": 9.0}
# Pillow keeps a pointer for each row of an image, and of those that it makes of it.
ROW_BYTES = 24
# What Python's decoders take for each byte and each pixel.
SLOW_BYTE_S, SLOW_PIXEL_S = 10e-6, 0.5e-6
# Seconds that a file is taken to need of which nothing is known, and bytes beside those for its pixels.
UNKNOWN_S, SPARE_BYTES = 0.3, 32 * MIB
# A header of up to so many segments and bytes is read in no time; decoders copy longer ones over and over.
FEW_SEGMENTS, SHORT_HEAD = 64, MIB
# TIFF's tags (TIFF 6.0, sections 8 and 15), the last ones how many bytes each strip or tile has; types of their values.
WIDTH, HEIGHT, TILE_WIDTH, TILE_HEIGHT, COMPRESSION, FILL_ORDER, PIECES = 256, 257, 322, 323, 259, 266, (279, 325)
SHORT, LONG, TIFF_BYTES, TILE_PIXEL_BYTES = 3, 4, frozenset((1, 2, 6, 7)), 8
# Its compressions that take a time in proportion to pixels and bytes: none, CCITT, LZW, deflate, PackBits.
PLAIN_TIFF = frozenset((1, 2, 3, 4, 5, 8, 32773, 32946))
# How many bytes a value of each TIFF type has (TIFF 6.0, section 2; BigTIFF's 16 to 18).
TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}

# A number or a part of one, a comment's line, or white space.
HEADER_PART = re.compile(rb"([^\s#]+)|#[^\r\n]*[\r\n]?|\s+")
MARKER = re.compile(rb"\xff[^\x00\xff]")
MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# AVIF's size of an image, or of a tile of it ('ispe', ISO/IEC 23008-12).
SIZE_PROPERTY = re.compile(rb"ispe\0{4}(.{8})", re.DOTALL)
# Restart markers, SOI, EOI and TEM stand alone; all others have a length (ITU T.81, table B.1).
ALONE = frozenset((0x01, *range(0xD0, 0xDA)))
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9


@dataclass(frozen=True)
class Structure:
    """What decoding takes beside the time and memory for its pixels.

    Attributes:
        seconds: of CPU.
        bytes: of memory.
        pixel_seconds, pixel_bytes: further ones for each pixel.
        unbounded: nothing bounds the time that a decoder takes for it.
        header_pixels: of such a file, as far as its first bytes can be believed.
    """

    seconds: float = 0.0
    bytes: int = 0
    pixel_seconds: float = 0.0
    pixel_bytes: float = 0.0
    unbounded: bool = False
    header_pixels: float = math.inf

    def check_quick(self, name: str, limits: Limits, quick: Quick | None) -> None:
        """Raises TakesLong for a file that not even Pillow's ``open`` is quick with."""
        if quick is not None and (self.unbounded or self.seconds > quick.seconds):
            guess = self.header_pixels * (OTHER_BYTES + COPIES.get(name, 0.0)) + self.bytes + SPARE_BYTES
            seconds = min(max(self.seconds, UNKNOWN_S), limits.max_seconds)
            raise TakesLong(seconds, min(guess, limits.max_memory), sure=not self.unbounded)

    def check(
        self, name: str, mode: str, size: tuple[int, int], encoded: int, limits: Limits, quick: Quick | None
    ) -> None:
        """Compares what an image takes with what it may take.

        Args:
            name: the format.
            mode: what its pixels are, as Pillow names it.
            size: width and height.
            encoded: bytes of the file.
            quick: beyond this it takes long; None: nothing does.

        Raises:
            ImageRefused: more pixels or memory than ``limits`` allow.
            TakesLong: it may be decoded, but not here.
        """
        limits.check_size(*size, encoded)
        pixels = size[0] * size[1]
        each = PIXEL_BYTES.get(mode, OTHER_BYTES) + COPIES.get(name, 0.0) + self.pixel_bytes
        needed = pixels * each + size[1] * ROW_BYTES + 2 * encoded + self.bytes
        limits.check_memory(needed)
        seconds = self.seconds + pixels * (PIXEL_S.get(name, OTHER_S) + self.pixel_seconds)
        if quick is not None and (seconds > quick.seconds or needed > quick.bytes):
            raise TakesLong(min(seconds, limits.max_seconds), needed)


def inspect(name: str, data: bytes, limits: Limits) -> Structure:
    """Looks at a file's structure.

    Args:
        name: its format, one of ``limits.DECODERS``.
        data: the file; it may be cut short or damaged anywhere.

    Raises:
        ImageRefused: ``too_complex``, with the limit that it exceeds.
    """
    look = LOOKS.get(name)
    try:
        return look(data, limits) if look is not None else Structure()
    except (struct.error, IndexError):  # it ends before its structure does: for the decoder to say
        return Structure(unbounded=True)


def _segments(count: int, limits: Limits) -> None:
    if count > limits.max_segments:
        raise too_complex(f"more than {limits.max_segments} segments", "max_segments")


def _jpeg(data: bytes, limits: Limits) -> Structure:
    at, segments, scans, head, samples, pixels = 2, 0, 0, 0, 3.0, math.inf
    while found := (MARKER_IN_SCAN if scans else MARKER).search(data, at):
        if not scans:
            # Between segments Pillow goes from byte to byte.
            segments += found.start() - at
        at, marker = found.end(), data[found.end() - 1]
        if marker == END_OF_IMAGE and scans:
            break
        segments += 1
        _segments(segments, limits)
        if marker == START_OF_SCAN:
            head = head or at
            scans += 1
            if scans > limits.max_scans:
                raise too_complex(f"more than {limits.max_scans} scans", "max_scans")
        elif marker in FRAMES and len(data) > at + 8:
            samples = _samples(data, at)
            high, wide = struct.unpack_from(">HH", data, at + 3)
            pixels = wide * high
        if marker not in ALONE:
            at += data[at] << 8 | data[at + 1] if at + 1 < len(data) else 2
    return Structure(
        seconds=segments * SEGMENT_S + (len(data) * SCAN_BYTE_S if scans > 1 else 0.0),
        # Each scan goes over all blocks; the first is among what a pixel takes. More than one need the coefficients
        # of the whole image, two bytes each.
        pixel_seconds=max(0, scans - 1) * samples / 64 * BLOCK_S,
        pixel_bytes=2 * samples if scans > 1 else 0.0,
        unbounded=segments > FEW_SEGMENTS + scans * 8 or head > SHORT_HEAD,
        header_pixels=pixels,
    )


def _samples(data: bytes, at: int) -> float:
    """Samples for each pixel, from the sampling factors in the frame header whose length is at ``at``."""
    factors = [data[at + 9 + 3 * index] for index in range(data[at + 7])]
    areas = [(factor >> 4) * (factor & 15) for factor in factors]
    return sum(areas) / max(1, *areas, 1)


def _png(data: bytes, limits: Limits) -> Structure:
    at, images, others, inflated, exif = 8, 0, 0, 0, 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            break
        if kind == b"IDAT":
            images += 1
            # Encoders write image data in pieces of some kilobytes.
            if images > limits.max_segments + len(data) // 1024:
                raise too_complex(f"its image data is in more than {images - 1} pieces", "max_segments")
        else:
            others += 1
            inflated += kind in (b"iCCP", b"zTXt", b"iTXt")
            exif += size if kind in (b"eXIf", b"tEXt", b"iTXt") else 0
            _segments(others, limits)
        at += 12 + size
    animated = data.find(b"acTL", 8, 4096) > 0
    wide, high = struct.unpack_from(">II", data, 16)
    return Structure(
        seconds=(images + others) * SEGMENT_S / 2 + inflated * INFLATED_S + exif * EXIF_BYTE_S,
        bytes=exif * EXIF_BYTES,
        pixel_bytes=16.0 if animated else 0.0,
        unbounded=others > FEW_SEGMENTS,
        header_pixels=wide * high,
    )


def _gif(data: bytes, limits: Limits) -> Structure:
    flags = data[10]
    at, blocks = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0), 0
    while data[at] not in b",;":
        blocks += 1
        _segments(blocks, limits)
        if data[at] != 0x21:  # nothing that belongs there: Pillow goes on from byte to byte
            at += 1
            continue
        at += 2
        while data[at]:
            blocks += 1
            _segments(blocks, limits)
            at += 1 + data[at]
        at += 1
    wide, high = struct.unpack_from("<HH", data, 6)
    return Structure(blocks * SEGMENT_S, unbounded=blocks > 4 * FEW_SEGMENTS, header_pixels=wide * high)


def _bmp(data: bytes, limits: Limits) -> Structure:
    # Of the header that has such a field: 1 and 2 are RLE8 and RLE4.
    if struct.unpack_from("<I", data, 14)[0] < 40 or struct.unpack_from("<I", data, 30)[0] not in (1, 2):
        return Structure()
    width, height = struct.unpack_from("<ii", data, 18)
    return _slow("a run-length BMP", abs(width * height), len(data), limits)


def _ppm(data: bytes, limits: Limits) -> Structure:
    # Three numbers behind the magic one (two of a bitmap). White space ends a number; a comment does not.
    numbers: list[int] = []
    token = b""
    at = next((at for at in range(6) if data[at : at + 1].isspace()), 6)
    wanted = 2 if data[1:2] in b"14" else 3
    for steps in range(limits.max_segments + 1):
        _segments(steps + 1, limits)
        found = HEADER_PART.match(data, at)
        if found is None or len(token) > 10:
            return Structure()  # no PPM, and Pillow reads no further
        at = found.end()
        if found[1]:
            token += found[1][:11]
        elif token and found[0][:1] != b"#":
            numbers.append(int(token) if token.isdigit() else 0)
            token = b""
            if len(numbers) == wanted:
                break
    # Pillow goes through the header from byte to byte.
    if at > limits.max_slow_bytes:
        raise too_complex(f"a PPM's header of more than {limits.max_slow_bytes} bytes", "max_slow_bytes")
    plain = data[1:2] in b"123"
    highest = numbers[2] if wanted == 3 else 0
    odd = wanted == 3 and data[1:2] != b"f" and highest != 255 and not (data[1:2] == b"5" and highest == 65535)
    if not plain and not odd:
        return Structure(seconds=at * 1e-6)
    what = "a plain-text PPM" if plain else f"a PPM with a highest value of {highest}"
    return _slow(what, numbers[0] * numbers[1], len(data), limits)


def _slow(what: str, pixels: int, encoded: int, limits: Limits) -> Structure:
    """A file whose decoder is written in Python."""
    if encoded > limits.max_slow_bytes:
        raise too_complex(f"more than {limits.max_slow_bytes} bytes of {what}", "max_slow_bytes")
    if pixels > limits.max_slow_pixels:
        raise too_complex(f"more than {limits.max_slow_pixels} pixels of {what}", "max_slow_pixels")
    return Structure(seconds=encoded * SLOW_BYTE_S, pixel_seconds=SLOW_PIXEL_S, header_pixels=pixels)


def _tiff(data: bytes, limits: Limits) -> Structure:
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    at = int(struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0])
    count = int(struct.unpack_from(order + ("Q" if big else "H"), data, at)[0])
    entry, step, first = (order + "HHQ", 20, 8) if big else (order + "HHI", 12, 2)
    count = min(count, (len(data) - at - first) // step)
    _segments(count, limits)
    values, plain, pieces = 0.0, True, -1
    sizes = dict.fromkeys((WIDTH, HEIGHT, TILE_WIDTH, TILE_HEIGHT), 0)
    for index in range(count):
        place = at + first + step * index
        tag, kind, number = struct.unpack_from(entry, data, place)
        # Pillow skips what does not fit.
        if number * TIFF_SIZES.get(kind, 1) <= len(data):
            values += number * (0.01 if kind in TIFF_BYTES else 1.0)
        if tag in (*sizes, COMPRESSION, FILL_ORDER):
            value = 0
            if number == 1 and kind in (SHORT, LONG):
                value = struct.unpack_from(order + ("H" if kind == SHORT else "I"), data, place + step - 4 - 4 * big)[0]
            else:  # said in a way in which decoders may read something else
                plain = False
            if tag in sizes:
                sizes[tag] = max(sizes[tag], value)
            elif value not in (PLAIN_TIFF if tag == COMPRESSION else (1,)):  # bits the other way round: all is copied
                plain = False
        elif tag in PIECES:
            pieces = max(pieces, _sum(data, order, kind, number, place + step - 4 - 4 * big, big=big))
    # A tile is decoded whole, however little of it the image needs.
    pixels, tile = sizes[WIDTH] * sizes[HEIGHT], sizes[TILE_WIDTH] * sizes[TILE_HEIGHT]
    seconds = count * SEGMENT_S + values * 2e-6 + tile * PIXEL_S["TIFF"]
    # Where strips or tiles share bytes, or nobody says how many they have, the same ones may be decoded over and over.
    plain = plain and 0 <= pieces <= len(data)
    return Structure(seconds, tile * TILE_PIXEL_BYTES, unbounded=not plain, header_pixels=pixels + tile)


def _sum(data: bytes, order: str, kind: int, number: int, place: int, *, big: bool) -> int:
    """The sum of a TIFF tag's whole numbers; -1 where it cannot be told."""
    size = {SHORT: 2, LONG: 4, 16: 8}.get(kind, 0)
    if number * size > (8 if big else 4):
        place = struct.unpack_from(order + ("Q" if big else "I"), data, place)[0]
    if not size or not number or place + number * size > len(data):
        return -1
    # In floating point: sizes that are made for it would add up to little in any integer.
    return int(np.frombuffer(data, f"{order}u{size}", number, place).sum(dtype=np.float64))


def _webp(data: bytes, limits: Limits) -> Structure:  # noqa: ARG001 - as the others
    # Lossless images, and alpha channels, may bring tables that take far more than their pixels.
    kind, pixels = data[12:16], math.inf
    if kind == b"VP8X":
        pixels = (1 + int.from_bytes(data[24:27], "little")) * (1 + int.from_bytes(data[27:30], "little"))
    elif kind == b"VP8L":
        sizes = int.from_bytes(data[21:25], "little")
        pixels = (1 + (sizes & 0x3FFF)) * (1 + (sizes >> 14 & 0x3FFF))
    return Structure(unbounded=kind != b"VP8 ", header_pixels=pixels)


def _avif(data: bytes, limits: Limits) -> Structure:  # noqa: ARG001 - as the others
    # The frame inside has a size of its own, which the container need not tell.
    sizes = [struct.unpack(">II", found[1]) for found in SIZE_PROPERTY.finditer(data, 0, SHORT_HEAD)]
    return Structure(unbounded=True, header_pixels=max((wide * high for wide, high in sizes), default=math.inf))


LOOKS: dict[str, Callable[[bytes, Limits], Structure]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "GIF": _gif,
    "BMP": _bmp,
    "PPM": _ppm,
    "TIFF": _tiff,
    "WebP": _webp,
    "AVIF": _avif,
}
