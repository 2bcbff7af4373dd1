"""What ``make demo`` runs: prepare, serve on free ports, classify, stop.

``python -m triton_vision.cli.demo [--bench] [PATH…]``: the sample photos by default.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from triton_vision.cli import bench, classify, prepare
from triton_vision.cli.output import OutputError, say
from triton_vision.cli.paths import checkout

# The real networks, best first: an ensemble, and the model that it needs.
ENSEMBLES = ("ensemble", "ensemble_lite")


def main() -> int:
    """Returns what ``make demo`` exits with: 0 when every photo was classified."""
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("--bench", action="store_true", help="measure instead of printing labels")
    parser.add_argument("paths", nargs="*")
    args = parser.parse_args()
    root = checkout()
    if root is None:
        print("error: the demo runs from a checkout", file=sys.stderr)
        return 2
    # SIGTERM takes the way of Ctrl-C, so that the server is ended as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a locale may lack a dash or an ellipsis
    paths = args.paths or [os.path.relpath(root / "samples" / "*.jpg")]
    try:
        if not list(classify.find_files(paths)):
            raise FileNotFoundError(f"there are no files in {', '.join(paths)}")
        return _run(root, paths, args.bench)
    except (FileNotFoundError, OutputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(root: Path, paths: list[str], measure: bool) -> int:
    repository = root / "model_repository"
    say("Preparing the models (the first time takes a minute) …")
    parser = argparse.ArgumentParser()
    prepare.add_parser(parser.add_subparsers())
    made = prepare.run(parser.parse_args(["prepare", "--repository", str(repository)]))
    if made == 2:
        return 2

    from triton_vision.repository import RepositoryError
    from triton_vision.server import ServerError, TritonServer

    code = 0
    try:
        say("Starting Triton …")
        with TritonServer(repository) as server:
            assert server.selection is not None
            doubtful = (*server.selection.meaningless, *server.selection.unvouched)
            random = {chain for name in doubtful for chain in server.selection.ensembles_over(name)}
            meaningful = [name for name in ENSEMBLES if name in server.selection.served and name not in random]
            if not meaningful:
                print("error: there are no real weights to classify with", file=sys.stderr)
                return 2
            for name in meaningful:
                say(f"\n{name}, over gRPC at {server.grpc_address}:")
                arguments = argparse.Namespace(paths=paths, url=server.grpc_address, model=name, timeout=60.0)
                if measure:
                    arguments.callers, arguments.seconds = 8, 10.0
                    code = max(code, bench.run(arguments))
                else:
                    arguments.top_k, arguments.json = 3, False
                    code = max(code, classify.run(arguments))
                if code >= 128:  # interrupted
                    break
            say("\nStopping Triton …")
    except (RepositoryError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
