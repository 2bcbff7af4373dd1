"""``triton-vision``: reads the arguments and calls the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from triton_vision import __version__
from triton_vision.cli import accuracy, bench, classify, models, prepare, serve
from triton_vision.cli.output import OutputError, complain, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 some inputs failed, 2 could not do it."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - else messages would go to stdout, among the rows
    parser = argparse.ArgumentParser(prog="triton-vision", description="Serve and classify images with NVIDIA Triton.")
    parser.add_argument("--version", action="version", version=f"triton-vision {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (prepare, serve, classify, models, bench):
        command.add_parser(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A parser of its own, because `bench` takes any number of paths; a folder of that name is ./accuracy.
    measured = given[:2] == ["bench", "accuracy"]
    try:
        try:
            args = accuracy.make_parser().parse_args(given[2:]) if measured else parser.parse_args(given)
        except SystemExit:
            say("", end="")  # the help may still be in the buffer
            raise
        if sys.stdout is None and given[0] == "bench":
            raise OutputError("standard output is closed")
        code: int = args.run(args)
        return code
    except OutputError as error:
        if sys.stdout is not None:  # Python must not complain about it at exit, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
