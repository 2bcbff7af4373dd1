"""Says whether the Python that runs this can carry the suite; prints the reason and exits 1 if not.

Written for any Python from 2.7, since it has to run in those that it refuses.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def reason():  # type: ignore[no-untyped-def]  # annotations are Python 3
    """Why this Python will not do, in a few words with the mend; empty if it will."""
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        return "is Python " + version
    if sys.implementation.name != "cpython":
        return "is not CPython"
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            return "lacks %s (apt-get install python%s-venv)" % (module, version)  # noqa: UP031
    import runpy

    found = runpy.run_path(os.path.join(HERE, "..", "src", "triton_vision", "server", "libpython.py"))
    if found["find_libpython"]() is None:
        return "lacks %s (apt-get install libpython%s)" % (found["library_name"](), version)  # noqa: UP031
    return ""


if __name__ == "__main__":
    why = reason()  # type: ignore[no-untyped-call]
    if why:
        print(why)
        sys.exit(1)
