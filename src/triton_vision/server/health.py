"""A container's health: is the ensemble ready, and does it still answer a photo?

``python3 -m triton_vision.server.health`` asks the server over HTTP. Triton's own readiness stays green when a Python
stub has died, so after it one real photo goes through the whole chain. The server is unhealthy when it does not say
that the ensemble is ready, or when its answer says that a model is broken. A full queue and an expired deadline are
signs of load: restarting a busy server would only move its load to the next, so they count as healthy.

Standard library only, and quick to start: an orchestrator runs this every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PHOTO = Path(__file__).with_name("warm.jpg")
URL_VARIABLE, MODEL_VARIABLE = "TRITON_VISION_HEALTH_URL", "TRITON_VISION_HEALTH_MODEL"
# Where inference needs a token, serve has it from one of these, too; security.py has the names.
TOKEN_VARIABLE, TOKEN_HEADER = "TRITON_VISION_INFERENCE_TOKEN", "triton-grpc-protocol-inference"
DEFAULT_URL, DEFAULT_MODEL = "http://127.0.0.1:8000", "ensemble,ensemble_lite"
# Below the time that the image's HEALTHCHECK and Kubernetes probes should allow.
DEFAULT_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 5.0
# What Triton answers when a Python model's process has died, a model of the chain is gone, or the GPU has failed for
# good: none of it mends itself.
BROKEN = re.compile(
    r"is not healthy|stub process|request for unknown model|has no available versions|"
    r"cuda error|illegal memory access|unspecified launch failure",
    re.IGNORECASE,
)
# What it answers when there is more work than it can do; looked for first.
BUSY = re.compile(r"exceeds maximum queue size|timeout expired|too many requests", re.IGNORECASE)


@dataclass(frozen=True)
class Health:
    """What was found: one line for a person, whether the server is fit to get requests, whether it has the model."""

    healthy: bool
    report: str
    served: bool = True


def check_all(url: str, models: Sequence[str], timeout: float = DEFAULT_TIMEOUT_S) -> Health:
    """Checks those of the ensembles that the server has; it must have one, and all that it has must be healthy.

    Args:
        url, timeout: as for ``check``; the time is for each.
        models: the ensembles' names.
    """
    found = [check(url, model, timeout) for model in models]
    served = [one for one in found if one.served]
    ill = next((one for one in served if not one.healthy), None)
    return ill or (served or found)[0]


def check(url: str, model: str, timeout: float = DEFAULT_TIMEOUT_S, photo: bytes | None = None) -> Health:
    """Asks the server at ``url`` for the model's readiness, then for one classification.

    Args:
        url: ``http://HOST:PORT`` of Triton's HTTP endpoint.
        model: an ensemble that takes one encoded image. Of any other model only the readiness is asked, in effect: that
            it does not take a photo does not count against it.
        timeout: seconds for both together.
        photo: an encoded image; the package's own by default.
    """
    deadline = time.monotonic() + timeout
    try:
        status, body = _ask(
            url, f"/v2/models/{urllib.parse.quote(model, safe='')}/ready", min(timeout, READY_TIMEOUT_S)
        )
    except (OSError, http.client.HTTPException) as error:
        return Health(False, f"unhealthy: {url} does not answer ({_words(error)})")
    if status != 200:
        return Health(False, f"unhealthy: {model} is not ready (HTTP {status}{_reason(body)})", served=False)

    began = time.monotonic()
    try:
        path = f"/v2/models/{urllib.parse.quote(model, safe='')}/infer"
        photo = PHOTO.read_bytes() if photo is None else photo
        status, body = _ask(url, path, max(0.1, deadline - began), photo)
    except TimeoutError:
        return Health(True, f"healthy: {model} is ready, and busy: no answer to a photo within {timeout:g} s")
    except (OSError, http.client.HTTPException) as error:
        return Health(False, f"unhealthy: {url} breaks off the answer to a photo ({_words(error)})")
    if status == 200:
        return Health(True, f"healthy: {model} answered a photo in {1000 * (time.monotonic() - began):.0f} ms")
    reason = _reason(body)
    if not BUSY.search(reason) and BROKEN.search(reason):
        return Health(False, f"unhealthy: {model} is broken (HTTP {status}{reason})")
    return Health(True, f"healthy: {model} is ready, and refused a photo (HTTP {status}{reason})")


def _ask(url: str, path: str, timeout: float, image: bytes | None = None) -> tuple[int, bytes]:
    """One request: a GET, or a POST of an image as the only input's bytes. Returns the status and the body."""
    parts = urllib.parse.urlsplit(url)
    # Straight to the server: a proxy from the environment must not come between.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)
    try:
        if image is None:
            connection.request("GET", parts.path.rstrip("/") + path)
        else:
            headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
            connection.request("POST", parts.path.rstrip("/") + path, body=image, headers={**headers, **_token()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _token() -> dict[str, str]:
    """The header that opens inference, from the environment; empty where it has no token that could be sent."""
    token, file = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    if file:
        try:
            token = Path(file).read_text(encoding="ascii")
        except (OSError, ValueError):
            token = ""  # the server's own answer will say what is missing
    return {TOKEN_HEADER: token.strip()} if re.fullmatch(r"[!-~]+", token.strip()) else {}


def _reason(body: bytes) -> str:
    """``: `` and Triton's error message in one line, without a stack trace; empty where there is none."""
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return ": " + re.sub(r"\s+", " ", str(message).split("\nAt:")[0]).strip()[:300]


def _words(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def main(arguments: list[str] | None = None) -> int:
    """Prints the line; 0 if healthy, 1 if not, as Docker expects it of a health check."""
    parser = argparse.ArgumentParser(
        prog="python3 -m triton_vision.server.health",
        description="Asks a server whether its ensemble is ready and answers a photo. Exit code 0: healthy, 1: not.",
    )
    parser.add_argument(
        "--url", default=os.environ.get(URL_VARIABLE) or DEFAULT_URL, help=f"default: ${URL_VARIABLE}, or {DEFAULT_URL}"
    )
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        metavar="NAME[,NAME]",
        help=f"the ensembles, of which the server must have one; default: ${MODEL_VARIABLE}, or {DEFAULT_MODEL}",
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="seconds (default: %(default)g)"
    )
    args = parser.parse_args(arguments)
    parts = urllib.parse.urlsplit(args.url)
    if parts.scheme != "http" or not parts.hostname:
        print(f"unhealthy: {args.url!r} is not an address: give http://HOST:PORT", flush=True)
        return 1
    names = [name for name in (part.strip() for part in args.model.split(",")) if name]
    if not names:
        print("unhealthy: no ensemble is named", flush=True)
        return 1
    found = check_all(args.url, names, args.timeout)
    print(found.report, flush=True)
    return 0 if found.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
