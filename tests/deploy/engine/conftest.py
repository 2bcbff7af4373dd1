"""A real Docker engine, the suite's image in it, and deployments that are gone when their test ends.

Run by `make test-image` only, in a session of its own: the engine is that of tests/image. An engine and an image that
are there already are taken by DOCKER_HOST and TRITON_VISION_TEST_IMAGE.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.engine.deployment import Deployment, Docker
from tests.image.conftest import base, engine, image  # noqa: F401 - fixtures
from tests.image.engine import DOCKER

PROXY = "triton-vision-test/haproxy:latest"
PROXY_FILE = """
FROM {image}
USER 0
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends haproxy && rm -rf /var/lib/apt/lists/*
USER haproxy
HEALTHCHECK NONE
STOPSIGNAL SIGUSR1
ENTRYPOINT []
"""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Builds images for minutes, as root: only where this folder was asked for by its name."""
    del collection_path
    return None if any("tests/deploy/engine" in argument for argument in config.args) else True


@pytest.fixture(scope="session")
def docker(request: pytest.FixtureRequest) -> Docker:
    """The engine, with the image to be deployed."""
    given = os.environ.get("TRITON_VISION_TEST_IMAGE")
    if given:
        # Debian's client builds with BuildKit without a plugin, as tests/image has it.
        return Docker({"DOCKER_HOST": os.environ["DOCKER_HOST"], "DOCKER": DOCKER}, given)
    started = request.getfixturevalue("engine")
    own = {name: value for name, value in started.environment.items() if os.environ.get(name) != value}
    return Docker(own, request.getfixturevalue("image"))


@pytest.fixture(scope="session")
def proxy_image(docker: Docker) -> str:
    """An image with HAProxy, as its official one has it."""
    subprocess.run(
        ["docker", "build", "--quiet", "--network", "host", "--tag", PROXY, "-"],
        input=PROXY_FILE.format(image=docker.image),
        env={**os.environ, **docker.environment, "DOCKER_BUILDKIT": "0"},
        stdout=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=300,
    )
    return PROXY


@pytest.fixture
def deploy(docker: Docker) -> Iterator[Callable[[str], Deployment]]:
    """Makes deployments by their names; what is left of them goes with the test."""
    made: list[Deployment] = []

    def make(name: str) -> Deployment:
        made.append(Deployment(docker, name))
        return made[-1]

    yield make
    for deployment in made:
        deployment.clear()
