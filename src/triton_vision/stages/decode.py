"""From an encoded file to upright 8-bit RGB, or to the reason why not."""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image

from triton_vision.stages import jpeg
from triton_vision.stages.errors import ImageRefused
from triton_vision.stages.limits import DECODERS, Limits, Quick, TakesLong, too_complex, too_many_pixels
from triton_vision.stages.png import without_extras
from triton_vision.stages.resize import UPRIGHT, Frame
from triton_vision.stages.structure import Structure, inspect
from triton_vision.stages.truncation import is_cut

SIGNATURES: tuple[tuple[str, re.Pattern[bytes]], ...] = tuple(
    (name, re.compile(pattern, re.DOTALL))
    for name, pattern in (
        ("JPEG", rb"\xff\xd8\xff"),
        ("PNG", rb"\x89PNG\r\n\x1a\n"),
        ("GIF", rb"GIF8[79]a"),
        ("WebP", rb"RIFF....WEBP"),
        ("TIFF", rb"II(\*\0|\0\*|\+\0)|MM(\0\*|\*\0|\0\+)"),
        ("BMP", rb"BM"),
        ("PPM", rb"P[0-6fy]"),
        ("AVIF", rb"....ftypavi[fs]"),
        ("HEIC", rb"....ftyp(hei[cxms]|hev[cxms])"),
        ("JPEG XL", rb"\xff\x0a|\0\0\0\x0cJXL "),
        ("JPEG 2000", rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
        ("PSD", rb"8BPS"),
        ("ICO", rb"\0\0[\1\2]\0"),
        ("PDF", rb"%PDF"),
        ("EPS", rb"%!PS|\xc5\xd0\xd3\xc6"),
        ("HTML", rb"\s*<(!doctype html|html|head|body)"),
    )
)
ORIENTATION_TAG = 0x0112
# How files of JPEG, PNG, GIF, WebP (RIFF) and TIFF begin in base64 (RFC 4648).
BASE64 = (b"/9j/", b"iVBORw0K", b"R0lGOD", b"UklGR", b"SUkqA", b"TU0AK")


def sniff(data: bytes) -> str:
    """The format that the first bytes announce, whatever the file is called; empty if none is known."""
    head = data[:512]
    if head[4:8] == b"ftyp" and head[8:12] in (b"mif1", b"msf1"):
        # The generic HEIF brands: which of the two it is, stands among the compatible brands.
        size = int.from_bytes(head[:4], "big")
        brands = [head[at : at + 4] for at in range(16, min(size, len(head)), 4)]
        return "AVIF" if b"avif" in brands else "HEIC"
    known = next((name for name, pattern in SIGNATURES if pattern.match(head)), "")
    # A pattern for what may precede an SVG's own element would try it in every possible way.
    return known or ("SVG" if b"<svg" in head and head.lstrip().startswith(b"<") else "")


def decode(data: bytes, limits: Limits, *, orient: bool = True) -> Image.Image:
    """The first frame as an RGB image of 8 bits a channel, upright; see ``read_frame``."""
    return read_frame(data, limits, orient=orient).upright()


def read_frame(
    data: bytes, limits: Limits, *, orient: bool = True, short: int = 0, quick: Quick | None = None
) -> Frame:
    """Decodes the first frame, to the pixels that Pillow decodes.

    Args:
        data: one encoded file.
        limits: what may be decoded.
        orient: whether the EXIF orientation is looked for.
        short: 0 for every pixel; else a plain JPEG may be decoded at 1/8, 1/4 or 1/2 of its size, as long as its
            shorter side keeps this many pixels.
        quick: what may be decoded here; None decodes whatever ``limits`` admit.

    Returns:
        8 bits a channel: 16-bit grey scaled by ``>> 8``, every other mode by ``convert("RGB")``. Valid until the same
        thread's next call.

    Raises:
        ImageRefused: with one of the contract's reasons; nothing else is raised for any input without ``quick``.
        TakesLong: it is within the limits, and not quick.
    """
    name = _check(data, limits)
    header = jpeg.read_header(data) if name == "JPEG" else None
    structure = Structure() if header is not None and header.single_scan else inspect(name, data, limits)
    structure.check_quick(name, limits, quick)
    if header is not None:
        structure.check(name, "RGB", (header.width, header.height), len(data), limits, quick)
        if header.plain:
            array = jpeg.decode(data, header, short)
            if array is not None:
                return Frame(array, (header.width, header.height))
    try:
        # The JPEG decoder finds out by itself that a file is an MPO; of that, too, the first frame is wanted.
        with Image.open(io.BytesIO(data), formats=(DECODERS[name],)) as image:
            structure.check(name, image.mode, image.size, len(data), limits, quick)
            if header is not None and not header.plain and image.size == (header.width, header.height):
                # Pillow has read what the segments say; the pixels are still to be had faster.
                orientation = _orientation(image) if orient else 1
                array = jpeg.decode(data, header, short)
                if array is not None:
                    return Frame(array, image.size, orientation)
            image.load()
            # Not before: of some formats this loads the image, and would hide what is wrong with it.
            orientation = _orientation(image) if orient else 1
            return Frame(_to_rgb(image), image.size, orientation)
    except (ImageRefused, TakesLong):
        raise
    except Image.DecompressionBombError:
        raise too_many_pixels("its header declares more", limits) from None
    except MemoryError:
        raise too_complex(f"decoding the {name} takes too much memory", "max_memory") from None
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything at all on hostile input
        plain = without_extras(data) if name == "PNG" else None
        if plain is not None:
            return read_frame(plain, limits, orient=orient, short=short, quick=quick)
        raise _refusal(name, data, error) from None


def _check(data: bytes, limits: Limits) -> str:
    """The format's name, if the bytes may be opened at all."""
    if not data:
        raise ImageRefused("empty", "the file has no bytes")
    if len(data) > limits.max_bytes:
        raise ImageRefused("too_large", f"{len(data)} bytes, and at most {limits.max_bytes} are accepted")
    name = sniff(data)
    accepted = name in limits.formats or (name == "JPEG" and "MPO" in limits.formats)
    if not accepted or name not in DECODERS:
        what = f"{name} is not accepted" if name else _wrapped(data) or "the first bytes match no known image format"
        raise ImageRefused("unsupported_format", f"{what}; send one of {', '.join(limits.formats)}")
    return name


def _wrapped(data: bytes) -> str:
    """In what an image is still wrapped, and how to get it out of there; empty if nothing is known."""
    if data[:5].lower() == b"data:":
        return "this is a data URL: send the bytes that its base64 stands for"
    if data[:64].lstrip().startswith(BASE64):
        return "this is base64 text: send the bytes that it stands for"
    if data.startswith(b"--") and b"content-disposition:" in data[:512].lower():
        return "this is a multipart form: send the bytes of its part alone"
    return ""


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image.copy() if image.readonly else image
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image)
        return Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
        raise ImageRefused("corrupt", "some samples are not finite numbers")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
        # It may be stored as any kind of number, a fraction among them.
        return next((known for known in UPRIGHT if known == value), 1)
    except Exception:  # noqa: BLE001 - damaged EXIF says nothing about the pixels
        return 1


def _refusal(name: str, data: bytes, error: Exception) -> ImageRefused:
    said = str(error).lower()
    cut = isinstance(error, EOFError) or any(
        word in said for word in ("truncated", "premature", "unexpected end", "not enough", "reading past")
    )
    if cut or is_cut(name, data):
        return ImageRefused("truncated", f"the {name} ends before its image does")
    return ImageRefused("corrupt", f"the {name} cannot be decoded")
