"""``python -m triton_vision.export``: the part of ``prepare`` that runs where torch is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from triton_vision.export.prepare import PRECISIONS, Options, prepare


def main() -> int:
    """Called by ``triton-vision prepare`` with arguments that it has already checked."""
    parser = argparse.ArgumentParser(prog="python -m triton_vision.export")
    parser.add_argument("repository", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--weights")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--pixels", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--mean", type=float, nargs=3, default=())
    parser.add_argument("--std", type=float, nargs=3, default=())
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    options = Options(
        weights=args.weights,
        precision=args.precision,
        calibration=args.pixels,
        labels=args.labels,
        into=args.into,
        mean=tuple(args.mean),
        std=tuple(args.std),
        force=args.force,
    )
    try:
        return prepare(args.repository, args.models, options)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
