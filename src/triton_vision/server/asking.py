"""Questions to Triton over HTTP, for a health check: with the standard library alone, and straight to the server."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.parse
from pathlib import Path

# Where inference needs a token, serve has it from one of these, too; security.py has the names.
TOKEN_VARIABLE, TOKEN_HEADER = "TRITON_VISION_INFERENCE_TOKEN", "triton-grpc-protocol-inference"
READY_TIMEOUT_S = 5.0


def model_path(model: str) -> str:
    """The path of a model in Triton's HTTP API; the server may call its models what it likes."""
    return f"/v2/models/{urllib.parse.quote(model, safe='', errors='surrogatepass')}"


def get(url: str, path: str, deadline: float) -> tuple[int, bytes]:
    """A GET. Returns the status and the body.

    Raises:
        OSError, http.client.HTTPException: there is no answer by the deadline (``time.monotonic``), or a broken one.
    """
    connection = connect(url, max(0.1, min(READY_TIMEOUT_S, deadline - time.monotonic())))
    try:
        connection.request("GET", base_path(url) + path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connect(url: str, timeout: float) -> http.client.HTTPConnection:
    """Straight to the server: a proxy from the environment must not come between."""
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)


def base_path(url: str) -> str:
    """What stands before Triton's own paths, where a proxy serves it below one."""
    return urllib.parse.urlsplit(url).path.rstrip("/")


def is_address(url: str) -> bool:
    """Whether it is ``http://HOST[:PORT][/PATH]``."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
        return parts.scheme == "http" and bool(host) and parts.port != 0 and url.isprintable()
    except ValueError:  # such as a port above 65535
        return False


def inference_token() -> dict[str, str]:
    """The header that opens inference, from the environment; empty where it has no token that could be sent."""
    token, file = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    if file:
        try:
            token = Path(file).read_text(encoding="ascii")
        except (OSError, ValueError):
            token = ""  # the server's own answer will say what is missing
    return {TOKEN_HEADER: token.strip()} if re.fullmatch(r"[!-~]+", token.strip()) else {}


def reason_in(body: bytes) -> str:
    """``: `` and Triton's error message in one line, without a stack trace; empty where there is none."""
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return ": " + re.sub(r"\s+", " ", str(message).split("\nAt:")[0]).strip()[:300]


def words(error: Exception) -> str:
    """What went wrong on the way, for the end of a sentence."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
