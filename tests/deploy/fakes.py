"""Programs that a machine of these tests has in place of docker and NVIDIA's: what cannot be had here for real.

The engine's own part is tested with a real one (tests/deploy/engine); these answer the questions that come before it.
"""

from __future__ import annotations

import shlex

ONE_GPU = "0, GPU-11111111-2222-3333-4444-555555555555, 580.95.05"
TWO_GPUS = f"{ONE_GPU}\n1, GPU-99999999-2222-3333-4444-555555555555, 580.95.05"


def docker(
    *,
    version: str = "27.3.1",
    runtimes: str = "runc ",
    image: bool = True,
    user: str = "10001:10001",
    variables: str = "CUDA_VERSION=13.0.2.006",
) -> str:
    """An engine without containers; it refuses whatever would change something."""
    answer = {
        "context inspect": "echo unix:///var/run/docker.sock",
        "version --format": f"echo {version}",
        "info --format": f"echo 'an-engine|/|{runtimes}'",
        "image inspect": f"""
            {"true" if image else "exit 1"}
            case "$*" in
            *Config.User*) echo {shlex.quote(user)} ;;
            *Config.Env*) echo {shlex.quote(variables)} ;;
            esac""",
        "ps --all": "true",
        "ps --filter": "true",
    }
    cases = "\n".join(f"'{question}') {reply} ;;" for question, reply in answer.items())
    return f'case "$1 ${{2-}}" in\n{cases}\n*) echo "unexpected: docker $*" >&2; exit 97 ;;\nesac'


def failing(message: str) -> str:
    """A program that says only this, and fails."""
    return f"echo {shlex.quote(message)} >&2; exit 1"


def nvidia_smi(listing: str) -> str:
    """nvidia-smi on a machine with these GPUs."""
    return f"cat <<'END'\n{listing}\nEND"
