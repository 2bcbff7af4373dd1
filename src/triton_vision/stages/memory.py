"""How the C library's allocator is to treat the memory of images."""

from __future__ import annotations

import ctypes

# mallopt's parameters (malloc.h of glibc).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Blocks up to here are kept for the next image; larger ones, such as a 12-megapixel frame, go back at once.
KEPT_BLOCK = 8 * 1024 * 1024
# This much may stay free at the end of the heap before it is given back.
KEPT_HEAP = 32 * 1024 * 1024


def keep_small_blocks() -> bool:
    """Spares small images the page faults of fresh memory; whether the C library knows how.

    glibc takes blocks above 128 kB from the kernel and returns them on ``free``. A 500x375 image has several of those,
    and faulting their pages in costs as much as decoding it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_HEAP))
