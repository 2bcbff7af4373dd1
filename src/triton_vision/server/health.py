"""A container's health: are its image ensembles ready, and do they still answer a photo?

``python3 -m triton_vision.server.health`` asks the server over HTTP. Triton's own readiness stays green when a Python
stub has died or a core fails on every image, so one real photo goes through each whole chain. The server is unhealthy
when an ensemble is not ready or has been unloaded, fails on the photo, or leaves it unanswered while it answers nobody
else either. A photo that is rightly refused is an answer. A full queue, or a late answer from a server that answers
others, is a sign of load: restarting a busy server would only move its load to the next, so it counts as healthy.

Standard library only, and quick to start: an orchestrator runs this every few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_vision.probe import photo_for, takes_a_photo, verdict
from triton_vision.server.asking import (
    TOKEN_VARIABLE,
    base_path,
    connect,
    get,
    inference_token,
    is_address,
    model_path,
    reason_in,
    words,
)
from triton_vision.terminal import printable

URL_VARIABLE, MODEL_VARIABLE = "TRITON_VISION_HEALTH_URL", "TRITON_VISION_HEALTH_MODEL"
REPOSITORY_VARIABLE = "TRITON_VISION_HEALTH_REPOSITORY"
DEFAULT_URL = "http://127.0.0.1:8000"
# Asked where nobody names an ensemble and the server does not say which it has.
KNOWN_MODELS = ("ensemble", "ensemble_lite")
# Below the time that the image's HEALTHCHECK and Kubernetes probes should allow.
DEFAULT_TIMEOUT_S = 15.0
# A photo without an answer after this time may be left, if others have theirs.
PATIENCE_S = 0.5
# Above it, a timeout is taken for a slip.
LONGEST_S = 3600.0
CLOSED = (401, 403)


@dataclass(frozen=True)
class Health:
    """What was found: one line for a person, whether the server is fit to get requests, whether it has the model."""

    healthy: bool
    report: str
    served: bool = True


def check_all(
    url: str,
    models: Sequence[str] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    repository: Path | None = None,
) -> Health:
    """Checks the server's image ensembles at the same time; all of them must be healthy.

    Args:
        url: as for ``check``.
        models: the ensembles' names; the server must have one of them, and those that it has are asked. With none, the
            server is asked which it has.
        timeout: seconds for all of it.
        repository: the server's model repository, for the photos in it (``ENSEMBLE/probe.jpg``), and for the ensembles
            that the server should have.
    """
    deadline = time.monotonic() + timeout
    names = list(models)
    if not names:
        try:
            listed = image_ensembles(url, deadline)
            if listed is not None:
                expected = {*KNOWN_MODELS, *_pipelines(repository)} - {*listed}
                gone = [name for name in sorted(expected) if _is_unloaded(url, name, deadline)]
                if gone:
                    return Health(False, f"unhealthy: {', '.join(gone)} has been unloaded")
                if not listed:
                    return _ready(url, deadline)
        except LookupError as error:
            return Health(False, f"unhealthy: {error}")
        except (OSError, http.client.HTTPException) as error:
            return Health(False, f"unhealthy: {url} does not answer ({words(error)})")
        names = listed or list(KNOWN_MODELS)
    found: dict[str, Health] = {}

    def ask(name: str) -> None:
        inside = name == os.path.basename(name) and name.strip(".")  # a server may call its models what it likes
        folder = repository / name if repository is not None and inside else None
        try:
            found[name] = check(url, name, deadline - time.monotonic(), photo_for(folder))
        except OSError as error:
            found[name] = Health(False, f"unhealthy: {error.filename} cannot be read ({words(error)})")

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served = [found[name] for name in names if found[name].served]
    if not served and not models:
        return Health(
            False,
            f"unhealthy: none of {', '.join(names)} is ready, and the server names no other ensemble: if it has one, "
            f"name it with --model or ${MODEL_VARIABLE}",
            served=False,
        )
    ill = next((one for one in served if not one.healthy), None)
    return ill or (served or [found[name] for name in names])[0]


def image_ensembles(url: str, deadline: float) -> list[str] | None:
    """The names of the loaded ensembles that take a photo; None if the server does not say, or has loaded nothing.

    Asks the statistics and the configurations, which are open without a token unless somebody has closed them.

    Raises:
        LookupError: a model is loaded, but not to be found by its name.
        OSError, http.client.HTTPException: the server cannot be reached.
    """
    status, body = get(url, "/v2/models/stats", deadline)
    loaded = _statistics(body) if status == 200 else None
    if not loaded:
        return None
    names = []
    for name in loaded:
        status, body = get(url, f"{model_path(name)}/config", deadline)
        if status in CLOSED:
            return None
        if status == 404:  # Triton does not decode the name in a path
            raise LookupError(f"{name} is loaded, but cannot be asked over HTTP (HTTP {status}{reason_in(body)})")
        if status == 200 and _takes_a_photo(body):
            names.append(name)
    return names


def check(url: str, model: str, timeout: float = DEFAULT_TIMEOUT_S, photo: bytes | None = None) -> Health:
    """Asks the server at ``url`` for the model's readiness, then for an answer to a photo.

    Args:
        url: ``http://HOST:PORT`` of Triton's HTTP endpoint.
        model: an ensemble that takes one encoded image. That another model turns the photo down does not count against
            it.
        timeout: seconds for both together.
        photo: an encoded image; the package's own by default.
    """
    deadline = time.monotonic() + timeout
    try:
        ready, body = get(url, f"{model_path(model)}/ready", deadline)
    except (OSError, http.client.HTTPException) as error:
        return Health(False, f"unhealthy: {url} does not answer ({words(error)})")
    if ready != 200 and ready not in CLOSED:
        return Health(False, f"unhealthy: {model} is not ready (HTTP {ready}{reason_in(body)})", served=False)

    others = Others(url, model, deadline)
    began = time.monotonic()
    try:
        answer = _send(url, model, photo_for(None) if photo is None else photo, deadline, others)
    except TimeoutError:
        answer = None
    except (OSError, http.client.HTTPException) as error:
        return Health(False, f"unhealthy: {url} breaks off the answer to a photo ({words(error)})")
    took = time.monotonic() - began
    if answer is None:
        return _busy(model, f"no answer to a photo within {took:.1f} s", others, deadline)
    status, body = answer
    reason = reason_in(body)
    told = f"HTTP {status}{reason}"
    found = verdict(status, reason.removeprefix(": "))
    if found == "answered":
        return Health(True, f"healthy: {model} answered a photo in {1000 * took:.0f} ms")
    if found == "busy":
        return _busy(model, f"turned a photo away ({told})", others, deadline)
    if found == "broken":
        if status == 400 and ready == 200 and _takes_no_photo(url, model, deadline):
            return Health(True, f"healthy: {model} is ready, and takes no photo")
        # Where its readiness is closed, this is how a server says that it does not have the model at all.
        served = ready == 200 or not re.match(r"HTTP 4\d\d: request for unknown model", told, re.IGNORECASE)
        return Health(False, f"unhealthy: {model} is broken ({told})", served)
    if found == "closed":
        return Health(
            False, f"unhealthy: {model} cannot be tried without the inference token: set ${TOKEN_VARIABLE} ({told})"
        )
    return Health(True, f"healthy: {model} is ready, and refused a photo ({told})")


class Others:
    """Whether a model answers others, by the server's statistics, from the moment this is made.

    The server counts the photos of earlier checks, too, which it may answer long after they were given up. What is too
    slow for a check does not come to an answer twice while one lasts, so others are answered where the count has been
    seen to change twice.
    """

    def __init__(self, url: str, model: str, deadline: float) -> None:
        self._url, self._model, self._deadline = url, model, deadline
        self._last = self._now()
        self._changes = 0
        self.known = self._last is not None  # whether the server tells

    def answered(self) -> bool:
        """Whether they have been; asks anew."""
        now = self._now()
        if now is not None and self._last is not None and now != self._last:
            self._last = now
            self._changes += now > 0  # it begins anew with a model that is loaded again
        return self._changes > 1

    def _now(self) -> int | None:
        try:
            status, body = get(self._url, f"{model_path(self._model)}/stats", self._deadline)
        except (OSError, http.client.HTTPException):
            return None
        return (_statistics(body) or {}).get(self._model) if status == 200 else None


def _busy(model: str, what: str, others: Others, deadline: float) -> Health:
    """Load, if the server answers somebody; one that turns photos away is watched until the time is up.

    A server that turns them away and does not tell its statistics is believed: it says itself that it is busy.
    """
    turned_away = what.startswith("turned")
    while not others.answered():
        if turned_away and not others.known:
            break
        if time.monotonic() + PATIENCE_S > deadline:
            rest = "answers nobody else" if others.known else "does not tell whether it answers others"
            return Health(False, f"unhealthy: {model} is stuck: {what}, and the server {rest}")
        time.sleep(PATIENCE_S)
    return Health(True, f"healthy: {model} is ready, and busy: {what}")


def _ready(url: str, deadline: float) -> Health:
    """The health of a server that has nothing a photo could be sent to."""
    status, body = get(url, "/v2/health/ready", deadline)
    if status != 200:
        return Health(False, f"unhealthy: the server is not ready (HTTP {status}{reason_in(body)})", served=False)
    return Health(True, "healthy: the server is ready, and has no ensemble that takes a photo", served=False)


def _pipelines(repository: Path | None) -> set[str]:
    """The image ensembles of a repository, near enough to ask a server whether it has unloaded them."""
    found = set()
    for config in repository.glob("*/config.pbtxt") if repository is not None else ():
        with contextlib.suppress(OSError):
            text = config.read_bytes()
            if all(word in text for word in (b'"ensemble"', b'"IMAGE"', b'"STATUS"')):
                found.add(config.parent.name)
    return found


def _is_unloaded(url: str, model: str, deadline: float) -> bool:
    """Whether the server had the model: of one that it never had, it says something else."""
    status, body = get(url, f"{model_path(model)}/config", deadline)
    return status == 404 and "has no available versions" in reason_in(body)


def _takes_no_photo(url: str, model: str, deadline: float) -> bool:
    try:
        status, body = get(url, f"{model_path(model)}/config", deadline)
    except (OSError, http.client.HTTPException):
        return False
    return status == 200 and not _takes_a_photo(body)


def _takes_a_photo(config: bytes) -> bool:
    """``takes_a_photo`` of a configuration as Triton tells it."""
    try:
        told = json.loads(config)
        inputs = [(one["name"], one["data_type"], [int(size) for size in one["dims"]]) for one in told["input"]]
        outputs = [one["name"] for one in told["output"]]
        return takes_a_photo(told.get("platform", ""), int(told["max_batch_size"]), inputs, outputs)
    except (ValueError, KeyError, TypeError):
        return False


def _statistics(body: bytes) -> dict[str, int] | None:
    """Model name -> how often all its versions answered with success; None if this is not what Triton tells."""
    found: dict[str, int] = {}
    try:
        for one in json.loads(body)["model_stats"]:
            found[one["name"]] = found.get(one["name"], 0) + int(one["inference_stats"]["success"]["count"])
    except (ValueError, KeyError, TypeError):
        return None
    return found


def _send(url: str, model: str, photo: bytes, deadline: float, others: Others) -> tuple[int, bytes] | None:
    """Sends a photo as the only input's bytes. Returns the status and the body; None once others are answered first.

    Raises:
        TimeoutError: there is no answer, and others have none either.
    """
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0", **inference_token()}
    connection = connect(url, max(0.1, deadline - time.monotonic()))
    try:
        connection.request("POST", base_path(url) + f"{model_path(model)}/infer", body=photo, headers=headers)
        while True:
            left = deadline - time.monotonic()
            if select.select([connection.sock], [], [], max(0.0, min(PATIENCE_S, left)))[0]:
                break
            if others.answered():
                return None
            if left <= 0:
                raise TimeoutError
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def main(arguments: list[str] | None = None) -> int:
    """Prints the line; 0 if healthy, 1 if not, as Docker expects it of a health check."""
    parser = argparse.ArgumentParser(
        prog="python3 -m triton_vision.server.health",
        description="Asks a server whether its image ensembles are ready and answer a photo. Exit code 0: healthy, "
        "1: not.",
    )
    parser.add_argument(
        "--url", default=os.environ.get(URL_VARIABLE) or DEFAULT_URL, help=f"default: ${URL_VARIABLE}, or {DEFAULT_URL}"
    )
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE) or None,
        metavar="NAME[,NAME]",
        help="the ensembles to ask, of which the server must have one; "
        f"default: ${MODEL_VARIABLE}, or every ensemble of the server that takes a photo",
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=os.environ.get(REPOSITORY_VARIABLE) or None,
        metavar="DIR",
        help="the server's model repository, where ENSEMBLE/probe.jpg is the photo to send; "
        f"default: ${REPOSITORY_VARIABLE}, or none: the package's photo goes to every ensemble",
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="seconds (default: %(default)g)"
    )
    args = parser.parse_args(arguments)
    if not is_address(args.url):
        print(f"unhealthy: {args.url!r} is not an address: give http://HOST:PORT", flush=True)
        return 1
    if not 0 < args.timeout <= LONGEST_S:
        print(f"unhealthy: --timeout {args.timeout:g}: give seconds, at most {LONGEST_S:g}", flush=True)
        return 1
    names = [name for name in (part.strip() for part in (args.model or "").split(",")) if name]
    if args.model and not names:
        print("unhealthy: no ensemble is named", flush=True)
        return 1
    found = check_all(args.url, names, args.timeout, args.repository)
    print(printable(found.report), flush=True)
    return 0 if found.healthy else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python must not complain about it at exit, too
        sys.exit(f"error: cannot write to standard output: {error.strerror}")
