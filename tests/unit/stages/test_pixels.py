"""Pixels within 1 of 255 of the recipe, for every kind of file that a decoder meets."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SAMPLES, encoded, noise
from tests.unit.stages.test_jpeg import difference, recipe
from triton_vision.stages import read_pixels
from triton_vision.stages.resize import FILTERS, Frame, crop_origin, resize_crop, resized_size, vertical_first

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand, for the bit depths that Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(
    ("depth", "colour", "channels"),
    [(1, 0, 1), (2, 0, 1), (4, 0, 1), (8, 0, 1), (8, 2, 3), (16, 2, 3), (8, 4, 2), (16, 4, 2), (8, 6, 4), (16, 6, 4)]
    + [(depth, 3, 1) for depth in (1, 2, 4, 8)],
)
def test_png_of_every_colour_type_and_bit_depth(depth: int, colour: int, channels: int) -> None:
    width, height = 61, 47
    generator = np.random.default_rng(depth * 10 + colour)
    row = (width * depth * channels + 7) // 8
    rows = b"".join(b"\0" + generator.bytes(row) for _ in range(height))
    chunks = []
    if colour == 3:
        chunks = [(b"PLTE", generator.bytes(3 * 2**depth)), (b"tRNS", generator.bytes(2**depth))]
    assert difference(png(width, height, depth, colour, rows, *chunks)) <= 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_shifted(kind: str) -> None:
    wide = np.random.default_rng(1).integers(0, 65536, (300, 280), np.uint16)
    grey = Image.fromarray((wide >> 8).astype(np.uint8))
    data = encoded(Image.fromarray(wide), kind)
    assert np.abs(read_pixels(data).astype(int) - recipe(encoded(grey, "PNG"))).max() <= 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_deflate"}),
        ("TIFF", {"save_all": True, "append_images": [noise(9, (333, 222))]}),
        ("GIF", {"save_all": True, "append_images": [noise(9, (333, 222))], "duration": 40}),
        ("WEBP", {"save_all": True, "append_images": [noise(9, (333, 222))], "quality": 80}),
        ("PNG", {"save_all": True, "append_images": [noise(9, (333, 222))]}),
        ("MPO", {"save_all": True, "append_images": [noise(9, (333, 222))]}),
        ("AVIF", {"quality": 70}),
        ("BMP", {}),
        ("PPM", {}),
    ],
)
def test_other_formats(kind: str, options: dict[str, Any]) -> None:
    data = encoded(noise(4, (333, 222)), kind, **options)
    assert difference(data) <= 1
    assert difference(data + b"something behind the end") <= 1


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (3, 2000), (2000, 3), (223, 225), (256, 255), (1000, 257)])
@pytest.mark.parametrize("name", list(FILTERS))
def test_sizes(size: tuple[int, int], name: str) -> None:
    # Where the resized whole is large, rounding the crop's place costs filters that overshoot another level.
    most = 1 if name in ("bilinear", "hamming") or max(size) < 1500 else 2
    assert difference(encoded(noise(5, size), "PNG"), FILTERS[name]) <= most


@pytest.mark.parametrize("size", [(1, 65000), (65000, 1)])
def test_a_sliver_of_340_bytes(size: tuple[int, int]) -> None:
    data = encoded(Image.new("L", size, 77), "PNG")
    tracemalloc.start()
    began = time.process_time()
    pixels = read_pixels(data)
    assert time.process_time() - began < 1.0
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert (pixels == 77).all()


def constructed(width: int, height: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    x, y = np.arange(width)[np.newaxis, :], np.arange(height)[:, np.newaxis]
    return {
        "noise": generator.integers(0, 256, (height, width)),
        "extremes": generator.integers(0, 2, (height, width)) * 255,
        "gradient": (x * 255 // width + y * 255 // height) // 2,
        "stripes": ((x // 3) % 2) * 255 + 0 * y,
        "checks": ((x + y) % 2) * 255,
        "rings": (np.hypot(x - width / 2, y - height / 2) * 7).astype(int) % 256,
        "xor": (x ^ y) % 256,
    }


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (257, 1031), (1200, 290), (97, 131), (640, 480)])
def test_constructed_images(size: tuple[int, int]) -> None:
    for name, values in constructed(*size, 3).items():
        image = Image.fromarray(np.stack([values, 255 - values, values // 2], 2).astype(np.uint8))
        new = resized_size(*size, 256)
        left, top = crop_origin(*new, 224)
        whole = image.resize(new, FILTERS["bilinear"]).crop((left, top, left + 224, top + 224))
        # As Pillow decodes it, and as simplejpeg does: the kernels do only the first pass of the former.
        for pixels in (image, np.asarray(image.convert("RGBA"))):
            got = resize_crop(Frame(pixels, size), 256, 224, FILTERS["bilinear"]).astype(int)
            assert np.abs(got - np.asarray(whole)).max() <= 1, name


@pytest.mark.parametrize(
    "size",
    [(480, 320), (640, 320), (320, 480), (2710, 320), (720, 576), (352, 288), (1575, 576), (2133, 344), (640, 480)],
)
def test_ratios_whose_sums_lie_between_two_values(size: tuple[int, int]) -> None:
    """5/4, 9/8 and their like: where 16-bit weights round whole columns the other way."""
    generator = np.random.default_rng(size[0])
    separable = generator.integers(0, 128, size[0])[np.newaxis, :] + generator.integers(0, 128, (size[1], 1))
    with Image.open(SAMPLES / "palace.jpg") as opened:
        photo = opened.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    for image in (
        photo,
        noise(6, size),
        Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), np.uint8)),
        Image.fromarray(separable.astype(np.uint8)),
    ):
        assert difference(encoded(image, "PNG")) <= 1
        assert difference(encoded(image, "JPEG", quality=92)) <= 1


def test_the_order_of_pillow_s_passes() -> None:
    """``vertical_first`` against Pillow itself, on shapes where the order shows."""
    generator = np.random.default_rng(11)
    told = 0
    for _ in range(120):
        width, height, new_width, new_height = (int(side) for side in generator.integers(30, 500, 4))
        image = Image.fromarray(generator.integers(0, 256, (height, width), np.uint8))
        whole = np.asarray(image.resize((new_width, new_height), FILTERS["bicubic"]))
        rows = image.resize((new_width, height), FILTERS["bicubic"]).resize((new_width, new_height), FILTERS["bicubic"])
        size = (new_width, new_height)
        columns = image.resize((width, new_height), FILTERS["bicubic"]).resize(size, FILTERS["bicubic"])
        is_rows, is_columns = np.array_equal(whole, np.asarray(rows)), np.array_equal(whole, np.asarray(columns))
        if is_rows != is_columns:
            told += 1
            assert vertical_first(width, height, new_width, new_height) == is_columns, (width, height, whole.shape)
    assert told > 100
