"""How long an answer takes: measured on the server's metrics, and told to the first stage of each chain.

A chain is as fast as its slowest step, which waits behind a queue of its own. What waits there has been decoded
already, so requests that would come too late are to be turned away before: by the first stage (``stages.gate``).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_vision.repository import Model, fitted
from triton_vision.run import PAGE, page_path

PERIOD_S, IDLE_PERIOD_S = 0.1, 0.3
# A rate is measured over so many seconds during which requests were waiting all the time.
LEAST_WINDOW_S, WINDOW_S = 0.5, 4.0
# Seconds that an answer may take, where the first stage's parameter `patience` does not say otherwise.
PATIENCE_S = 3.0
# While nothing is known of a model's rate, no more requests than these may wait for it.
UNKNOWN_QUEUE = 256
SAMPLE = re.compile(r'^nv_inference_(pending_request_count|count|request_success)\{model="([^"]+)".*\} (\S+)$', re.M)


@dataclass(frozen=True)
class Chain:
    """What follows a first stage.

    Attributes:
        steps: the models of each ensemble that begins with it, without itself.
        instances: of the first stage.
        patience: seconds that an answer may take.
    """

    steps: tuple[tuple[str, ...], ...]
    instances: int
    patience: float


def chains(served: Mapping[str, Model]) -> dict[str, Chain]:
    """First stage -> what follows it, for every image ensemble that is served.

    Args:
        served: the models.
    """
    steps: dict[str, list[tuple[str, ...]]] = {}
    for model in served.values():
        if model.is_image_ensemble() and len(model.steps()) > 1:
            first, *others = model.steps()
            steps.setdefault(first, []).append(tuple(others))
    return {first: _chain(fitted(served[first]), tuple(others)) for first, others in steps.items() if first in served}


def _chain(first: Model, steps: tuple[tuple[str, ...], ...]) -> Chain:
    config = first.config
    instances = sum(max(1, group.count) for group in config.instance_group) if config is not None else 1
    patience = PATIENCE_S
    if config is not None and "patience" in config.parameters:
        with contextlib.suppress(ValueError):
            patience = float(config.parameters["patience"].string_value)
    return Chain(steps, max(1, instances), patience)


class Rate:
    """What one model does in a second while requests wait for it."""

    def __init__(self) -> None:
        self.waiting = 0.0
        self.per_second = 0.0
        self._each = 1.0
        self._busy: deque[tuple[float, float, float]] = deque()

    def see(self, now: float, waiting: float, done: float, requests: float) -> None:
        """Takes a sample.

        Args:
            now: seconds.
            waiting: requests that wait for it.
            done: items that it has done since it was loaded.
            requests: in so many requests.
        """
        self.waiting = waiting
        if not waiting or (self._busy and done < self._busy[-1][1]):
            self._busy.clear()
            self._each = 1.0  # the next callers may send fewer at once
            return
        self._busy.append((now, done, requests))
        while now - self._busy[0][0] > WINDOW_S:
            self._busy.popleft()
        seconds, count, calls = now - self._busy[0][0], done - self._busy[0][1], requests - self._busy[0][2]
        if calls > 0:
            self._each = max(1.0, count / calls)
        self.waiting = waiting * self._each
        if seconds >= LEAST_WINDOW_S and count:
            self.per_second = count / seconds

    def wait(self) -> float:
        """Seconds until an item that comes now is begun."""
        if self.per_second:
            return self.waiting / self.per_second
        return 0.0 if self.waiting <= UNKNOWN_QUEUE else math.inf


class Pace:
    """Measures and tells, in a thread of its own.

    Args:
        chains: first stage -> what follows it.
        run: the server's run-time folder, which holds the pages.
    """

    def __init__(self, chains: Mapping[str, Chain], run: Path) -> None:
        self._chains = dict(chains)
        self._rates = {name: Rate() for chain in chains.values() for steps in chain.steps for name in steps}
        self._pages = {first: page_path(run, first) for first in chains}
        for page in self._pages.values():
            page.write_bytes(bytes(PAGE.size))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, metrics: str) -> None:
        """Begins to measure the server whose metrics are at ``metrics``, a HOST:PORT."""
        if self._chains and metrics:
            self._thread = threading.Thread(target=self._run, args=(metrics,), name="pace", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends it. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, metrics: str) -> None:
        connection = http.client.HTTPConnection(metrics, timeout=1.0)
        # Opened once and written in place: whoever has mapped it sees the change.
        with contextlib.ExitStack() as stack:
            pages = {first: stack.enter_context(page.open("r+b", buffering=0)) for first, page in self._pages.items()}
            stack.callback(connection.close)
            while not self._ended.wait(
                PERIOD_S if any(rate.waiting for rate in self._rates.values()) else IDLE_PERIOD_S
            ):
                try:
                    connection.request("GET", "/metrics")
                    text = connection.getresponse().read().decode()
                except (OSError, http.client.HTTPException):
                    connection.close()  # the pages go stale, and every request is admitted
                    continue
                self.see(time.monotonic(), text)
                for first, page in pages.items():
                    page.seek(0)
                    page.write(PAGE.pack(time.monotonic(), *self.told(first)))

    def see(self, now: float, metrics: str) -> None:
        """Takes the text of Triton's metrics."""
        values: dict[str, dict[str, float]] = {}
        for what, model, value in SAMPLE.findall(metrics):
            of_model = values.setdefault(model, {})
            of_model[what] = of_model.get(what, 0.0) + float(value)
        for name, rate in self._rates.items():
            found = values.get(name, {})
            waiting = found.get("pending_request_count", 0.0)
            rate.see(now, waiting, found.get("count", 0.0), found.get("request_success", 0.0))

    def told(self, first: str) -> tuple[float, float, float]:
        """What the page of a first stage says: see ``run.PAGE``."""
        chain = self._chains[first]
        wait, room, each = 0.0, math.inf, 0.0
        for steps in chain.steps:
            rates = [self._rates[name] for name in steps]
            total = sum(rate.wait() for rate in rates)
            wait = max(wait, total)
            slowest = min((rate.per_second for rate in rates if rate.per_second and rate.waiting), default=math.inf)
            if total == math.inf:
                room = 0.0
            elif total:
                each = max(each, chain.instances / slowest)
                room = min(room, max(0.0, chain.patience - total) * slowest / chain.instances)
        return min(wait, 1e6), room, each
