"""A Docker engine of the tests' own: started, asked, ended, with its images kept for the next run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What lasts between runs: images and the builder's cache.
KEPT = ROOT / "build" / "image"
# Debian's client of the same version as the engine: it speaks BuildKit without a plugin.
DOCKER = "/usr/bin/docker"
START_S = 60.0
# With the process's number behind, by which what a killed run has left is told from what a running one uses.
RUN_PREFIX, BRIDGE_PREFIX = "triton-vision-docker-", "tvs"
# Addresses of containers: a private network, and of it a part that other engines do not take by default.
NETWORK = "10.213.{}.1/24"


class EngineError(RuntimeError):
    """The engine or one of its commands failed; the text holds what it said."""


class Engine:
    """``with Engine() as engine:`` runs a daemon; leaving ends it and every container of it.

    It changes nothing of the machine's firewall: published ports are served by docker-proxy, and containers reach
    no further than the machine. Builds that need the network take the machine's (``--network host``).
    """

    def __init__(self) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        # Paths of sockets may have 107 characters, and the checkout may lie deep.
        self._run = Path(tempfile.mkdtemp(prefix=f"{RUN_PREFIX}{os.getpid()}-"))
        self._bridge = f"{BRIDGE_PREFIX}{os.getpid()}"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._log = KEPT / "dockerd.log"
        self.host = f"unix://{self._run}/sock"
        self.environment = {
            **os.environ,
            "DOCKER": DOCKER,
            "DOCKER_HOST": self.host,
            "DOCKER_BUILDKIT": "1",
            # No registry's password and no proxy of the user's own configuration.
            "DOCKER_CONFIG": str(self._run / "config"),
        }

    def __enter__(self) -> Engine:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        if os.geteuid() != 0:
            raise EngineError("a Docker engine of the tests' own needs root: run make test-image as root")
        subprocess.run([ROOT / "scripts" / "image" / "packages"], check=True)
        self._end_stale()
        sweep()
        self._make_bridge()
        command = [
            # Whoever kills this process ends the engine, too, and with it the containers.
            *("setpriv", "--pdeathsig", "TERM", "dockerd"),
            *("--data-root", str(KEPT / "docker"), "--exec-root", str(self._run / "exec")),
            *("--pidfile", str(self._pidfile), "--host", self.host, "--bridge", self._bridge),
            *("--iptables=false", "--ip-masq=false", "--ip-forward=false", "--shutdown-timeout", "5"),
        ]
        with self._log.open("wb") as log:
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while self.try_docker("version").returncode != 0:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"dockerd did not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        # Containers of a run that was killed.
        left = self.docker("ps", "--all", "--quiet").split()
        if left:
            self.docker("rm", "--force", "--volumes", *left)

    @property
    def _pidfile(self) -> Path:
        return KEPT / "dockerd.pid"

    def _end_stale(self) -> None:
        """Ends the daemon on the same data whose run was killed, if there is one."""
        try:
            pid = int(self._pidfile.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            return
        if str(KEPT / "docker") not in command:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + START_S
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline:
                raise EngineError(f"another run's dockerd (process {pid}) does not end")
            time.sleep(0.1)

    def _make_bridge(self) -> None:
        """A bridge of its own beside those of other engines, on the first network that is free."""
        used = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
        address = next(net for net in map(NETWORK.format, range(256)) if f" {net.split('/')[0]}/" not in used)
        subprocess.run(["ip", "link", "add", "name", self._bridge, "type", "bridge"], check=True)
        subprocess.run(["ip", "address", "add", address, "dev", self._bridge], check=True)
        subprocess.run(["ip", "link", "set", self._bridge, "up"], check=True)

    def stop(self) -> None:
        """Ends containers, daemon and bridge. Idempotent."""
        if self._daemon is not None:
            with contextlib.suppress(EngineError, OSError):
                left = self.docker("ps", "--all", "--quiet").split()
                if left:
                    self.docker("rm", "--force", "--volumes", *left)
            self._daemon.terminate()
            try:
                self._daemon.wait(30)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
            self._daemon = None
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)
        shutil.rmtree(self._run, ignore_errors=True)

    def try_docker(
        self, *arguments: str, timeout: float = 120.0, stdin: int | None = subprocess.DEVNULL
    ) -> subprocess.CompletedProcess[str]:
        """Runs a docker command and returns what came of it."""
        return subprocess.run(
            [DOCKER, *arguments],
            env=self.environment,
            stdin=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def docker(self, *arguments: str, timeout: float = 120.0, stdin: int | None = subprocess.DEVNULL) -> str:
        """Runs a docker command; returns its output.

        Raises:
            EngineError: it failed.
        """
        done = self.try_docker(*arguments, timeout=timeout, stdin=stdin)
        if done.returncode != 0:
            raise EngineError(f"docker {' '.join(arguments)}: exit code {done.returncode}: {done.stderr[-4000:]}")
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """What docker knows of an image or a container."""
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", name))
        return found[0]

    def has_image(self, tag: str) -> bool:
        """Whether there is an image of that name."""
        return self.try_docker("image", "inspect", tag).returncode == 0


def sweep() -> None:
    """Removes the bridges and folders of runs that were killed."""
    for bridge in Path("/sys/class/net").glob(f"{BRIDGE_PREFIX}[0-9]*"):
        if not Path("/proc", bridge.name.removeprefix(BRIDGE_PREFIX)).exists():
            subprocess.run(["ip", "link", "delete", bridge.name], capture_output=True, check=False)
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}[0-9]*-*"):
        if not Path("/proc", folder.name.removeprefix(RUN_PREFIX).split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
