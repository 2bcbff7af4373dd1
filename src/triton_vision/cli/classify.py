"""``triton-vision classify``: files, folders and globs in, a row or a JSON object for each image out."""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vision_client import Result


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "classify",
        help="classify images on a running server",
        description="Classifies files, folders (with all below them, hidden files aside) and quoted globs on a running "
        "server. Exit code 1: some images were refused; 2: it could not be done.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder, or a glob")
    parser.add_argument("--url", default="localhost:8001", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--model", default="ensemble", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--top-k", type=int, metavar="K", help="how many classes for each image; by default 5")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds a request (default: 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Classifies; returns the exit code."""
    from triton_vision_client import ImageClient, VisionClientError

    try:
        files = list(find_files(args.paths))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not files:
        print(f"error: there are no files in {', '.join(args.paths)}", file=sys.stderr)
        return 2
    try:
        with ImageClient(args.url, model=args.model, timeout=args.timeout) as client:
            results = client.classify_many(files, top_k=args.top_k)
            bad = print_json(results) if args.json else print_table(results, width=max(map(len, files)))
    except (VisionClientError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if bad else 0


def find_files(paths: Iterable[str]) -> Iterator[str]:
    """The files that the paths name, in order, each once.

    Raises:
        FileNotFoundError: a path names nothing.
    """
    seen: set[str] = set()
    for path in paths:
        if os.path.isdir(path):
            found = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file() and not _hidden(file, path)]
        elif os.path.lexists(path):
            found = [path]
        else:
            found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
            if not found:
                raise FileNotFoundError(f"there is no {path}")
        for file in found:
            if file not in seen:
                seen.add(file)
                yield file


def _hidden(file: Path, folder: str) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def print_table(results: Iterable[Result], width: int) -> int:
    """A row for each image: its name, then label and score of each class. Returns how many were refused."""
    bad = 0
    width = min(width, 60)
    for result in results:
        if result.error is not None:
            bad += 1
            answer = f"REFUSED  {result.error}"
        else:
            answer = "   ".join(f"{entry.label} {entry.score:.3f}" for entry in result.predictions)
        print(f"{_printable(str(result.source)):<{width}}  {answer}", flush=True)
    return bad


def print_json(results: Iterable[Result]) -> int:
    """A JSON object for each image, one a line. Returns how many were refused."""
    bad = 0
    for result in results:
        name = str(result.source).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        row: dict[str, object] = {"source": name}
        if result.error is not None:
            bad += 1
            row["error"] = {"reason": result.error.reason, "detail": result.error.detail}
        else:
            row["predictions"] = [
                {"label": entry.label, "class_id": entry.class_id, "score": entry.score} for entry in result.predictions
            ]
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return bad


def _printable(name: str) -> str:
    """A file name as text that neither breaks a row nor commands a terminal, whatever its bytes are."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
