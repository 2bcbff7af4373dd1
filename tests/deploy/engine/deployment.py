"""A deployment of the tests, and callers that keep it busy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from triton_vision_client import ImageClient, VisionClientError

from tests.deploy.script import ROOT, SCRIPT, Done, environment, free_ports, run, words
from tests.image.container import EXPOSE

PHOTO = (ROOT / "samples" / "coffee.jpg").read_bytes()
# The stages' real network; ResNet-50 has random weights here, and is slow on a small machine.
ENSEMBLE = "ensemble_lite"
# The image's own health check, asked more often so that a test need not wait.
OFTEN = ("--docker-option", "--health-interval=1s")


@dataclass(frozen=True)
class Docker:
    """An engine, by the environment that leads to it, and the image to be deployed."""

    environment: Mapping[str, str]
    image: str

    def __call__(self, *arguments: str) -> str:
        """What a docker command prints."""
        done = subprocess.run(
            ["docker", *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """docker's account of a container."""
        found: list[dict[str, Any]] = json.loads(self("container", "inspect", name))
        return found[0]


class Deployment:
    """Calls the script for one name, on ports that nobody else has."""

    def __init__(self, docker: Docker, name: str) -> None:
        self.docker = docker
        self.name = name
        self.ports = free_ports()

    def __call__(self, command: str, *arguments: str) -> Done:
        """Runs a command of the script."""
        return run(command, "--name", self.name, *arguments, env=self.docker.environment)

    def arguments(self, *more: str) -> list[str]:
        """Those of start: the image of the tests on the ports of this deployment, watched closely."""
        told = [*more] if "--" in more else [*more, "--"]
        told.insert(told.index("--") + 1, EXPOSE)
        return ["--image", self.docker.image, *words(self.ports), *OFTEN, "--ensemble", ENSEMBLE, *told]

    def start(self, *more: str) -> Done:
        """Starts it; returns when it serves."""
        done = self("start", *self.arguments(*more))
        assert done.code == 0, done.err
        return done

    def begin(self, command: str, *more: str) -> subprocess.Popen[str]:
        """The script, running, its messages in ``stderr``."""
        return subprocess.Popen(
            [SCRIPT, command, "--name", self.name, *more],
            env=environment(self.docker.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def callers_addresses(self) -> list[str]:
        """What status says callers are to be given."""
        found = re.search(r"^for callers: (\S+)$", self("status").out, re.MULTILINE)
        assert found
        return found[1].split(",")

    def containers(self) -> set[str]:
        """The names of its containers, running or not."""
        label = f"label=triton-vision.deploy.name={self.name}"
        return set(self.docker("ps", "--all", "--filter", label, "--format", "{{.Names}}").split())

    def clear(self) -> None:
        """Removes all of it, volumes too; nothing else may be left."""
        assert self("stop").code == 0
        label = f"label=triton-vision.deploy.name={self.name}"
        assert self.containers() == set()
        assert self.docker("network", "ls", "--quiet", "--filter", label) == ""
        for volume in self.docker("volume", "ls", "--quiet", "--filter", "dangling=true").split():
            self.docker("volume", "rm", volume)


class Callers:
    """Threads that classify one photo after the other until they are told to end.

    ``with Callers(addresses) as callers:`` begins; ``failed`` is what any call has raised. On leaving, every thread
    has ended.

    Args:
        addresses: gRPC addresses, all of which each caller is given.
    """

    def __init__(self, addresses: Sequence[str], threads: int = 3) -> None:
        self.failed: list[str] = []
        self.answered = 0
        self._client = ImageClient(addresses, model=ENSEMBLE)
        self._lock = threading.Condition()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(threads)]

    def _call(self) -> None:
        while not self._end.is_set():
            try:
                best = self._client.classify(PHOTO, top_k=1).predictions[0]
                failure = None if best.label == "espresso" else f"the label {best.label}"
            except VisionClientError as error:
                failure = f"{type(error).__name__}: {error}"
            with self._lock:
                self.answered += failure is None
                self.failed += [failure] if failure else []
                self._lock.notify_all()

    def wait_for(self, more: int, timeout: float = 60.0) -> None:
        """Returns when so many further calls have been answered."""
        with self._lock:
            wanted = self.answered + more
            assert self._lock.wait_for(lambda: self.answered >= wanted, timeout), self.failed

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
