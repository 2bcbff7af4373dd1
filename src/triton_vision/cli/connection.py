"""Options that say which servers to call, and how."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

DEFAULT_URL = "localhost:8001"
# What a server has is worth so many seconds to somebody whose call has failed.
QUESTION_S = 2.0
INFERENCE_HEADER = "triton-grpc-protocol-inference"


def add_connection_options(parser: argparse.ArgumentParser, timeout: float = 30.0, *, model: bool = True) -> None:
    """Adds ``--url``, ``--model``, ``--timeout`` (with that default, in seconds), and those of TLS and of headers."""
    parser.add_argument(
        "--url",
        action="append",
        metavar="HOST:PORT",
        help=f"the server's gRPC address, again for each further server (default: {DEFAULT_URL})",
    )
    if model:
        parser.add_argument(
            "--model",
            default="ensemble",
            metavar="NAME",
            help="default: %(default)s ('triton-vision models' lists what the server has)",
        )
    parser.add_argument(
        "--timeout", type=float, default=timeout, metavar="S", help="seconds a request (default: %(default)g)"
    )
    group = parser.add_argument_group("security")
    group.add_argument("--tls", action="store_true", help="encrypt; public authorities vouch for the server")
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt; this authority (PEM) vouches for the server")
    group.add_argument("--tls-cert", metavar="FILE", help="mutual TLS: the client's own certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="mutual TLS: its key (PEM)")
    group.add_argument("--token-file", metavar="FILE", help="holds the token that the server wants for inference")
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sent with every call; once for each. Other users can see it in the list of processes: --token-file hides",
    )


def client_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The client's arguments.

    Raises:
        ValueError: the options do not fit together.
        OSError: a file cannot be read.
    """
    from triton_vision_client import TLSConfig

    url = args.url or DEFAULT_URL
    found: dict[str, Any] = {"url": url, "timeout": args.timeout}
    if "model" in args:
        found["model"] = args.model
    headers: dict[str, str] = {}
    for header in getattr(args, "header", []):
        name, equals, value = header.partition("=")
        if not equals or not name:
            raise ValueError(f"--header {name} is not NAME=VALUE")
        headers[name] = value
    token_file = getattr(args, "token_file", None)
    if token_file is not None:
        token = Path(token_file).read_text(encoding="ascii", errors="replace").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(f"--token-file {token_file} does not hold one line of ASCII text")
        # To Triton's own restriction of the inference API, as `serve` sets it, and to a proxy in front of it.
        headers[INFERENCE_HEADER] = token
        headers["authorization"] = f"Bearer {token}"
    ca, certificate, key = (getattr(args, f"tls_{part}", None) for part in ("ca", "cert", "key"))
    if (certificate is None) != (key is None):
        raise ValueError("mutual TLS needs --tls-cert and --tls-key, both")
    if getattr(args, "tls", False) or ca or certificate:
        found["tls"] = TLSConfig(ca=ca, certificate=certificate, key=key)
    if headers:
        found["headers"] = headers
    return found


def explained(error: Exception, args: argparse.Namespace) -> str:
    """An error's text; where the server has no such model, with those that it has."""
    from triton_vision_client import ImageClient, ModelNotFoundError, VisionClientError

    if isinstance(error, ModelNotFoundError):
        with (
            contextlib.suppress(VisionClientError, ValueError, OSError),
            ImageClient(**client_arguments(args)) as client,
        ):
            names = sorted({model.name for model in client.models(timeout=QUESTION_S) if model.ready})
            if names:
                return f"{error}; it has {', '.join(names)} (--model NAME)"
    return str(error)
