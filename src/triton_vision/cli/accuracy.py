"""``triton-vision bench accuracy``: a running server's accuracy beside that of the PyTorch module it was made from."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vision.cli import prepare
from triton_vision.cli.connection import add_connection_options, client_arguments
from triton_vision.cli.output import say
from triton_vision.cli.paths import add_repository_option, find_repository

if TYPE_CHECKING:
    from triton_vision_client import Result

    from triton_vision.accuracy.chain import Chain
    from triton_vision.accuracy.compare import Answer, Tally
    from triton_vision.accuracy.module import Module


def make_parser() -> argparse.ArgumentParser:
    """The command's parser; ``bench`` itself takes any number of paths, which leaves no room for a sub-command."""
    parser = argparse.ArgumentParser(
        prog="triton-vision bench accuracy",
        description="Classifies labelled images on a running server and with the PyTorch module that its core was "
        "made from, on pixels that Pillow alone makes, and prints both sides' top-1 and top-5. FOLDER has a sub-folder "
        "for each class, named by its id or label, or all of ImageNet's (n01440764 …) in sorted order; a CSV has the "
        "lines path,class. Exit code 1: some images were refused; 2: it could not be done.",
    )
    parser.add_argument("images", metavar="FOLDER", type=Path, help="the images: a folder or a CSV file")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="what the artifact was made from: a state dict, a TorchScript or an ONNX file, or 'random'; found without "
        "it unless somebody brought it along",
    )
    parser.add_argument("--no-module", action="store_true", help="measure the server alone")
    parser.add_argument("--limit", type=int, metavar="N", help="only N of the images, evenly spread")
    parser.add_argument("--json", action="store_true", help="a JSON object instead of a table")
    parser.add_argument("--disagreements", metavar="FILE", help="a CSV of every image with another best label")
    parser.add_argument(
        "--show", type=int, default=10, metavar="N", help="disagreements and refusals to print (default: %(default)s)"
    )
    add_connection_options(parser, timeout=60.0)
    add_repository_option(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measures; returns the exit code."""
    from triton_vision_client import VisionClientError

    from triton_vision.accuracy.module import ModuleError
    from triton_vision.accuracy.report import as_json, table
    from triton_vision.accuracy.truth import TruthError
    from triton_vision.repository import RepositoryError

    try:
        tally, chain, source = _measure(args)
    except (TruthError, RepositoryError, ModuleError, VisionClientError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(json.dumps(as_json(tally, chain, source)) if args.json else table(tally, chain, source))
    return 1 if tally.refused else 0


def _measure(args: argparse.Namespace) -> tuple[Tally, Chain, str | None]:
    from triton_vision_client import ImageClient

    from triton_vision.accuracy.chain import read_chain
    from triton_vision.accuracy.compare import TOP, Pair, Tally
    from triton_vision.accuracy.follow import follow
    from triton_vision.accuracy.progress import Progress
    from triton_vision.accuracy.report import DisagreementFile, so_far
    from triton_vision.accuracy.truth import Classes, read_truth, spread

    if args.show < 0 or (args.limit is not None and args.limit < 1):
        raise ValueError("--limit must be at least 1, and --show at least 0")
    if args.no_module and (args.weights or args.disagreements):
        raise ValueError("--weights and --disagreements are about the module, and --no-module leaves it out")
    repository = find_repository(args.repository)
    if repository is None:
        raise ValueError("there is no model repository here: name the server's with --repository")
    chain = read_chain(repository, args.model)
    items = spread(read_truth(args.images, Classes(chain.labels)), args.limit)
    paths = [item.path for item in items]
    tally = Tally(keep=args.show)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(ImageClient(**client_arguments(args)))
        # A server that cannot answer must not cost the seconds that the module takes to be built.
        next(client.classify_many(paths[:1], top_k=1))
        file = None
        if args.disagreements:
            created = open(args.disagreements, "w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
            file = DisagreementFile(stack.enter_context(created), chain)
        module = None if args.no_module else stack.enter_context(_module(args.weights, chain, paths))
        _remark(chain, module)
        results = client.classify_many(paths, top_k=min(TOP, len(chain.labels)))
        sides: dict[str, Iterable[Answer]] = {"server": _served(results, chain)}
        if module is not None:
            sides["module"] = module.answers()
        progress = Progress(len(items))
        stack.callback(progress.end)
        answers = follow(sides, len(items), lambda counts: progress(counts, so_far(tally, alone=module is None)))
        for item, given in zip(items, answers, strict=True):
            if module is None:
                tally.add_alone(item, given[0])
                continue
            pair = Pair(item, *given)
            tally.add(pair)
            if file is not None and pair.differs:
                file.write(pair)
    return tally, chain, module.source if module is not None else None


def _module(weights: str | None, chain: Chain, paths: list[str]) -> Module:
    """The module's side, not yet started."""
    from triton_vision.accuracy.module import Module, ModuleError, weights_argument

    argument = weights_argument(chain, weights)
    if argument not in (None, "random") and not Path(argument).is_file():
        raise ModuleError(f"there is no weights file {weights}")
    python = prepare.python_with_torch()
    if python is None:
        raise ModuleError(
            "PyTorch is not installed here: run 'make setup', name a Python that has it in "
            "TRITON_VISION_EXPORT_PYTHON, or measure the server alone with --no-module"
        )
    return Module(python, chain, argument, paths)


def _remark(chain: Chain, module: Module | None) -> None:
    """Says what makes the two sides differ by intention."""
    if module is None:
        return
    if chain.origin is not None and chain.origin.sha256 != module.sha256:
        print(
            f"note: {chain.core} was made from {chain.origin.source}, and the module from {module.source}",
            file=sys.stderr,
        )
    if chain.recipe["decode"] != "exact":
        print("note: the server decodes approximately (decode: fast), the module exactly", file=sys.stderr)


def _served(results: Iterable[Result], chain: Chain) -> Iterator[Answer]:
    """The server's results as answers.

    Raises:
        ValueError: its labels are not the repository's.
    """
    from triton_vision.accuracy.compare import Answer

    for result in results:
        if result.error is not None:
            yield Answer(refused=str(result.error))
            continue
        for entry in result.predictions:
            if not 0 <= entry.class_id < len(chain.labels) or chain.labels[entry.class_id] != entry.label:
                raise ValueError(
                    f"the server's label {entry.label!r} of class {entry.class_id} is not the repository's: name the "
                    "server's repository with --repository"
                )
        yield Answer(
            tuple(entry.class_id for entry in result.predictions), tuple(entry.score for entry in result.predictions)
        )
