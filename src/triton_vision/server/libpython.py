"""Finding the shared library of a Python, which Triton's Python stub is linked against.

Standard library only, and loadable by path: set-up runs it with each Python that it considers.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def library_name() -> str:
    """The soname that the stub for this Python asks for, such as ``libpython3.11.so.1.0``."""
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def find_libpython() -> Path | None:
    """The shared library of the running Python, or None where it was built or packaged without one."""
    name = library_name()
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        os.path.join(sys.base_prefix, "lib"),
        "/usr/lib/x86_64-linux-gnu",
        "/usr/local/lib",
        "/usr/lib64",
        "/usr/lib",
    ]
    for folder in folders:
        if folder and os.path.isfile(os.path.join(folder, name)):
            return Path(folder, name)
    return None
