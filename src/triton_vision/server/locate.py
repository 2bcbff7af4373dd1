"""Finding a tritonserver: the one in ``/opt/tritonserver``, else the embedded one that a wheel carries."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from triton_vision.server.errors import SetupError
from triton_vision.server.libpython import find_libpython, library_name

SYSTEM_HOME = Path("/opt/tritonserver")
MINIMUM_GLIBC = (2, 35)


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started.

    Attributes:
        binary: the executable.
        backends: backend name -> its folder, of every backend that is there.
        library_path: folders that the loader has to search first.
        stub: the Python backend's stub where it does not lie in the backend's own folder.
        libpython: the shared library that this stub needs, where the loader would not find it.
        embedded: whether it comes from the wheel.
    """

    binary: Path
    backends: dict[str, Path]
    library_path: tuple[Path, ...] = ()
    stub: Path | None = None
    libpython: Path | None = None
    embedded: bool = False

    @property
    def home(self) -> Path:
        """The server's folder, which holds ``bin``."""
        return self.binary.parents[1]

    def environment(self, run: Path) -> dict[str, str]:
        """The environment for tritonserver; ``run`` is the run-time folder that ``link_backends`` filled."""
        environment = dict(os.environ)
        if self.embedded:
            folders = [*map(str, self.library_path), str(run / "lib"), environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = ":".join(folder for folder in folders if folder)
            # The stub embeds Python, which takes its prefix from the first python3 on PATH: ours.
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
            environment.pop("PYTHONHOME", None)
        return environment

    def link_backends(self, run: Path) -> Path:
        """Makes the backend directory that tritonserver is pointed to; returns its path."""
        if not self.embedded:
            return self.backends["python"].parent if "python" in self.backends else self.binary.parents[1] / "backends"
        folder = run / "backends" / "python"
        folder.mkdir(parents=True)
        for entry in self.backends["python"].iterdir():
            (folder / entry.name).symlink_to(entry)
        assert self.stub is not None
        assert self.libpython is not None
        (folder / self.stub.name).symlink_to(self.stub)
        (run / "lib").mkdir()
        (run / "lib" / library_name()).symlink_to(self.libpython)
        return folder.parent


def find_installation(home: Path = SYSTEM_HOME) -> Installation:
    """The server to start: ``home`` (or ``$TRITON_SERVER_HOME``) where it has one, else the embedded one.

    Raises:
        SetupError: there is neither, or the embedded one cannot run here; the message says what to do.
    """
    home = Path(os.environ.get("TRITON_SERVER_HOME", home))
    binary = home / "bin" / "tritonserver"
    if os.access(binary, os.X_OK):
        backends = home / "backends"
        names = sorted(entry for entry in backends.iterdir() if entry.is_dir()) if backends.is_dir() else []
        return Installation(binary=binary, backends={entry.name: entry for entry in names})
    return _embedded()


def _embedded() -> Installation:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise SetupError(
            f"the embedded Triton runs on x86-64 Linux only and this is {platform.machine()} {sys.platform}: "
            "use the container image instead"
        )
    glibc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    found = tuple(int(part) for part in (glibc or "glibc 0.0").split()[1].split("."))
    if found < MINIMUM_GLIBC:
        raise SetupError(
            f"the embedded Triton needs glibc 2.35 or newer and this machine has {glibc or 'another libc'}: "
            "use Ubuntu 22.04, Debian 12 or newer, or the container image"
        )
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("there is no tritonserver here: run 'make setup', which brings the embedded one")
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise SetupError(
            f"the embedded Triton's Python backend misreads arrays of numpy 2 and this environment has {numpy}: "
            "install numpy 1.26 (pip install 'numpy<2')"
        )
    package = Path(spec.submodule_search_locations[0])
    home = package / "tritonserver"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise SetupError(f"the embedded Triton has no Python stub for Python {version}: use Python 3.10, 3.11 or 3.12")
    libpython = find_libpython()
    if libpython is None:
        raise SetupError(
            f"{library_name()} is not there, which Triton's Python stub needs: "
            f"install it (apt-get install libpython{version}), or use another Python"
        )
    return Installation(
        binary=home / "bin" / "tritonserver",
        backends={"python": home / "backends" / "python"},
        library_path=(package.parent / "nvidia_pytriton.libs",),
        stub=stub,
        libpython=libpython,
        embedded=True,
    )
