"""The scripts pass shellcheck, as a whole and each part alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.script import SCRIPT

# The set-up's own, from the development requirements, before the machine's.
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")


def test_shellcheck_finds_nothing() -> None:
    assert SHELLCHECK, "shellcheck is not installed: make setup brings it with the development requirements"
    parts = sorted(map(str, SCRIPT.parent.glob("lib/*.sh")))
    assert parts
    done = subprocess.run([SHELLCHECK, str(SCRIPT), *parts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
