"""A container of the image, run as docs/image.md says."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from tests.image.engine import Engine, EngineError

SAFE = (
    "--read-only",
    *("--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges"),
    *("--shm-size", "64m"),
)
# The base's Triton is one that callers can crash, so serve must be told that others may reach it.
EXPOSE = "--expose"
# The image's own health check, asked more often so that a test need not wait.
OFTEN = ("--health-interval", "1s")
HEALTH_S = 120.0


class Container:
    """``with Container(engine, image) as running:`` runs it; leaving removes it with its volume.

    Args:
        arguments: what follows the image's name, for ``triton-vision serve``.
        options: further options of ``docker run``.
    """

    def __init__(self, engine: Engine, image: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        self.engine = engine
        published = ("--publish", "127.0.0.1::8000", "--publish", "127.0.0.1::8001", "--publish", "127.0.0.1::8002")
        self.name = engine.docker(
            "run", "--detach", *SAFE, *OFTEN, *published, *options, image, EXPOSE, *arguments
        ).strip()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.docker("rm", "--force", "--volumes", self.name)

    def address(self, port: int) -> str:
        """``HOST:PORT`` on this machine under which a port of the container is published."""
        return self.engine.docker("port", self.name, f"{port}/tcp").splitlines()[0].strip()

    def state(self) -> dict[str, Any]:
        """docker's account of it: Status, ExitCode, Health."""
        found: dict[str, Any] = self.engine.inspect(self.name)["State"]
        return found

    def logs(self) -> str:
        """What it has printed."""
        done = self.engine.try_docker("logs", self.name)
        return done.stdout + done.stderr

    def execute(self, *command: str) -> tuple[int, str]:
        """Runs a command in it; returns its exit code and output."""
        done = self.engine.try_docker("exec", self.name, *command)
        return done.returncode, done.stdout + done.stderr

    def wait_ready(self) -> None:
        """Waits for the line with which ``serve`` says that every ensemble has answered, then for docker's word."""
        deadline = time.monotonic() + HEALTH_S
        while "\nready: " not in f"\n{self.logs()}":
            if self.state()["Status"] != "running" or time.monotonic() > deadline:
                raise EngineError(f"it does not become ready:\n{self.logs()}")
            time.sleep(0.2)
        self.wait_health("healthy")

    def wait_health(self, wanted: str, timeout: float = HEALTH_S) -> dict[str, Any]:
        """Waits until docker calls it ``healthy`` or ``unhealthy``; returns the account of its health.

        Raises:
            EngineError: it has ended, or the time is up; with the health check's last words and the log.
        """
        deadline = time.monotonic() + timeout
        while True:
            state = self.state()
            health: dict[str, Any] = state["Health"]
            if health["Status"] == wanted:
                return health
            if state["Status"] != "running" or time.monotonic() > deadline:
                last = health["Log"][-1]["Output"] if health["Log"] else "no health check has ended"
                raise EngineError(f"{state['Status']} and {health['Status']}, not {wanted}: {last}\n{self.logs()}")
            time.sleep(0.2)
