"""Decoding: every kind of file that Pillow opens to the right pixels, everything else to the right reason."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import encoded, jpeg, noise
from triton_vision.stages import ImageRefused, read_pixels
from triton_vision.stages.decode import decode, sniff
from triton_vision.stages.limits import Limits

# What a stage does in its own process: Pillow's remarks on files that it then serves are no news.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
LIMITS = Limits()
EXIF_TRANSFORMS: dict[int, Any] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
    9: lambda a: a,
}


def pixels(data: bytes, limits: Limits = LIMITS, **options: bool) -> np.ndarray[Any, Any]:
    return np.asarray(decode(data, limits, **options))


def refusal(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(ImageRefused) as caught:
        decode(data, limits)
    assert "/" not in caught.value.detail
    assert "object at" not in caught.value.detail
    return caught.value.reason


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"subsampling": "4:4:4"}),
        ("JPEG", "RGB", {"subsampling": "4:1:1"}),
        ("JPEG", "RGB", {"restart_marker_blocks": 2}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "1", {}),
        ("PNG", "L", {}),
        ("PNG", "LA", {}),
        ("PNG", "P", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("GIF", "P", {}),
        ("WEBP", "RGB", {"quality": 80}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("TIFF", "CMYK", {}),
        ("PPM", "RGB", {}),
        ("PPM", "L", {}),
        ("AVIF", "RGB", {"quality": 80}),
    ],
)
def test_equals_pillow(kind: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(noise(1).convert(mode), kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(pixels(data), expected)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(noise(2), kind, exif=exif, **options)
    plain = pixels(data, orient=False)
    np.testing.assert_array_equal(pixels(data), EXIF_TRANSFORMS.get(orientation, lambda a: a)(plain))


def test_damaged_exif_is_ignored() -> None:
    data = bytearray(encoded(noise(2), "JPEG"))
    segment = b"Exif\0\0MM\0*\xff\xff\xff\xff junk"
    data[2:2] = b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment
    np.testing.assert_array_equal(pixels(bytes(data)), pixels(encoded(noise(2), "JPEG")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_shifted_and_never_clipped(kind: str) -> None:
    wide = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    data = encoded(Image.fromarray(wide), kind)
    np.testing.assert_array_equal(pixels(data), np.repeat((wide >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})])
def test_first_frame_of_several(kind: str, options: dict[str, Any]) -> None:
    first, second = noise(1), noise(2)
    data = encoded(first, kind, save_all=True, append_images=[second], **options)
    alone = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(pixels(data), alone)
    assert np.abs(alone.astype(int) - np.asarray(first)).mean() < 10


def test_mpo() -> None:
    data = encoded(noise(1), "MPO", save_all=True, append_images=[noise(2)])
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_bytes_behind_the_end_do_no_harm() -> None:
    for kind in ("JPEG", "PNG"):
        data = encoded(noise(1), kind)
        np.testing.assert_array_equal(pixels(data + b"trailing" * 100), pixels(data))


def test_truncated() -> None:
    for data in (jpeg(1), encoded(noise(1), "PNG"), encoded(noise(1), "JPEG", progressive=True)):
        assert refusal(data[: len(data) // 2]) == "truncated"
    assert refusal(jpeg(1)[:40]) == "truncated"
    assert refusal(encoded(noise(1), "PNG")[:20]) == "truncated"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("PNG", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("AVIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("PPM", {}),
        ("BMP", {}),
    ],
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_cut_anywhere_is_truncated(kind: str, options: dict[str, Any], share: float) -> None:
    data = encoded(noise(1), kind, **options)
    assert refusal(data[: int(len(data) * share)]) == "truncated"


@pytest.mark.parametrize(
    "data",
    [
        b"hello, world",
        b"\0" * 100,
        b"<html><body></body></html>",
        b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7 ...",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic",
        b"\0\0\1\0\1\0",
        b"8BPS\0\1",
        b"\xff\x0a jpeg xl",
    ],
)
def test_what_is_not_on_the_list_is_refused_unopened(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    assert refusal(data) == "unsupported_format"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF"])
def test_an_image_that_is_still_wrapped_is_told_how_to_unwrap(kind: str) -> None:
    text = base64.b64encode(encoded(noise(1), kind))
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + encoded(noise(1), kind) + b"\r\n--x--\r\n"
    for data, words in (
        (b"data:image/jpeg;base64," + text, "this is a data URL: send the bytes"),
        (b"\n" + text, "this is base64 text: send the bytes"),
        (form, "this is a multipart form: send the bytes"),
    ):
        with pytest.raises(ImageRefused, match=words) as refused:
            decode(data, LIMITS)
        assert refused.value.reason == "unsupported_format"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"])
def test_a_file_cut_within_its_header_is_truncated(kind: str) -> None:
    data = encoded(noise(1), kind)
    first = 12 if kind in ("WEBP", "AVIF") else 8 if kind == "PNG" else 6
    assert {cut: refusal(data[:cut]) for cut in range(first, 60)} == dict.fromkeys(range(first, 60), "truncated")


@pytest.mark.parametrize(("kind", "magic"), [("TIFF", b"II\0*"), ("PPM", b"P6")])
def test_signatures_are_as_wide_as_pillow_s(kind: str, magic: bytes) -> None:
    data = encoded(noise(1), kind)
    np.testing.assert_array_equal(pixels(magic + data[len(magic) :]), pixels(data))


def test_heic_is_refused_by_name() -> None:
    with pytest.raises(ImageRefused, match="HEIC is not accepted"):
        decode(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", LIMITS)


def test_avif_among_the_generic_heif_brands() -> None:
    assert sniff(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avif") == "AVIF"


def test_formats_can_be_narrowed() -> None:
    assert refusal(encoded(noise(1), "PNG"), Limits(formats=("JPEG",))) == "unsupported_format"
    assert pixels(jpeg(1), Limits(formats=("JPEG",))).shape == (240, 320, 3)


def test_limits() -> None:
    assert refusal(b"") == "empty"
    assert refusal(jpeg(1), Limits(max_bytes=100)) == "too_large"
    assert refusal(jpeg(1), Limits(max_pixels=320 * 240 - 1)) == "too_many_pixels"
    assert pixels(jpeg(1), Limits(max_pixels=320 * 240)).shape == (240, 320, 3)


def test_a_png_that_declares_30000x30000_is_refused_by_its_header() -> None:
    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + b"\0\0\0\4IDATjunk"
    )
    assert refusal(data) == "too_many_pixels"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers(value: float) -> None:
    data = encoded(Image.fromarray(np.full((8, 8), value, np.float32)), "TIFF")
    assert refusal(data) == "corrupt"


@pytest.mark.parametrize("error", [RuntimeError("/secret/path"), SystemError("x"), KeyError(3), RecursionError("deep")])
def test_whatever_a_decoder_raises_is_a_refusal(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(1)

    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("simplejpeg.decode_jpeg", load)
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data))))
    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert refusal(data) == "corrupt"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_mutated_files_are_served_or_refused_as_pillow_does(kind: str) -> None:
    """Seeded: 60 mutations of a small file of each format; nothing but ImageRefused may come out."""
    original = encoded(noise(3, (48, 40)), kind)
    for seed in range(60):
        generator = np.random.default_rng(seed)
        data = np.frombuffer(original, np.uint8).copy()
        spots = generator.integers(0, len(data), generator.integers(1, 8))
        data[spots] = generator.integers(0, 256, len(spots))
        mutated = data.tobytes()[: generator.integers(1, len(data)) if seed % 5 == 0 else None]
        try:
            with Image.open(io.BytesIO(mutated), formats=(kind, "MPO")) as image:
                expected = np.asarray(image.convert("RGB")) if image.size[0] * image.size[1] < 1e6 else None
        except Exception:  # noqa: BLE001 - Pillow refuses it, with whatever
            expected = None
        try:
            served = decode(mutated, Limits(max_pixels=999_999))
        except ImageRefused:
            served = None
        assert (served is None) == (expected is None), (kind, seed)


def chunk(kind: bytes, body: bytes, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(kind + body) if checksum is None else checksum
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"iCCP", b"sRGB\0\0" + zlib.compress(bytes(100)), 1),
        chunk(b"iCCP", b"sRGB\0\0" + zlib.compress(bytes(5_000_000))),
        chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2_000_000))),
        chunk(b"iTXt", b"key\0\1\0\0\0" + zlib.compress(bytes(2_000_000))),
        chunk(b"tEXt", b"key\0value", 1),
        chunk(b"pHYs", b"x"),
        chunk(b"eXIf", b"x", 1),
    ],
)
def test_a_png_with_a_damaged_extra_is_decoded_without_it(extra: bytes) -> None:
    image = encoded(noise(1), "PNG")
    np.testing.assert_array_equal(read_pixels(image[:33] + extra + image[33:]), read_pixels(image))


def test_what_a_png_s_pixels_need_is_not_left_out() -> None:
    upright, exif = noise(1), Image.Exif()
    exif[0x0112] = 6
    turned = encoded(upright, "PNG", exif=exif)
    odd = turned[:33] + chunk(b"tEXt", b"key\0value", 1) + turned[33:]
    np.testing.assert_array_equal(read_pixels(odd), read_pixels(turned))
    assert not np.array_equal(read_pixels(odd), read_pixels(encoded(upright, "PNG")))
    broken = bytearray(odd)
    broken[-20] ^= 1
    with pytest.raises(ImageRefused, match="corrupt"):
        read_pixels(bytes(broken))
