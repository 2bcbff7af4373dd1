"""Asking a server of one's own over HTTP on this machine, where its gRPC endpoint may want a caller's certificate.

The counterpart of ``index`` and ``warmup`` for a server with TLS: a certificate is seldom one for 127.0.0.1, and with
mutual TLS the keeper has none that its server would accept.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from triton_vision.server.errors import ModelLoadError, ServerStartError
from triton_vision.server.index import broken_models, plain_reason
from triton_vision.server.warmup import insist


class LocalIndex:
    """``ServerIndex`` over HTTP.

    Args:
        address: ``HOST:PORT`` of the HTTP endpoint.
        headers: sent with every question.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = dict(headers)

    def live(self, timeout: float) -> bool:
        """Whether the server answers within ``timeout`` seconds; takes about that long if not."""
        deadline = time.monotonic() + timeout
        try:
            return self._ask("GET", "/v2/health/live", timeout)[0] == 200
        except (OSError, http.client.HTTPException):
            time.sleep(max(0.0, deadline - time.monotonic()))  # a port that nobody listens on refuses at once
            return False

    def broken(self) -> dict[str, str]:
        """Model name -> why, of every model that is not ready; the reason may be empty.

        Raises:
            ServerStartError: the server does not tell.
        """
        try:
            status, body = self._ask("POST", "/v2/repository/index", 5.0, b"{}")
            if status == 200:
                models = json.loads(body)
                return broken_models((m["name"], m.get("state", ""), m.get("reason", "")) for m in models)
            problem = f"HTTP {status}, {_error(body)}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = str(error)
        raise ServerStartError(f"Triton does not say which models are ready: {problem}")

    def config(self, model: str) -> dict[str, Any]:
        """As ``ServerIndex.config``."""
        return dict(json.loads(self._ask_about(model, "GET", f"{_path('/v2/models', model)}/config", 5.0)))

    def load(self, model: str, config: Mapping[str, Any], timeout: float) -> None:
        """As ``ServerIndex.load``."""
        body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        self._ask_about(model, "POST", f"{_path('/v2/repository/models', model)}/load", timeout, body)

    def _ask_about(self, model: str, method: str, path: str, timeout: float, body: bytes | None = None) -> bytes:
        try:
            status, answer = self._ask(method, path, timeout, body)
            problem = "" if status == 200 else _error(answer) or f"HTTP {status}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
        if problem:
            raise ModelLoadError({model: problem})
        return answer

    def classify_once(self, ensemble: str, timeout: float = 60.0, folder: Path | None = None) -> None:
        """As ``warmup.classify_once``.

        Raises:
            ModelLoadError: the ensemble did not answer, with its reason.
        """
        path = f"/v2/models/{urllib.parse.quote(ensemble, safe='')}/infer"
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}

        def ask(photo: bytes, seconds: float) -> tuple[int, str]:
            try:
                status, body = self._ask("POST", path, seconds, photo, headers)
            except (OSError, http.client.HTTPException) as error:
                return 500, str(error) or type(error).__name__
            return status, "" if status == 200 else _error(body)

        insist(ensemble, ask, timeout, folder)

    def _ask(
        self,
        method: str,
        path: str,
        timeout: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        # http.client asks no environment for a proxy.
        connection = http.client.HTTPConnection(self._address, timeout=timeout)
        try:
            connection.request(method, path, body=body, headers={**self._headers, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def __enter__(self) -> LocalIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _path(folder: str, model: str) -> str:
    return f"{folder}/{urllib.parse.quote(model, safe='')}"


def _error(body: bytes) -> str:
    """Triton's error message in one line; empty where there is none."""
    try:
        message: Any = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return plain_reason(str(message))
