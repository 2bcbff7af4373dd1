"""``triton-vision classify``: files, folders, globs and lists in, a row or a JSON object for each image out."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from triton_vision.cli.connection import add_connection_options, client_arguments, explained
from triton_vision.cli.feed import Feed
from triton_vision.cli.find import find_files
from triton_vision.cli.inputs import Inputs
from triton_vision.cli.interrupt import Interrupts, Stopped
from triton_vision.cli.lists import ListError
from triton_vision.cli.output import Output, OutputError, complain
from triton_vision.cli.progress import Count, Progress
from triton_vision.cli.rows import CsvRows, JsonRows, Rows, TableRows, path_of
from triton_vision.terminal import printable

if TYPE_CHECKING:
    from triton_vision_client import ImageClient, Result

__all__ = ["add_parser", "find_files", "run"]

# 128 and SIGPIPE's number, as of any program whose reader has left.
READER_LEFT = 141
# How long somebody who has pressed Ctrl-C waits to hear of how many.
COUNT_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "classify",
        help="classify images on a running server",
        description="Classifies files, folders (with all below them, hidden files aside), quoted globs and the files "
        "of a list on a running server. Exit code 0: all were classified; 1: some images were refused; 2: it could "
        "not be done; 130, 143: it was interrupted (Ctrl-C), terminated.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a file, a folder, a glob, or - for a list on stdin")
    parser.add_argument(
        "--files-from", action="append", default=[], metavar="FILE", help="a list of files, one a line; - for stdin"
    )
    parser.add_argument("-0", "--null", action="store_true", help="NUL bytes separate the lists' files (find -print0)")
    parser.add_argument("--top-k", type=int, metavar="K", help="how many classes for each image; by default 5")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    formats.add_argument("--csv", action="store_true", help="CSV with a header, a row for each prediction")
    parser.add_argument(
        "--output", metavar="FILE", help="write there instead of stdout; it is FILE.part until it is complete"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress, not even on a terminal")
    add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Classifies; returns the exit code."""
    from triton_vision_client import ImageClient, VisionClientError

    given = vars(args)
    try:
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts())
            lists, nul = given.get("files_from", []), given.get("null", False)
            inputs = Inputs(args.paths, lists, nul, stack)
            client = stack.enter_context(ImageClient(**client_arguments(args)))
            output = Output(given.get("output"), interrupts.waiting)
            stack.callback(output.close)
            rows: Rows
            if args.json:
                rows = JsonRows()
            elif given.get("csv"):
                rows = CsvRows(output.is_terminal)
            else:
                rows = TableRows(output.encoding)
            count = Count((lambda: inputs.count(output.own_files)) if inputs.can_be_counted() else None)
            stack.callback(count.stop)
            progress = Progress(None if given.get("no_progress") else sys.stderr, count)
            return _Run(inputs, output, rows, count, progress).run(client, args, interrupts)
    except BrokenPipeError:
        return READER_LEFT
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}")
    except (VisionClientError, ValueError, OutputError) as error:
        complain(error)
    return 2


class _Run:
    """From the inputs to the rows, and what to say about it."""

    def __init__(self, inputs: Inputs, output: Output, rows: Rows, count: Count, progress: Progress) -> None:
        self._inputs, self._output, self._rows, self._count, self._progress = inputs, output, rows, count, progress
        self._feed = Feed(inputs.items(output.own_files), rows.expect)

    def run(self, client: ImageClient, args: argparse.Namespace, interrupts: Interrupts) -> int:
        """Returns the exit code."""
        from triton_vision_client import VisionClientError

        results = self._feed.results(client, args.top_k, patience=args.timeout)
        try:
            with self._progress, contextlib.closing(results):
                self._classify(results, interrupts)
            if not self._feed.given and not self._inputs.may_be_empty:
                raise ValueError(f"there are no files in {self._inputs.named()}")
            self._output.finish()
        except Stopped as stopped:
            print(f"{stopped.word}: {self._how_far()}", file=sys.stderr)
            return stopped.code
        except (VisionClientError, ListError, OSError, OutputError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            came = f"; {self._how_far()}" if self._progress.done else ""
            complain(f"{explained(error, args)}{came}")
            return 2
        summary = self._progress.summary()
        if summary is not None:
            print(summary, file=sys.stderr)
        return 1 if self._progress.refused else 0

    def _classify(self, results: Generator[Result, None, None], interrupts: Interrupts) -> None:
        header = self._rows.header
        while True:
            with interrupts.waiting():
                result = next(results, None)
            if self._feed.ended:
                self._count.total = self._feed.given
            if result is None:
                break
            self._write(header + self._rows.of(result))
            header = b""
            self._progress.add(path_of(result.source), result.error is not None)
        if header and self._inputs.may_be_empty:
            self._write(header)

    def _write(self, rows: bytes) -> None:
        if self._output.is_terminal:
            self._progress.above(partial(self._output.write, rows))
        else:
            self._output.write(rows)

    def _how_far(self) -> str:
        feed = self._feed
        total = feed.given if feed.ended and feed.failure is None else self._count.wait(COUNT_S)
        kept = (
            f"; their rows are in {printable(self._output.part)}" if self._output.part and self._progress.done else ""
        )
        return self._progress.how_far(total, feed.given) + kept
