"""``triton-vision models``: what a running server has, and in which state."""

from __future__ import annotations

import argparse
import dataclasses
import json

from triton_vision.cli.connection import add_connection_options, client_arguments
from triton_vision.cli.output import complain, say
from triton_vision.terminal import printable


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "models",
        help="list a running server's models",
        description="Lists the models and ensembles of a running server, each with its version and state. A server "
        "that shows its repository only to those with its admin token names the models that are loaded. Exit code 0: "
        "all are ready; 1: some are not; 2: it could not be asked.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    add_connection_options(parser, model=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists them; returns the exit code."""
    from triton_vision_client import ImageClient, VisionClientError

    try:
        with ImageClient(**client_arguments(args)) as client:
            models = sorted(client.models(), key=lambda model: (model.name, model.version))
    except (VisionClientError, ValueError, OSError) as error:
        complain(error)
        return 2
    width = max((len(printable(model.name)) for model in models), default=0)
    for model in models:
        if args.json:
            say(json.dumps(dataclasses.asdict(model)))
        else:
            state = f"{model.state or 'NOT LOADED'}  {model.reason}".strip()
            say(printable(f"{model.name:<{width}}  {model.version or '-':>3}  {state}"))
    return 0 if all(model.ready for model in models) else 1
