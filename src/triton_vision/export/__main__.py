"""``python -m triton_vision.export``: the part of ``prepare`` that runs where torch is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from triton_vision.export.prepare import prepare


def main() -> int:
    """Called by ``triton-vision prepare`` with arguments that it has already checked."""
    parser = argparse.ArgumentParser(prog="python -m triton_vision.export")
    parser.add_argument("repository", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--weights")
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    try:
        return prepare(args.repository, args.models, args.weights, force=args.force)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
