"""``triton-vision serve``: Triton in the foreground, on any repository."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable
from types import FrameType

from triton_vision.cli.paths import add_repository_option, find_repository


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model repository",
        description="Runs Triton in the foreground: the one in /opt/tritonserver where there is one, else the embedded "
        "one. Prints a line that begins with 'ready' once every model answers. SIGINT and SIGTERM end it.",
    )
    add_repository_option(parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    for name, port, what in (("http", 8000, "HTTP"), ("grpc", 8001, "gRPC"), ("metrics", 8002, "metrics")):
        parser.add_argument(
            f"--{name}-port", type=int, default=port, metavar="N", help=f"{what}; 0 takes a free one (default: {port})"
        )
    parser.add_argument(
        "--config-name",
        metavar="NAME",
        help="the core variant, configs/NAME.pbtxt in a model's directory; by default the one for this machine",
    )
    parser.add_argument(
        "--artifacts",
        metavar="DIR",
        help="a directory with further artifacts, as MODEL/VERSION/FILE, such as a mounted volume: TensorRT plans are "
        "built there; by default the repository itself",
    )
    parser.add_argument(
        "--placement",
        metavar="SPEC",
        help="where the cores run and for whom first, such as gpus=0-3,instances=2,numa=0/0/1/1,cuda-pool=256M,"
        "pinned-pool=512M,limit=3,priorities=2 (docs/gpus.md)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print tritonserver's command line and the changed configurations, and end",
    )
    parser.add_argument(
        "--log-level",
        choices=("error", "warning", "info", "verbose"),
        default="warning",
        help="how much of Triton's log is passed through (default: %(default)s)",
    )
    parser.add_argument(
        "--shm-prefix",
        metavar="NAME",
        help="the prefix of the Python backend's shared memory; by default one made of the gRPC port",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; 0 after a clean end, 2 if it could not serve."""
    # First of all: the rest takes a second to import, and the first process of a container is not ended by a signal
    # that it has no handler for.
    signals = Signals()
    from triton_vision.gpu import visible_gpus
    from triton_vision.repository import RepositoryError, check_gpus, parse_placement, scaled
    from triton_vision.repository.placement import ON_GPU
    from triton_vision.server import ServerError, TritonServer

    repository = find_repository(args.repository)
    if repository is None:
        print("error: there is no model repository here: name one with --repository", file=sys.stderr)
        return 2
    try:
        placement = parse_placement(args.placement) if args.placement is not None else None
        if placement is not None and not args.dry_run:
            check_gpus(placement, [gpu.index for gpu in visible_gpus()])
    except RepositoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    server = TritonServer(
        repository,
        artifacts=args.artifacts,
        placement=placement,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        config_name=args.config_name,
        log_level=args.log_level,
        log=sys.stderr,
        shm_prefix=args.shm_prefix,
    )
    signals.then(server.request_stop)
    try:
        complaint = _driver_complaint()
        if complaint:
            print(f"warning: {complaint}", flush=True)
        server.prepare(say=lambda line: print(f"plan: {line}", flush=True), build=not args.dry_run)
        assert server.selection is not None
        for name, why in server.selection.left_out.items():
            print(f"left out: {name}: {why}{_mend(name, why, args.repository)}", flush=True)
        for name in server.selection.meaningless:
            which = ", ".join([name, *server.selection.ensembles_over(name)])
            print(f"warning: {which}: made from random weights, so the answers mean nothing", flush=True)
        for name in server.selection.unvouched:
            which = ", ".join([name, *server.selection.ensembles_over(name)])
            print(f"warning: {which}: no valid sidecar says from which weights its artifact was made", flush=True)
        for name, model in server.selection.served.items():
            fitted = scaled(model)
            if fitted is not None:
                print(f"scale: {name}: {fitted[1]} (parameters of its config.pbtxt)", flush=True)
        if placement is not None:
            print(f"placement: {placement}", flush=True)
            if placement.gpus and not any(model.backend in ON_GPU for model in server.selection.served.values()):
                print("warning: no model that is served here runs on a GPU, so none is placed on one", flush=True)
        if args.dry_run:
            print(server.describe())
            return 0
        with server:
            variant = server.selection.config_name
            print(
                f"ready: gRPC {server.grpc_address}, HTTP {server.http_address}, metrics {server.metrics_address}"
                f" | models: {', '.join(server.selection.served)}" + (f" | variant: {variant}" if variant else ""),
                flush=True,
            )
            server.wait()
    except (RepositoryError, ServerError) as error:
        if signals.asked:
            return 0  # it was told to end before it was ready
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class Signals:
    """SIGINT, SIGTERM and SIGHUP: noted from the moment this is made, and passed on once it is known to whom."""

    def __init__(self) -> None:
        self.asked = False
        self._stop: Callable[[], None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)
        # The image starts this with SIGTERM held back, so that none is lost before there is a handler for it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def then(self, stop: Callable[[], None]) -> None:
        """Calls ``stop`` at a signal, also for one that has come already."""
        self._stop = stop
        if self.asked:
            stop()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a signal handler
        self.asked = True
        if self._stop is not None:
            self._stop()


def _driver_complaint() -> str:
    """What is wrong with the GPU's driver for the server in /opt/tritonserver; empty if nothing is known to be."""
    from triton_vision.gpu import visible_gpus
    from triton_vision.server.locate import SYSTEM_HOME
    from triton_vision.server.releases import check_driver, read_driver, read_server_version

    driver = read_driver()
    gpus = visible_gpus() if driver else []
    return check_driver(read_server_version(SYSTEM_HOME), driver, gpus[0].name if gpus else "") if driver else ""


def _mend(name: str, why: str, repository: str | None) -> str:
    """What makes a missing artifact, where the suite can make it."""
    from triton_vision.export.networks import NETWORKS

    if name not in NETWORKS or not why.startswith("has no"):
        return ""
    where = f" --repository {shlex.quote(repository)}" if repository else ""
    return f" (make it: triton-vision prepare {name}{where})"
