"""Where the checkout and its model repository are."""

from __future__ import annotations

import argparse
from pathlib import Path


def checkout() -> Path | None:
    """The checkout that this package runs from, if it does: a folder with pyproject.toml and model_repository."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "model_repository").is_dir() else None


def add_repository_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--repository``."""
    parser.add_argument(
        "--repository", metavar="DIR", help="the model repository; by default ./model_repository, else the checkout's"
    )


def find_repository(named: str | None) -> Path | None:
    """The repository that was named, else the one here, else the checkout's, else None."""
    if named:
        return Path(named)
    here = Path("model_repository")
    if here.is_dir():
        return here
    root = checkout()
    return root / "model_repository" if root else None
