"""Libraries that write lines of their own about every odd file: no news for an operator, and a flood in an attack."""

from __future__ import annotations

import ctypes
import logging
import re
import warnings
from pathlib import Path

from PIL import features


def silence_decoders(maps: Path = Path("/proc/self/maps")) -> None:
    """Ends Pillow's warnings and log, and libtiff's messages on stderr; for a process that serves one stage alone.

    What is wrong with a file that is refused reaches its caller, the metrics and the log by way of the kit.
    """
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)
    if not features.check("libtiff"):
        return
    # libtiff keeps its handlers in the library itself: that which Pillow has loaded is to be told, no other.
    for path in sorted(set(re.findall(r"(/\S*libtiff\S*\.so\S*)$", maps.read_text(), re.MULTILINE))):
        library = ctypes.CDLL(path)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            handler = getattr(library, name)
            handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
            handler(None)
