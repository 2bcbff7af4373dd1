"""One engine, one image and one container for the session. Run by `make test-image` only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import bases
from tests.image.container import Container
from tests.image.engine import KEPT, ROOT, Engine

TAG = "triton-vision-test/suite:latest"
# Put where a build could leak it: into the certificate file that pip is given as a secret.
CANARY = "triton-vision-canary-7d1f4c"
BUILD_S = 900
# Of the builder's cache, for the next run.
KEEP = "6GB"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Builds images for minutes, as root: only where this folder was asked for by its name."""
    del collection_path
    return None if any("tests/image" in argument for argument in config.args) else True


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The Docker engine, which ends with the session."""
    with Engine() as running:
        yield running


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The image that stands in for NVIDIA's server image."""
    return bases.triton(engine)


@pytest.fixture(scope="session")
def image(engine: Engine, base: str) -> str:
    """The image, built by the project's own script from this checkout as it is."""
    bundle = Path(os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt"))
    certificate = KEPT / "ca.crt"
    certificate.write_text(f"{bundle.read_text()}\n{CANARY}\n")
    arguments = {"BASE": base, "EXPORT_BASE": bases.torch(engine), "WEIGHTS": "random"}
    options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    built = subprocess.run(
        [ROOT / "scripts" / "image" / "build", TAG, "--network", "host", "--progress", "plain", *options],
        env={**engine.environment, "PIP_CERT": str(certificate)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    (KEPT / "build.log").write_text(built.stdout)
    assert built.returncode == 0, built.stdout[-6000:]
    # What earlier runs have left: images made of what has changed since, and the builder's oldest layers.
    current = {TAG, base, bases.system(engine), arguments["EXPORT_BASE"]}
    listed = engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "triton-vision-test/*").split()
    stale = [name for name in listed if name not in current and not name.endswith(":<none>")]
    if stale:
        engine.docker("rmi", *stale)
    engine.docker("image", "prune", "--force")
    engine.docker("builder", "prune", "--force", "--keep-storage", KEEP)
    return TAG


@pytest.fixture(scope="session")
def container(engine: Engine, image: str) -> Iterator[Container]:
    """A container with as few rights as it can have, healthy by docker's own word."""
    with Container(engine, image) as running:
        running.wait_ready()
        yield running
