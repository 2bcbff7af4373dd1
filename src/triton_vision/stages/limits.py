"""What is decoded at all, and what counts as quick."""

from __future__ import annotations

from dataclasses import dataclass

from triton_vision.stages.errors import ImageRefused

# What `formats` may list -> Pillow's decoder. MPO is a JPEG with further ones behind it, APNG a PNG.
DECODERS = {
    "JPEG": "JPEG",
    "MPO": "MPO",
    "PNG": "PNG",
    "WebP": "WEBP",
    "GIF": "GIF",
    "BMP": "BMP",
    "TIFF": "TIFF",
    "PPM": "PPM",
    "AVIF": "AVIF",
}
MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What is decoded at all; whatever exceeds a limit is refused by what its first look says.

    Attributes:
        formats: of DECODERS; anything else is refused unopened.
        max_bytes: of the encoded file.
        max_pixels: width times height, as the header declares them.
        max_scans: of a JPEG. Ordinary progressive ones have about ten; each takes time for every block of the image.
        max_segments: a JPEG's segments, a PNG's chunks beside its image data, a GIF's blocks, a TIFF's tags.
        max_slow_bytes, max_slow_pixels: of a file whose decoder is written in Python and takes microseconds for each
            byte and pixel: run-length BMP, plain-text PPM, a PPM whose highest value is neither 255 nor 65535.
        max_pixels_per_byte: of the encoded file. One colour throughout, as a WebP, has a million.
        max_memory: bytes that decoding one image may take.
        max_seconds: of CPU that decoding one image may take.
    """

    formats: tuple[str, ...] = tuple(DECODERS)
    max_bytes: int = 32 * MIB
    max_pixels: int = 100_000_000
    max_scans: int = 256
    max_segments: int = 5000
    max_slow_bytes: int = MIB
    max_slow_pixels: int = 4_000_000
    max_pixels_per_byte: int = 100_000
    max_memory: int = 512 * MIB
    max_seconds: float = 10.0

    def check_size(self, width: int, height: int, encoded: int) -> None:
        """Raises ImageRefused for an image that has too many pixels, or too many for its ``encoded`` bytes."""
        pixels = width * height
        if pixels > self.max_pixels:
            raise too_many_pixels(f"{width}x{height}", self)
        if pixels > self.max_pixels_per_byte * encoded:
            raise too_complex(f"more than {self.max_pixels_per_byte} pixels for each byte", "max_pixels_per_byte")

    def check_memory(self, needed: float) -> None:
        """Raises ImageRefused for an image that takes more bytes than one may."""
        if needed > self.max_memory:
            raise too_complex(
                f"decoding takes about {needed / 1e6:.0f} MB of memory, more than {self.max_memory / 1e6:.0f} MB",
                "max_memory",
            )


@dataclass(frozen=True)
class Quick:
    """What may be decoded in the stage's own process, where it holds up everything behind it."""

    seconds: float = 0.1
    bytes: int = 64 * MIB


class TakesLong(Exception):
    """Raised instead of decoding an image that is not quick.

    Attributes:
        seconds: of CPU, estimated.
        bytes: of memory, estimated.
        sure: whether the estimate is more than a guess.
    """

    def __init__(self, seconds: float, bytes: float, *, sure: bool = True) -> None:
        self.seconds = seconds
        self.bytes = bytes
        self.sure = sure
        super().__init__(f"about {seconds:.1f} s and {bytes / 1e6:.0f} MB")


def too_many_pixels(what: str, limits: Limits) -> ImageRefused:
    """The refusal of an image for its size."""
    return ImageRefused("too_many_pixels", f"{what}, and at most {limits.max_pixels} pixels are accepted")


def too_complex(what: str, limit: str) -> ImageRefused:
    """The refusal of an image that costs more than its size suggests; ``limit`` is the parameter that says so."""
    return ImageRefused("too_complex", f"{what} (the server's {limit})")
