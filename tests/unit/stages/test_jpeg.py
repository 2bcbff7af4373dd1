"""The JPEG path of its own: Pillow's pixels, or Pillow's verdict."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.conftest import encoded, jpeg, noise
from triton_vision.stages import ImageRefused, Recipe, read_pixels
from triton_vision.stages import jpeg as plain
from triton_vision.stages.decode import read_frame
from triton_vision.stages.limits import Limits
from triton_vision.stages.resize import FILTERS, crop_origin, resized_size

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def recipe(data: bytes, resample: Image.Resampling = Image.Resampling.BILINEAR) -> Any:
    """Pillow alone: turned, the whole resized, then cropped."""
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    size = resized_size(*image.size, 256)
    left, top = crop_origin(*size, 224)
    return np.asarray(image.resize(size, resample).crop((left, top, left + 224, top + 224))).astype(int)


def difference(data: bytes, resample: Image.Resampling = Image.Resampling.BILINEAR) -> int:
    return int(np.abs(read_pixels(data, Recipe(resample=resample)).astype(int) - recipe(data, resample)).max())


def is_plain(data: bytes) -> bool:
    return isinstance(read_frame(data, Limits()).pixels, np.ndarray)


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"progressive": True},
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0"},
        {"subsampling": "4:1:1"},
        {"restart_marker_blocks": 3},
        {"optimize": True},
        {"quality": 5},
        {"comment": b"a comment"},
        {"icc_profile": b"no real profile"},
        {"dpi": (300, 300)},
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_ordinary_jpegs_take_it(mode: str, options: dict[str, Any]) -> None:
    if mode == "L" and "subsampling" in options:
        options = {}
    data = encoded(noise(1, (401, 299)).convert(mode), "JPEG", **options)
    assert is_plain(data)
    assert difference(data) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(400, 301), (301, 400), (999, 77), (64, 2001), (256, 256), (224, 300)])
@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
def test_every_orientation_without_turning_the_whole(orientation: int, size: tuple[int, int], name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(orientation, size), "JPEG", exif=exif)
    assert is_plain(data)
    assert difference(data, FILTERS[name]) <= 1


def test_what_is_not_plain_goes_to_pillow() -> None:
    whole = jpeg(1)
    cmyk = encoded(noise(1).convert("CMYK"), "JPEG")
    scan = whole.index(b"\xff\xda")
    body = scan + 2 + struct.unpack(">H", whole[scan + 2 : scan + 4])[0]
    stray = whole[: body + 200] + b"\xff\xd3" + whole[body + 200 :]
    filled = whole[:2] + b"\xff" + whole[2:]
    for data in (cmyk, filled, stray):
        assert not is_plain(data)
        np.testing.assert_array_equal(
            np.asarray(read_frame(data, Limits()).upright()), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        )


def test_a_frame_s_header_is_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: pytest.fail("it was decoded"))
    data = bytearray(jpeg(1))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 60000, 60000)
    with pytest.raises(ImageRefused, match="too_many_pixels: 60000x60000"):
        read_frame(bytes(data), Limits())


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
def test_a_cut_file_is_not_served_half_grey(cut: float) -> None:
    data = jpeg(1)
    with pytest.raises(ImageRefused, match="truncated"):
        read_frame(data[: int(len(data) * cut)], Limits())


def test_headers_that_are_not_in_order() -> None:
    whole = jpeg(1)
    header = plain.read_header(whole)
    assert header == plain.Header(320, 240, True, True)
    assert plain.read_header(whole[:2] + segment(0xE1, b"Exif\0\0") + whole[2:]) == plain.Header(320, 240, False, True)
    frame = whole.index(b"\xff\xc0")
    for bad in (
        whole[:20],
        whole[:frame] + segment(0xC0, b"\x08") + whole[frame:],  # a second, short frame header
        whole[:frame] + b"\xff\xc3" + whole[frame + 2 :],  # lossless
        whole[: frame + 4] + b"\x0c" + whole[frame + 5 :],  # 12 bits
        whole[:2] + b"\xff\xe0\0\0" + whole[2:],  # a segment of length 0
    ):
        assert plain.read_header(bad) is None


@pytest.mark.parametrize(
    ("marker", "content"),
    [(0xE0, b"JFIF\0\1"), (0xE2, b"ICC_PROFILE\0\1"), (0xEE, b"Adobe\0"), (0xE0, b""), (0xEE, b"")],
)
def test_segments_that_are_too_short_are_judged_by_pillow(marker: int, content: bytes) -> None:
    data = jpeg(1)
    data = data[:2] + segment(marker, content) + data[2:]
    try:
        Image.open(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - it refuses, with whatever
        with pytest.raises(ImageRefused, match="corrupt"):
            read_pixels(data)
    else:
        assert difference(data) <= 1


@pytest.mark.parametrize("kind", [(5, "II", (6, 1)), (12, "d", (6.0,)), (11, "f", (6.0,)), (4, "I", (6,))])
def test_orientation_stored_as_any_kind_of_number(kind: tuple[int, str, tuple[float, ...]]) -> None:
    number, layout, values = kind
    content = struct.pack("<" + layout, *values)
    inline = content if len(content) <= 4 else struct.pack("<I", 26)
    entry = struct.pack("<IHHHI", 8, 1, 0x112, number, 1) + inline + bytes(4) + (content if len(content) > 4 else b"")
    data = jpeg(1)
    data = data[:2] + segment(0xE1, b"Exif\0\0II*\0" + entry) + data[2:]
    assert difference(data) <= 1
    assert np.abs(read_pixels(data).astype(int) - read_pixels(jpeg(1))).max() > 50


def test_fast_decoding_is_only_for_large_images_and_close() -> None:
    small, large = jpeg(1, (500, 375)), jpeg(2, (4000, 3000))
    fast = Recipe(fast=True)
    np.testing.assert_array_equal(read_pixels(small, fast), read_pixels(small))
    frame = read_frame(large, Limits(), short=256)
    assert isinstance(frame.pixels, np.ndarray)
    assert frame.pixels.shape == (375, 500, 4)
    assert np.abs(read_pixels(large, fast).astype(int) - read_pixels(large)).mean() < 1


def test_threads_do_not_share_what_they_decode_into() -> None:
    from concurrent.futures import ThreadPoolExecutor

    files = [jpeg(seed, (300 + seed, 280)) for seed in range(8)]
    expected = [read_pixels(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for got, wanted in zip(pool.map(read_pixels, files * 20), expected * 20, strict=True):
            np.testing.assert_array_equal(got, wanted)
