"""Base images made here, in place of NVIDIA's: what they have in common with those is what Dockerfile.triton relies on.

A minimal Debian, and on it: a real tritonserver with its Python backend in ``/opt/tritonserver``, as the embedded
server's wheel brings it; or torch among the system Python's packages, as the export environment has it. Each is
kept under a name that says of what it was made.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.image.engine import KEPT, ROOT, Engine, EngineError

SUITE = "bookworm"
PYTHON = "3.11"  # the suite's own
PACKAGES = ("ca-certificates", "libpython3.11", "python3", "python3-pip")
SERVER_VERSION = "2.51.0"
SITE_PACKAGES = f"lib/python{PYTHON}/site-packages"

TRITON = f"""
FROM {{system}}
COPY tritonserver /opt/tritonserver
RUN echo {SERVER_VERSION} > /opt/tritonserver/TRITON_VERSION
ENV PATH=/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    LD_LIBRARY_PATH=/opt/tritonserver/lib \\
    TRITON_SERVER_VERSION={SERVER_VERSION}
WORKDIR /opt/tritonserver
"""
# As NVIDIA's PyTorch images do, it limits by its environment what pip may install.
TORCH = f"""
FROM {{system}}
COPY . /usr/local/lib/python{PYTHON}/dist-packages
RUN echo "numpy==1.0" > /etc/pip-constraints.txt
ENV PIP_CONSTRAINT=/etc/pip-constraints.txt
"""


def system(engine: Engine) -> str:
    """Debian with its Python and pip."""
    tag = _tag("system", SUITE, *PACKAGES)
    if engine.has_image(tag):
        return tag
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # It leaves kernel file systems mounted if it is interrupted.
        for mounted in ("proc", "sys"):
            subprocess.run(["umount", f"{folder}/{mounted}"], capture_output=True, check=False)
        if made.returncode != 0:
            raise EngineError(f"debootstrap: exit code {made.returncode}: {made.stdout[-2000:]}")
        pack = ["tar", "-C", folder, "-c", "--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*", "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            engine.docker("import", "-", tag, stdin=tar.stdout.fileno(), timeout=300)
        if tar.returncode != 0:
            raise EngineError(f"tar: exit code {tar.returncode}")
    return tag


def triton(engine: Engine) -> str:
    """The stand-in for nvcr.io/nvidia/tritonserver."""
    requirement = (ROOT / "requirements" / "triton.txt").read_text()
    base = system(engine)
    tag = _tag("triton", base, TRITON, requirement)
    if not engine.has_image(tag):
        packages = next((ROOT / ".venv" / "lib").glob("python3.*")) / "site-packages"
        wheel, libraries = packages / "pytriton" / "tritonserver", packages / "nvidia_pytriton.libs"
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            home = Path(folder, "tritonserver")
            shutil.copytree(libraries, home / "lib")
            shutil.copytree(wheel / "bin", home / "bin")
            shutil.copytree(wheel / "caches", home / "caches")
            backend = home / "backends" / "python"
            shutil.copytree(wheel / "backends" / "python", backend, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy2(wheel / "python_backend_stubs" / PYTHON / "triton_python_backend_stub", backend)
            _build(engine, tag, TRITON.format(system=base), Path(folder))
    return tag


def torch(engine: Engine) -> str:
    """The stand-in for nvcr.io/nvidia/pytorch."""
    packages = ROOT / ".venv-export" / SITE_PACKAGES
    if not (packages / "torch").is_dir():
        raise EngineError(f"there is no {packages}/torch: make .venv-export with Python {PYTHON} (make setup)")
    names = [*sorted(entry.name for entry in packages.glob("torch*")), "functorch"]
    base = system(engine)
    tag = _tag("torch", base, TORCH, *names)
    if not engine.has_image(tag):
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            for name in names:
                shutil.copytree(packages / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            _build(engine, tag, TORCH.format(system=base), Path(folder))
    return tag


def _build(engine: Engine, tag: str, dockerfile: str, context: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
        file.write(dockerfile)
        file.flush()
        engine.docker("build", "--quiet", "--tag", tag, "--file", file.name, str(context), timeout=600)


def _tag(name: str, *parts: str) -> str:
    """A name that changes with what the image is made of."""
    return f"triton-vision-test/{name}:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
