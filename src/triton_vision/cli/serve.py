"""``triton-vision serve``: Triton in the foreground, on any repository."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from triton_vision.cli.output import say as print_line
from triton_vision.cli.paths import add_repository_option, find_repository

if TYPE_CHECKING:
    from triton_vision.repository import Selection
    from triton_vision.server import TritonServer
    from triton_vision.server.security import Security

# For what was said last, where somebody reads it.
FLUSH_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model repository",
        description="Runs Triton in the foreground: the one in /opt/tritonserver where there is one, else the embedded "
        "one. Prints a line that begins with 'ready' once every model answers. From then on a Triton that dies is "
        "restarted, until it has failed 10 times in a row, and a model's Python process that dies is replaced. SIGINT "
        "and SIGTERM end it.",
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
        "--strict",
        action="store_true",
        help="end with exit code 2 where a model is left out or does not load, instead of serving the others",
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="end with exit code 2 unless this model or ensemble is served; may be repeated",
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
    _add_security_options(parser)
    parser.set_defaults(run=run)


def _add_security_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "security",
        "The list of models, loading them, trace and log settings are closed to everyone unless there is an admin "
        "token; shared memory, unless there is a shm token or --shm-open. Without a --…-token-file, a token is looked "
        "for in $TRITON_VISION_ADMIN_TOKEN_FILE and then in $TRITON_VISION_ADMIN_TOKEN, and so for SHM and INFERENCE. "
        "Callers send it as a header (docs/security.md).",
    )
    group.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="encrypt gRPC with this certificate (PEM); HTTP and metrics then listen on 127.0.0.1 only",
    )
    group.add_argument("--tls-key", metavar="FILE", help="the certificate's private key (PEM, no passphrase)")
    group.add_argument("--tls-ca", metavar="FILE", help="take only callers with a certificate of this authority")
    for role, what in (
        ("admin", "the list of models, loading them (whoever may, can run code here), trace and log settings"),
        ("shm", "shared memory"),
        ("inference", "inference"),
    ):
        group.add_argument(f"--{role}-token-file", metavar="FILE", help=f"the token that opens {what}")
    group.add_argument("--shm-open", action="store_true", help="open shared memory to everybody, without a token")
    group.add_argument(
        "--expose",
        action="store_true",
        help="listen beyond this machine even where the Triton release has a known defect with which any caller can "
        "crash it",
    )
    group.add_argument(
        "--admin-apis",
        metavar="LIST",
        help="what the admin token shall guard, too: of statistics, model-config, metadata, health",
    )
    group.add_argument("--no-http", action="store_true", help="serve no HTTP")
    group.add_argument("--no-metrics", action="store_true", help="serve no metrics")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; 0 after a clean end, 2 if it could not serve."""
    # First of all: the rest takes a second to import, and the first process of a container is not ended by a signal
    # that it has no handler for.
    signals = Signals()
    from triton_vision.gpu import visible_gpus
    from triton_vision.repository import RepositoryError, check_gpus, parse_placement, scaled
    from triton_vision.repository.placement import ON_GPU
    from triton_vision.server import ServerError, SetupError, TritonServer
    from triton_vision.server.outlet import Outlet

    repository = find_repository(args.repository)
    if repository is None:
        print("error: there is no model repository here: name one with --repository", file=sys.stderr)
        return 2
    try:
        for option, value in vars(args).items():
            if value == "":
                raise SetupError(f"--{option.replace('_', '-')} is empty: give it a value, or leave it out")
        placement = parse_placement(args.placement) if args.placement is not None else None
        if placement is not None and not args.dry_run:
            check_gpus(placement, [gpu.index for gpu in visible_gpus()])
        security = _security(args)
        warnings = security.check(args.host)
        security, defects = _fit_for_release(security, args)
        warnings += defects
    except (RepositoryError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    errors, output = Outlet(sys.stderr), Outlet(sys.stdout)

    def say(line: str) -> None:
        # A full disk behind standard output stops no server; a list that was asked for must be whole.
        if args.dry_run:
            print_line(line)
        else:
            output.put(f"{line}\n")

    server = TritonServer(
        repository,
        artifacts=args.artifacts,
        placement=placement,
        security=security,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        config_name=args.config_name,
        log_level=args.log_level,
        log=errors,
        shm_prefix=args.shm_prefix,
        strict=args.strict,
    )
    signals.then(server.request_stop)
    try:
        complaint = _driver_complaint()
        if complaint:
            warnings.append(complaint)
        for warning in warnings:
            say(f"warning: {warning}")
        server.prepare(say=lambda line: say(f"plan: {line}"), build=not args.dry_run)
        assert server.selection is not None
        for name, why in server.selection.left_out.items():
            say(f"left out: {name}: {why}{_mend(name, why, args.repository)}")
        _insist(server.selection, args.require, strict=args.strict)
        chosen = server.selection
        for doubt in server.selection.doubts:
            say(f"warning: {doubt}")
        for name in server.selection.meaningless:
            which = ", ".join([name, *server.selection.ensembles_over(name)])
            say(f"warning: {which}: made from random weights, so the answers mean nothing")
        for name in server.selection.unvouched:
            which = ", ".join([name, *server.selection.ensembles_over(name)])
            say(f"warning: {which}: no valid sidecar says from which weights its artifact was made")
        for name, model in server.selection.served.items():
            fitted = scaled(model)
            if fitted is not None:
                say(f"scale: {name}: {fitted[1]} (parameters of its config.pbtxt)")
        if placement is not None:
            say(f"placement: {placement}")
            if placement.gpus and not any(model.backend in ON_GPU for model in server.selection.served.values()):
                say("warning: no model that is served here runs on a GPU, so none is placed on one")
        for line in security.summary():
            say(line)
        if args.dry_run:
            say(server.describe())
            return 0
        with server:
            if not server.tokens_hidden:
                say(
                    "warning: the tokens and the keeper's secret are among tritonserver's arguments, which every user "
                    "of this machine can read (ps), since tracing one's own processes is forbidden here "
                    "(docs/security.md)"
                )
            for line in _broken(server, chosen):
                errors.put(f"{line}\n")
            _insist(server.selection, args.require)
            output.put(_ready_line(server))

            def tell(line: str) -> None:
                (errors if line.startswith("error:") else output).put(f"{line}\n")

            def again() -> None:
                for line in _broken(server, chosen):
                    tell(line)
                output.put(_ready_line(server))

            server.wait(tell, again)
    except (RepositoryError, ServerError) as error:
        if signals.asked:
            return 0  # it was told to end before it was ready
        errors.put(f"error: {error}\n")
        return 2
    finally:
        errors.flush(FLUSH_S)
        output.flush(FLUSH_S)
    return 0


def _insist(selection: Selection, required: Sequence[str], *, strict: bool = False) -> None:
    """Raises RepositoryError where something is not served that has to be."""
    from triton_vision.repository import RepositoryError

    for name in required:
        if name not in selection.served:
            raise RepositoryError(
                f"{name}, which --require names, {selection.left_out.get(name, 'is not in the repository')}"
            )
    if not selection.served_pipelines():
        raise RepositoryError(f"there is nothing to serve: {', '.join(selection.pipelines)} left out, as said above")
    if strict and selection.left_out:
        raise RepositoryError(f"--strict: left out: {', '.join(selection.left_out)}")


def _broken(server: TritonServer, chosen: Selection) -> list[str]:
    """A line for each model that turned out to be broken, and for what is left out with it."""
    assert server.selection is not None
    gone = {name: why for name, why in server.selection.left_out.items() if name not in chosen.left_out}
    return [
        f"error: {name} {why}" if name in server.selection.broken else f"left out: {name}: {why}"
        for name, why in gone.items()
    ]


def _ready_line(server: TritonServer) -> str:
    assert server.selection is not None
    variant = server.selection.config_name
    served, there = server.selection.served_pipelines(), server.selection.pipelines
    return (
        f"ready: {len(served)} of {len(there)} pipeline{'s' * (len(there) != 1)}: {', '.join(served)} | "
        f"gRPC {server.grpc_address}, HTTP {server.http_address or 'off'}, "
        f"metrics {server.metrics_address or 'off'} | models: {', '.join(server.selection.served)}"
        + (f" | variant: {variant}" if variant else "")
        + "\n"
    )


def _security(args: argparse.Namespace) -> Security:
    """What the options and the environment say about TLS and tokens.

    Raises:
        SetupError: they contradict each other, or a token cannot be used.
    """
    from pathlib import Path

    from triton_vision.server import SetupError
    from triton_vision.server.certificates import Certificates
    from triton_vision.server.security import ADMIN_APIS, ROLES, Security, parse_admin_apis, read_token

    tls = None
    if args.tls_cert or args.tls_key:
        if not (args.tls_cert and args.tls_key):
            raise SetupError("--tls-cert and --tls-key go together: give both")
        tls = Certificates(Path(args.tls_cert), Path(args.tls_key), Path(args.tls_ca) if args.tls_ca else None)
    elif args.tls_ca:
        raise SetupError("--tls-ca needs a certificate of the server's own: give --tls-cert and --tls-key, too")
    tokens = {role: read_token(role, getattr(args, f"{role}_token_file"), os.environ) for role in ROLES}
    given = {role: token for role, token in tokens.items() if token is not None}
    if args.admin_apis is not None and "admin" not in given:
        raise SetupError("--admin-apis says what the admin token guards, and there is none: give --admin-token-file")
    return Security(
        tls=tls,
        tokens=given,
        admin_apis=parse_admin_apis(args.admin_apis) if args.admin_apis is not None else ADMIN_APIS,
        http=not args.no_http,
        metrics=not args.no_metrics,
        shm_open=args.shm_open,
    )


def _fit_for_release(security: Security, args: argparse.Namespace) -> tuple[Security, list[str]]:
    """What can be opened of the Triton release that would be started, and warnings.

    Raises:
        SetupError: strangers could crash it.
    """
    from triton_vision.server.exposure import limit
    from triton_vision.server.locate import find_installation
    from triton_vision.server.releases import read_server_version

    installation = find_installation()
    version = read_server_version(installation.home, embedded=installation.embedded)
    return limit(security, args.host, version, args.expose)


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

    # An own network's artifacts, and those of a further version, come from its owner.
    if name not in NETWORKS or not why.startswith("has no 1/"):
        return ""
    where = f" --repository {shlex.quote(repository)}" if repository else ""
    return f" (make it: triton-vision prepare {name}{where})"
