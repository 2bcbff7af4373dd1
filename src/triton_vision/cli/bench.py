"""``triton-vision bench``: how many images a second a running server answers, and how long each caller waits."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import threading
import time
from collections.abc import Sequence

from triton_vision.cli.connection import add_connection_options, client_arguments, explained
from triton_vision.cli.output import complain, say
from triton_vision.terminal import printable


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a running server",
        description="Sends the images from several callers at once, each with one image under way, and prints "
        "the rate and the latency. The first second is not counted. "
        "'triton-vision bench accuracy FOLDER' measures accuracy instead: see its --help.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="images, folders or globs to take turns with")
    parser.add_argument("--callers", type=int, default=8, metavar="N", help="concurrent callers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long (default: %(default)s)")
    add_connection_options(parser)
    parser.set_defaults(run=run)


WARM_UP_S = 1.0


def run(args: argparse.Namespace) -> int:
    """Measures; 2 if a call failed."""
    from triton_vision_client import ImageClient, VisionClientError

    from triton_vision.cli.classify import find_files

    if args.callers < 1 or not 0 < args.seconds <= 3600:
        complain("--callers must be at least 1, and --seconds above 0 and at most 3600")
        return 2
    try:
        images = [_content(path) for path in find_files(args.paths)]
    except OSError as error:
        complain(error)
        return 2
    if not images:
        complain(f"there are no files in {', '.join(args.paths)}")
        return 2

    try:
        client = ImageClient(**client_arguments(args))
        # Also warms up. A folder of photos may hold a text about them.
        served = [result.source for result in client.classify_many(images) if result.error is None]
    except (ValueError, OSError, VisionClientError) as error:
        complain(explained(error, args))
        return 2
    if len(served) < len(images):
        print(
            f"left out: {len(images) - len(served)} of {len(images)} files, which the server refuses", file=sys.stderr
        )
    if not served:
        complain("no image is left to measure with")
        return 2
    images = served
    latencies: list[list[float]] = [[] for _ in range(args.callers)]
    failures: list[Exception] = []
    start = time.monotonic()
    counted, end = start + WARM_UP_S, start + WARM_UP_S + args.seconds

    with client:

        def call(caller: int) -> None:
            turn = caller
            while not failures:
                began = time.monotonic()
                if began >= end:
                    return
                try:
                    client.classify(images[turn % len(images)])
                except VisionClientError as error:
                    failures.append(error)
                    return
                turn += args.callers
                ended = time.monotonic()
                if began >= counted and ended <= end:
                    latencies[caller].append(ended - began)

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(args.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        complain(failures[0])
        return 2
    merged = sorted(value for part in latencies for value in part)
    if not merged:
        complain("no call ended in time: allow more --seconds")
        return 2
    p50, p90, p99 = (1000 * percentile(merged, share) for share in (0.50, 0.90, 0.99))
    say(
        f"{printable(args.model)}: {len(merged) / args.seconds:.1f} images/s with {args.callers} callers; "
        f"latency P50 {p50:.1f} ms, P90 {p90:.1f} ms, P99 {p99:.1f} ms ({len(merged)} images)"
    )
    return 0


def _content(path: str) -> bytes:
    """Raises OSError, also for what may never end."""
    if not os.path.isfile(path):
        raise OSError(errno.EINVAL, "neither a file nor a link to one", path)
    with open(path, "rb") as file:
        return file.read()


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that ``share`` of an ascending sequence do not exceed (nearest rank)."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
