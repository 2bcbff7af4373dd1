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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from triton_vision.repository import Model, fitted
from triton_vision.run import PAGE, PAGE_BYTES, page_path

PERIOD_S, IDLE_PERIOD_S = 0.1, 0.3
# A rate is measured over so many seconds during which requests were waiting all the time.
LEAST_WINDOW_S, WINDOW_S = 0.5, 4.0
# Where so much time lies between two samples, the machine stood still, and nothing follows from what was done.
STALL_S = 1.0
# So long after requests waited for a model its rate still bounds what is admitted: its queue may be short, and is to
# stay so.
BUSY_S = 2.0
# Seconds that an answer may take, where the first stage's parameter `patience` does not say otherwise.
PATIENCE_S = 3.0
# While nothing is known of a model's rate, no more requests than these may wait for it.
UNKNOWN_QUEUE = 256
SAMPLES = ("pending_request_count", "count", "request_success", "exec_count")
SAMPLE = re.compile(rf'^nv_inference_({"|".join(SAMPLES)})\{{model="([^"]+)".*\}} (\S+)$', re.M)


@dataclass(frozen=True)
class Chain:
    """What follows a first stage.

    Attributes:
        steps: the models of each ensemble that begins with it, without itself.
        patience: seconds that an answer may take.
    """

    steps: tuple[tuple[str, ...], ...]
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
    patience = PATIENCE_S
    if config is not None and "patience" in config.parameters:
        with contextlib.suppress(ValueError):
            patience = float(config.parameters["patience"].string_value)
    return Chain(steps, patience)


class Sample(NamedTuple):
    """What Triton's metrics say of a model.

    Attributes:
        at: when, in seconds.
        waiting: requests that wait for it.
        done: items that it has done since it was loaded.
        requests: in so many requests.
        batches: in so many executions.
    """

    at: float
    waiting: float
    done: float
    requests: float
    batches: float


class Rate:
    """What one model does in a second while requests wait for it."""

    def __init__(self) -> None:
        self.per_second = 0.0
        # Requests that wait; items of those and of the batch at work.
        self.waiting = self.ahead = 0.0
        self._each = 1.0
        self._last = Sample(-math.inf, 0.0, 0.0, 0.0, 0.0)
        # The end of a batch since which requests have been waiting all the time.
        self._since: Sample | None = None
        # Of late: items, the seconds that they took; items since requests began to wait, and in how many requests.
        self._items = self._seconds = self._wave = self._calls = 0.0
        # When requests waited last; when the batch at work was begun, and how many items it has.
        self._waited, self._began, self._batch = -math.inf, 0.0, 0.0

    def see(self, sample: Sample) -> None:
        """Takes a sample, later than the one before."""
        last, self._last = self._last, sample
        passed = sample.at - last.at
        if not sample.waiting or sample.done < last.done or passed > STALL_S:
            self._since = None
        elif sample.done > last.done:
            if self._since is not None:
                self._learn(self._since, sample)
            self._since = sample
        if not sample.waiting:
            self._wave = self._calls = 0.0  # the next callers may send fewer at once
            self._each = 1.0
        else:
            self._waited = sample.at
        if sample.batches > last.batches:
            # It took what waited before, and what has come since then, about as fast as it is done.
            taken = last.waiting - sample.waiting + min(passed, IDLE_PERIOD_S) * self.per_second
            self._began, self._batch = sample.at, max(0.0, taken) / (sample.batches - last.batches)
        self.waiting, self.ahead = sample.waiting, sample.waiting * self._each
        if self.is_busy(sample.at):
            # Those of the batch at work are among neither the waiting nor the done.
            self.ahead += max(0.0, self._batch - (sample.at - self._began) * self.per_second)

    def _learn(self, since: Sample, sample: Sample) -> None:
        items, seconds, calls = sample.done - since.done, sample.at - since.at, sample.requests - since.requests
        kept = max(0.0, 1.0 - seconds / WINDOW_S)
        self._items, self._seconds = kept * self._items + items, kept * self._seconds + seconds
        self._wave, self._calls = kept * self._wave + items, kept * self._calls + calls
        if self._calls:
            self._each = max(1.0, self._wave / self._calls)
        if self._seconds >= LEAST_WINDOW_S:
            self.per_second = self._items / self._seconds

    def is_busy(self, now: float) -> bool:
        """Whether requests have waited for it of late, so that its rate is what the next ones wait for."""
        return self.per_second > 0.0 and now - self._waited < BUSY_S

    def wait(self) -> float:
        """Seconds until an item that comes now is done."""
        if self.per_second:
            return self.ahead / self.per_second
        return 0.0 if self.ahead <= UNKNOWN_QUEUE else math.inf


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
            page.write_bytes(bytes(PAGE_BYTES))
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
        rates = self._rates.values()
        # Opened once and written in place: whoever has mapped it sees the change.
        with contextlib.ExitStack() as stack:
            pages = {first: stack.enter_context(page.open("r+b", buffering=0)) for first, page in self._pages.items()}
            stack.callback(connection.close)
            period = IDLE_PERIOD_S
            while not self._ended.wait(period):
                try:
                    connection.request("GET", "/metrics")
                    text = connection.getresponse().read().decode()
                except (OSError, http.client.HTTPException):
                    connection.close()  # the pages go stale, and every request is admitted
                    continue
                now = time.monotonic()
                self.see(now, text)
                for first, page in pages.items():
                    page.seek(0)
                    page.write(PAGE.pack(now, *self.told(first, now)))
                period = PERIOD_S if any(rate.ahead or rate.is_busy(now) for rate in rates) else IDLE_PERIOD_S

    def see(self, now: float, metrics: str) -> None:
        """Takes the text of Triton's metrics."""
        values: dict[str, dict[str, float]] = {}
        for what, model, value in SAMPLE.findall(metrics):
            of_model = values.setdefault(model, {})
            of_model[what] = of_model.get(what, 0.0) + float(value)
        for name, rate in self._rates.items():
            found = values.get(name, {})
            rate.see(Sample(now, *(found.get(what, 0.0) for what in SAMPLES)))

    def told(self, first: str, now: float) -> tuple[float, float, float, float]:
        """What the page of a first stage says after its time: see ``run.PAGE``."""
        chain = self._chains[first]
        wait, each, waiting = 0.0, 0.0, 0.0
        for steps in chain.steps:
            rates = [self._rates[name] for name in steps]
            wait = max(wait, sum(rate.wait() for rate in rates))
            each = max([each, *(1.0 / rate.per_second for rate in rates if rate.is_busy(now))])
            waiting = max([waiting, *(rate.waiting for rate in rates)])
        return min(wait, 1e6), chain.patience, each, waiting
