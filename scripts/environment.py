"""Makes or completes the virtual environments: ``environment.py serve|dev|export|bench``.

Standard library only. Every package comes from a hash-pinned file, as a wheel. A finished environment carries a
stamp of what it was made from, so a second run does nothing; one that was interrupted carries none and is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MINIMUM_GLIBC = (2, 35)
HEARTBEAT_S = 10.0
EXPORT = ".venv-export"


@dataclass(frozen=True)
class Layer:
    """One pip run: a requirements file, and pip's further options for it."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the layers it is made of, in order."""

    folder: str
    layers: tuple[Layer, ...]
    projects: tuple[str, ...]


SERVE = (Layer("serve"), Layer("triton", ("--no-deps",)))
# An index that cannot be reached must cost seconds, not minutes: the wheel may also lie in a --find-links folder.
TORCH = Layer("torch-cpu", ("--no-deps", "--extra-index-url", TORCH_INDEX, "--retries", "0", "--timeout", "15"))
ENVIRONMENTS = {
    "serve": Environment(".venv", SERVE, ("client", ".")),
    "dev": Environment(".venv", (*SERVE, Layer("dev")), ("client", ".")),
    "export": Environment(EXPORT, (TORCH, Layer("export")), (".",)),
    # The benchmark's peers: without the suite.
    "bench": Environment(".venv-bench", (Layer("bench"),), ()),
}


class SetupFailure(Exception):
    """Set-up cannot go on; the text is one sentence for the person at the keyboard."""


def check_machine() -> None:
    """Raises SetupFailure where the embedded server could not run whatever is installed."""
    name = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", name or "")
    if not match or (int(match[1]), int(match[2])) < MINIMUM_GLIBC:
        raise SetupFailure(
            f"The embedded Triton needs glibc 2.35 or newer, and this machine has {name or 'another C library'}: "
            "use Ubuntu 22.04, Debian 12 or newer, or the container image."
        )


def stamp_of(environment: Environment) -> str:
    """What an environment is made from: the Python and every file that decides its content."""
    # Any of the Pythons will do to export with (see `main`); the others must have the one that was asked for.
    python = "" if environment.folder == EXPORT else sys.version
    digest = hashlib.sha256(f"{python} {ROOT}".encode())
    for layer in environment.layers:
        digest.update(layer.file.read_bytes())
    for project in environment.projects:
        # What stands behind the metadata configures tools, and changes nothing that is installed.
        digest.update((ROOT / project / "pyproject.toml").read_text().split("\n[tool.ruff]")[0].encode())
    return digest.hexdigest()


def contains(stamp: Path, wanted: str) -> bool:
    """Whether a stamp file says that the environment already is (or includes) what is wanted."""
    return stamp.is_file() and wanted in stamp.read_text().split()


def sizes() -> dict[str, int]:
    """Layer name -> megabytes that it downloads, as scripts/lock measured them."""
    lines = (REQUIREMENTS / "sizes.txt").read_text().split("\n")
    return {name: int(size) for name, size in (line.split() for line in lines if line.strip())}


def make(kind: str) -> None:
    """Makes the environment ``kind`` ready, or finds that it is."""
    environment = ENVIRONMENTS[kind]
    folder = ROOT / environment.folder
    stamp, wanted = folder / ".ready", stamp_of(environment)
    python = folder / "bin" / "python"
    if contains(stamp, wanted) and python.exists():
        return
    # The larger environment includes the smaller one: never shrink it, and add to it without starting over.
    done = set(stamp.read_text().split()) if stamp.is_file() else set()
    current = {name: stamp_of(other) for name, other in ENVIRONMENTS.items() if other.folder == environment.folder}
    if kind == "serve" and current.get("dev") in done and python.exists():
        return
    layers = environment.layers
    if done & set(current.values()) and python.exists():
        layers = tuple(layer for layer in layers if layer not in SERVE)
    else:
        shutil.rmtree(folder, ignore_errors=True)

    check_machine()
    megabytes = sizes()
    total = sum(megabytes.get(layer.name, 0) for layer in layers)
    print(f"Setting up {environment.folder} with {sys.executable}: at most {total} MB to download.", flush=True)
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    for layer in layers:
        pip(python, "--require-hashes", "--only-binary", ":all:", *layer.options, "-r", str(layer.file))
    for project in environment.projects:
        pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT / project))
    partial = stamp.with_suffix(".tmp")
    partial.write_text("\n".join(sorted(done & set(current.values()) | {wanted})) + "\n")
    os.replace(partial, stamp)


def pip(python: Path, *arguments: str) -> None:
    """Runs ``pip install``, showing what is downloaded and a sign of life on long steps.

    Raises:
        SetupFailure: pip failed; its own last error line is in the message.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    doing, since, finished = "pip", time.monotonic(), threading.Event()

    def beat() -> None:
        while not finished.wait(HEARTBEAT_S):
            print(f"  … {doing}, {time.monotonic() - since:.0f} s", flush=True)

    ticker = threading.Thread(target=beat, daemon=True)
    ticker.start()
    output: list[str] = []
    try:
        for line in process.stdout:
            output.append(line.rstrip())
            text = line.strip()
            match = re.match(r"(Downloading|Using cached|Installing collected packages|Building editable)\b(.*)", text)
            if match and not text.endswith(".metadata") and ".metadata (" not in text:
                doing, since = text if len(text) < 100 else match[1].lower(), time.monotonic()
                if match[1] in ("Downloading", "Using cached"):
                    print(f"  {text}", flush=True)
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        finished.set()
        ticker.join()
    if code:
        errors = [line for line in output if line.startswith("ERROR")] or output[-3:]
        raise SetupFailure(f"pip could not install {arguments[-1]}: " + " ".join(errors))


def others() -> list[str]:
    """Further Pythons on this machine that could carry an environment."""
    found = []
    for name in ("python3.12", "python3.11", "python3.10"):
        path = shutil.which(name)
        if path is None:
            continue
        # A version manager's shim may be there without a Python behind it.
        check = subprocess.run([path, str(ROOT / "scripts" / "check_python.py")], capture_output=True, check=False)
        if check.returncode == 0 and f"{sys.version_info[0]}.{sys.version_info[1]}" not in name:
            found.append(path)
    return found


def locked_make(kind: str) -> None:
    """``make``, while no other set-up is at work in this checkout."""
    with open(ROOT / ".setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another set-up is at work here; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        make(kind)


def main() -> int:
    """``environment.py KIND [--only]``: 0 if the environment is ready."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a locale may lack an ellipsis
    kind, only = sys.argv[1], "--only" in sys.argv[2:]
    try:
        locked_make(kind)
    except SetupFailure as failure:
        # PyTorch's CPU build may be out of reach for one Python and at hand for another; any can export.
        if kind == "export" and not only:
            for python in others():
                print(f"{failure}\nTrying {python} for {EXPORT} instead.", file=sys.stderr, flush=True)
                if subprocess.run([python, __file__, kind, "--only"], check=False).returncode == 0:
                    return 0
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the next run starts this step again.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
