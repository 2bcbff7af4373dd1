"""Running deploy-triton.sh, and what its machine lacks or pretends to have."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "deploy-triton.sh"
# All that the script calls beside docker and nvidia-smi.
TOOLS = (
    *("awk", "bash", "cat", "curl", "cut", "df", "dirname", "env", "flock", "grep", "head", "ip", "readlink", "rm"),
    *("sed", "sha256sum", "sleep", "sort", "ss", "tac", "tail", "timeout", "tr", "wc"),
)


@dataclass(frozen=True)
class Done:
    """How a run ended."""

    code: int
    out: str
    err: str

    def command(self, *first: str) -> list[str]:
        """The words of the one command of a dry run that begins with these."""
        found = [words for words in self.commands() if words[: len(first)] == list(first)]
        assert len(found) == 1, self.out
        return found[0]

    def commands(self) -> list[list[str]]:
        """The words of each command that a dry run printed."""
        lines = shlex.shlex(self.out, posix=True, punctuation_chars="\n")
        lines.whitespace, lines.commenters, lines.whitespace_split = " ", "", True
        commands: list[list[str]] = [[]]
        for word in lines:
            if set(word) == {"\n"}:
                commands.append([])
            else:
                commands[-1].append(word)
        return [words for words in commands if words and words[0] != "#"]


def run(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300) -> Done:
    """Runs the script to its end; nothing of the tests' own environment reaches its options."""
    done = subprocess.run(
        [SCRIPT, *arguments],
        env=environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of the script, and with ``env``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_VISION_")}
    return {**own, **(env or {})}


def machine(folder: Path, **programs: str) -> dict[str, str]:
    """The environment of a machine that has the script's tools and, under their names, these shell scripts.

    ``_`` in a name stands for ``-``.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"these tests need {tool}"
        (bin_folder / tool).symlink_to(found)
    for name, text in programs.items():
        program = bin_folder / name.replace("_", "-")
        program.unlink(missing_ok=True)  # the link to the real one, through which it would be written
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    return {"PATH": str(bin_folder), "DOCKER_HOST": "unix:///nowhere"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports() -> dict[str, str]:
    """Options for ports that nobody listens on now, for both containers and a proxy."""
    while True:
        first = free_port()
        if first + 30 > 65535:
            continue
        wanted = [first + step + endpoint for step in (0, 10, 20) for endpoint in range(3)]
        if all(_is_free(port) for port in wanted):
            return {"--http-port": str(first), "--grpc-port": str(first + 1), "--metrics-port": str(first + 2)}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def words(options: Mapping[str, str]) -> list[str]:
    """A mapping of options as arguments."""
    return [word for pair in options.items() for word in pair]
