"""What a file would cost is known before it is decoded, and looking costs next to nothing."""

from __future__ import annotations

import contextlib
import json
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import encoded, jpeg, noise
from tests.unit.stages import bombs
from triton_vision.stages import ImageRefused, InvalidRequest
from triton_vision.stages import jpeg as plain
from triton_vision.stages.call import read_parameters
from triton_vision.stages.decode import read_frame, sniff
from triton_vision.stages.limits import DECODERS, Limits, Quick, TakesLong
from triton_vision.stages.structure import inspect
from triton_vision.stages.truncation import is_cut

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
# CPU time, so that a busy machine makes no difference; what explodes takes minutes.
SECONDS_PER_MEGABYTE, SECONDS_FOR_ANY = 2.0, 0.1


def spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def refusal(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(ImageRefused) as caught:
        read_frame(data, limits or Limits())
    assert caught.value.reason == "too_complex"
    return caught.value.detail


REFUSED = {
    "scans": (bombs.many_scans(64, 300), "max_scans"),
    "segments": (bombs.inside_jpeg(bombs.segment(0xE3, b"") * 6000), "max_segments"),
    "Exif segments": (bombs.inside_jpeg(bombs.segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0") * 6000), "max_segments"),
    "markers alone": (bombs.inside_jpeg(b"\xff\xd8" * 6000), "max_segments"),
    "fill bytes": (bombs.inside_jpeg(b"\xff" * 6000), "max_segments"),
    "text chunks": (bombs.inside_png(bombs.chunk(b"tEXt", b"x\0") * 6000), "max_segments"),
    "empty image data": (bombs.inside_png(bombs.chunk(b"IDAT", b"") * 6000), "max_segments"),
    "GIF comments": (b"GIF89a\x0a\0\x0a\0\0\0\0" + b"!\xfe\x01a\0" * 6000, "max_segments"),
    "GIF junk": (b"GIF89a\x0a\0\x0a\0\0\0\0" + b"a" * 6000, "max_segments"),
    "TIFF tags": (bombs.tiff(*((tag, 4, 1, 0) for tag in range(6000))), "max_segments"),
    "RLE8, many pixels": (bombs.bmp((100_000_000, 1), 1, 8, b"\xff\1" * 500), "max_slow_pixels"),
    "RLE8, jumps": (bombs.bmp((9000, 9000), 1, 8, b"\0\2\xff\xff" * 500), "max_slow_pixels"),
    "RLE4, many bytes": (bombs.bmp((100, 100), 2, 4, b"\2\1" * 600_000), "max_slow_bytes"),
    "plain PPM": (b"P3\n10 10\n255\n" + b"#\n" * 600_000, "max_slow_bytes"),
    "PGM up to 254": (b"P5\n1100 1100\n254\n" + bytes(1_210_000), "max_slow_bytes"),
    "PPM comment": (b"P6\n#" + b"x" * 1_100_000 + b"\n1 1\n255\nabc", "max_slow_bytes"),
    "comments within a number": (
        b"P6\n1#" + b"x" * 600_000 + b"\n0#" + b"x" * 600_000 + b"\n 1 255 ",
        "max_slow_bytes",
    ),
    "many comments": (b"P6\n1" + b"#\n" * 6000 + b" 1 255 abc", "max_segments"),
    "one colour": (encoded(Image.new("RGB", (9000, 9000)), "WEBP", lossless=True, method=0), "max_pixels_per_byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bombs_are_refused_by_the_limit_that_they_exceed(name: str) -> None:
    data, limit = REFUSED[name]
    limits = Limits(max_pixels_per_byte=10_000) if limit == "max_pixels_per_byte" else Limits()
    assert spent(lambda: refusal(data, limits)) < SECONDS_FOR_ANY
    assert limit in refusal(data, limits)


def test_memory_is_known_from_the_header() -> None:
    webp = encoded(noise(1, (6000, 6000)), "WEBP", quality=1, method=0)
    assert "609 MB" in refusal(webp)
    assert "max_memory" in refusal(encoded(noise(1, (300, 300)), "PNG"), Limits(max_memory=100_000))
    sliver = encoded(Image.new("L", (1, 30_000_000)), "PNG")
    assert "max_memory" in refusal(sliver)
    scans = bombs.many_scans(8800, 2)
    assert "max_memory" not in refusal(bombs.many_scans(64, 300))
    with pytest.raises(TakesLong):
        read_frame(scans, Limits(), quick=Quick())


@pytest.mark.parametrize(
    "data",
    [
        jpeg(1),
        jpeg(1, progressive=True),
        jpeg(1, (4000, 3000)),
        encoded(noise(1), "PNG"),
        encoded(noise(1).convert("P"), "GIF"),
        encoded(noise(1), "BMP"),
        encoded(noise(1), "PPM"),
        encoded(noise(1), "TIFF", compression="tiff_lzw"),
        encoded(noise(1), "WEBP"),
        b"P5 # a comment\n2\t2\n65535\n" + bytes(8),
        encoded(noise(1), "JPEG", icc_profile=bytes(300_000)),
        jpeg(1) + bombs.segment(0xDA, b"") * 9000,  # behind the end of the image
    ],
)
def test_ordinary_files_are_quick(data: bytes) -> None:
    read_frame(data, Limits(), quick=Quick())


@pytest.mark.parametrize(
    "data",
    [
        encoded(noise(1, (4000, 3000)), "PNG", compress_level=1),
        bombs.many_scans(2048, 200),
        bombs.inside_png(bombs.chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(100_000))) * 40),
        bombs.inside_jpeg(bombs.segment(0xE1, b"Exif\0\0" + bytes(65000)) * 40),
        b"P3\n300 300\n255\n" + b"1 " * 270_000,
        encoded(noise(1), "TIFF", compression="jpeg"),
        encoded(noise(1), "AVIF"),
        encoded(noise(1), "WEBP", lossless=True),
        bombs.tiff((256, 3, 1, 100), (257, 3, 1, 100), (266, 3, 1, 2)),
        bombs.tiff((256, 3, 1, 100), (257, 3, 1, 100), (259, 3, 1, 5), (322, 4, 1, 4000), (323, 4, 1, 4000)),
        bombs.tiff((273, 4, 1000, 8))[:-4] + bytes(4000),
    ],
)
def test_what_nothing_bounds_is_not_decoded_where_others_wait(data: bytes) -> None:
    def look() -> None:
        with pytest.raises((TakesLong, ImageRefused)) as caught:
            read_frame(data, Limits(), quick=Quick())
        assert caught.type is TakesLong or len(data) < 5000
        if isinstance(caught.value, TakesLong):
            assert 0.1 < caught.value.seconds <= Limits.max_seconds

    assert spent(look) < SECONDS_FOR_ANY


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("PNG", "RGB", {}),
        ("GIF", "P", {}),
        ("TIFF", "RGB", {"compression": "jpeg"}),
        ("WebP", "RGB", {"lossless": True}),
        ("WebP", "RGBA", {}),
        ("AVIF", "RGB", {"speed": 10}),
    ],
)
def test_what_nothing_bounds_is_taken_at_its_header_s_word(kind: str, mode: str, options: dict[str, Any]) -> None:
    image = noise(1, (130, 70)).convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    data = encoded(image, kind, **options)
    assert inspect(kind, data, Limits()).header_pixels == 130 * 70


def tiff(*tags: tuple[int, int, int, bytes], data: bytes = b"") -> bytes:
    """A little-endian TIFF of those tags (number, type, count, four bytes), with ``data`` behind them."""
    entries = b"".join(struct.pack("<HHI", *tag[:3]) + tag[3] for tag in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4) + data


SIZE = [(256, 3, 1, struct.pack("<I", 16)), (257, 3, 1, struct.pack("<I", 16))]
COUNT = (279, 4, 1, struct.pack("<I", 8))


@pytest.mark.parametrize(
    ("tags", "unbounded"),
    [
        ([*SIZE, COUNT], False),
        (SIZE, True),  # nobody says how many bytes its strips have
        ([*SIZE, (279, 4, 3000, struct.pack("<I", 40))], True),  # 3000 strips of the same bytes
        ([*SIZE, (279, 4, 0, struct.pack("<I", 40))], True),  # none at all
        ([*SIZE, (279, 16, 2, struct.pack("<I", 86))], True),  # sizes that add up to 0 in 64 bits
        ([*SIZE, COUNT, (259, 16, 1, struct.pack("<I", 5))], True),  # a compression that decoders read elsewhere
        ([*SIZE, COUNT, (259, 3, 1, struct.pack("<I", 5))], False),
        ([*SIZE, COUNT, (259, 3, 1, struct.pack("<I", 7))], True),
    ],
)
def test_a_tiff_whose_strips_or_compression_are_odd_is_not_decoded_where_others_wait(
    tags: list[tuple[int, int, int, bytes]], unbounded: bool
) -> None:
    file = tiff(*tags, data=struct.pack("<I", 1_000_000) * 3000)
    wrapping = struct.pack("<QQ", 1 << 63, 1 << 63)
    file = file[:86] + wrapping + file[86 + len(wrapping) :]
    assert inspect("TIFF", file, Limits()).unbounded == unbounded


def test_exif_that_takes_long_is_known_by_its_size() -> None:
    rational = b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 274, 5, 500_000, 26) + bytes(4 + 4_000_000)
    image = encoded(noise(1), "PNG")
    chunk = struct.pack(">I", len(rational)) + b"eXIf" + rational + struct.pack(">I", zlib.crc32(b"eXIf" + rational))
    with pytest.raises(TakesLong) as long:
        read_frame(image[:33] + chunk + image[33:], Limits(), quick=Quick())
    assert long.value.seconds > 1.0
    assert long.value.bytes > 100e6


def test_a_ppm_of_pillow_s_own_kind_is_read_as_pillow_reads_it() -> None:
    with pytest.raises(ImageRefused, match="max_slow_bytes"):
        inspect("PPM", b"P0CMYK\n8000 255\n254\n" + bytes(8_160_000), Limits())


def test_each_limit_can_be_raised() -> None:
    scans = bombs.many_scans(64, 300)
    assert read_frame(scans, Limits(max_scans=301)).size == (64, 64)
    assert read_frame(b"P5\n10 10\n254\n" + bytes(100), Limits(max_slow_bytes=113)).size == (10, 10)


TOKENS = [
    b"<!--", b"-->", b"<!---->", b"<?xml", b">", b" ", b"\n", b"<svg", b"<!DOCTYPE svg", b"<html", b"\xff", b"\xff\xd8",
    b"\xff\xc0\0\x0b\x08\0\x10\0\x10\1\1\x11\0", b"\xff\xe1\0\x08Exif\0\0", b"\xff\xda\0\x08\1\1\0\0\x3f\0", b"\xff\0",
    b"\xff\xd9", b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IDAT\0\0\0\0", b"\0\0\0\0iCCP\0\0\0\0", b"IEND", b"GIF89a",
    b"!\xfe\1a\0", b",", b"P3", b"P6\n1 1\n", b"#\n", b"#", b"9", b"255\n", b"II*\0\x08\0\0\0",
    b"\x11\1\4\0\xff\xff\0\0\x08\0\0\0", b"BM", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x08free", b"\0\0\0\x1cftypavif",
    b"\0", b"\1",
]  # fmt: skip
HEADS = [
    b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(17), b"GIF89a\1\0\1\0\0\0\0",
    b"BM", b"P3 ", b"P6\n", b"II*\0\x08\0\0\0\xff\x10", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x1cftypavif", b"<!--", b"  <",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_every_look_at_untrusted_bytes_takes_linear_time(seed: int) -> None:
    """Seeded: half a megabyte of what parsers trip over, in runs of one token and in random order."""
    generator = np.random.default_rng(seed)
    few = [TOKENS[index] for index in generator.integers(0, len(TOKENS), generator.integers(1, 4))]
    body = b"".join(few[index] for index in generator.integers(0, len(few), 60_000))[:500_000]
    data = HEADS[seed % len(HEADS)] + body

    def look() -> None:
        sniff(data)
        plain.read_header(data)
        for name in DECODERS:
            is_cut(name, data)
            with contextlib.suppress(ImageRefused):
                inspect(name, data, Limits())

    assert spent(look) < SECONDS_PER_MEGABYTE * len(data) / 1e6 + SECONDS_FOR_ANY


def test_the_comments_of_an_svg_are_not_tried_in_every_way() -> None:
    assert spent(lambda: sniff(b"<!---->" * 73)) < SECONDS_FOR_ANY
    assert sniff(b"<!-- one -->  <!-- two --><svg xmlns='x'>") == "SVG"
    assert sniff(b"<?xml version='1.0'?><!DOCTYPE svg><svg>") == "SVG"


@pytest.mark.parametrize("text", ["[" * 200_000, "{" * 200_000, '{"a": ' * 50_000, '{"a": 1' + "0" * 100_000, "1" * 99])
def test_parameters_of_any_kind_are_refused_in_no_time(text: str) -> None:
    def look() -> None:
        with pytest.raises(InvalidRequest):
            read_parameters(text)

    assert spent(look) < SECONDS_FOR_ANY
    assert read_parameters(json.dumps({"top_k": 3})) == {"top_k": 3}
