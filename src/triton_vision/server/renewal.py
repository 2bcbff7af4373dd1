"""Renewing a model's Python processes ("stubs") under a running Triton, where one has died or holds too much memory.

Triton never replaces a stub, and a stub's shared memory only grows. But when a model is loaded again with another
group of instances, Triton first makes the new ones and then ends the old ones, each when it has answered what it was
given: callers do not notice.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from triton_vision.run import debt_path, paid
from triton_vision.server.errors import ModelLoadError
from triton_vision.server.stubs import NAMELESS, SHM, Stub, StubWatch

MIB = 1024 * 1024
# A new stub takes 1 MiB at once, and a little more when its model has loaded.
STUB_BYTES = 2 * MIB
RESERVE, RESERVE_BYTES = "reserve", 2 * MIB
# What a region may keep: at most, what a batch of 32 photos takes in any stage of the suite, and where none is left.
LARGEST, ORDINARY, SMALLEST = 32 * MIB, 12 * MIB, 4 * MIB
# A region that has not grown for so long is as large as its work makes it.
SETTLED_S = 1.0
# A model that grows again after its regions were given back keeps them for longer each time; for less long while
# others may need the memory, because /dev/shm is more than half full.
LEAST_INTERVAL_S, SHORT_INTERVAL_S, MOST_INTERVAL_S = 30.0, 60.0, 900.0
# New stubs are looked for so often: after a renewal, or when a model was loaded through the API.
SEARCH_S = 1.0
# What takes longer than that to answer its caller puts off giving memory back; where others wait for a dead process, it
# is given up.
DEBT_S, DEAD_DEBT_S = 10.0, 4.0
# A model that loads anew may take so long, or three times what the whole start took.
LOAD_TIMEOUT_S = 30.0
# During a load, processes come and go one after the other, each in little more than a second.
STUCK_S = 3.0
# A load that failed (a new process died, too) is tried again before the server is restarted.
MOST_LOADS = 6
# By then Triton has let go of a process that was replaced.
HEALED_S = 5.0


class Index(Protocol):
    """What is asked of a server: ``ServerIndex`` or ``LocalIndex``."""

    def config(self, model: str) -> dict[str, Any]: ...

    def load(self, model: str, config: dict[str, Any], timeout: float) -> None: ...

    def __enter__(self) -> Index: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Reserve:
    """Shared memory that is kept for the first new process, since without any none could be made to free the rest.

    Args:
        path: the file that holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Fills it up, as far as there is room."""
        with contextlib.suppress(OSError), self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def give(self) -> None:
        """Gives it to whoever comes first."""
        self._path.unlink(missing_ok=True)


class Renewal:
    """Loading one model anew, in a thread of its own.

    Args:
        index: makes a connection to the server.
        model: its name.
        timeout: seconds for each of the at most two loads.
        sparing: whether to get along with the memory of a single new process for a moment, and so with one process.
        counts: how many instances each group shall have, where an earlier attempt may have left fewer.
        run: the server's run-time folder.
        urgent: whether its processes have to go, even if they still owe answers.
    """

    def __init__(
        self,
        index: Callable[[], Index],
        model: str,
        timeout: float,
        sparing: bool,
        counts: list[int] | None,
        run: Path,
        *,
        urgent: bool = False,
    ) -> None:
        self.model = model
        self.counts = counts
        self.problem = ""
        self.paid = True
        self.began = _clock()
        self.loading_since = math.inf
        self._urgent = urgent
        self._index, self._timeout, self._sparing = index, timeout, sparing
        self._debt, self._reserve = debt_path(run, model), Reserve(run / RESERVE)
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has come to an end, with a ``problem`` or without."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # A process that owes an answer to somebody must not be replaced before it has given it.
            with self._index() as index, paid(self._debt, DEAD_DEBT_S if self._urgent else DEBT_S) as self.paid:
                if not (self.paid or self._urgent):
                    raise ValueError("they are busy with images that take long")
                self.loading_since = _clock()
                self._reserve.give()
                self._load(index)
        except (ModelLoadError, OSError, KeyError, ValueError) as error:
            reasons = error.reasons if isinstance(error, ModelLoadError) else {}
            self.problem = reasons.get(self.model) or str(error) or type(error).__name__
        finally:
            self._reserve.take()

    def _load(self, index: Index) -> None:
        config = index.config(self.model)
        groups = config["instance_group"]
        if self.counts is None:
            self.counts = [int(group.get("count", 1)) for group in groups]
        for group in groups:
            # Another priority makes another group. 0 and 1 mean the same; an owner's own moves by one and back.
            limiter = group.setdefault("rate_limiter", {})
            limiter["priority"] = int(limiter.get("priority", 0)) ^ 1
        if self._sparing:
            for group in groups:
                group["count"] = 1
            index.load(self.model, config, self._timeout)
        for group, count in zip(groups, self.counts, strict=True):
            group["count"] = count
        index.load(self.model, config, self._timeout)


class Tending:
    """The stubs of one tritonserver while it serves.

    Args:
        server: tritonserver's process id.
        index: makes a connection to it.
        tell: takes a line for the operator.
        took: seconds that the server took to start.
        run: the server's run-time folder.
    """

    def __init__(
        self, server: int, index: Callable[[], Index], tell: Callable[[str], None], took: float, run: Path
    ) -> None:
        self._watch = StubWatch(server, SEARCH_S)
        self._index, self._tell, self._run = index, tell, run
        self._renewal: Renewal | None = None
        self._timeout = max(LOAD_TIMEOUT_S, 3 * took)
        self._running: list[Stub] = []
        self._changed = 0.0
        self._failures = 0
        self._healing: list[Stub] = []
        self._healed: dict[Stub, float] = {}
        self._counts: dict[str, list[int]] = {}
        self._sizes: dict[Stub, tuple[int, float]] = {}
        self._renewed: dict[str, float] = {}
        self._interval: dict[str, float] = defaultdict(lambda: LEAST_INTERVAL_S)
        self._complained: set[str] = set()
        self._search_until = 0.0
        self._watch.look()
        Reserve(run / RESERVE).take()

    def tend(self) -> str:
        """Looks at the stubs and renews what needs it; to be called several times a second, and returns at once.

        Returns:
            Why the server must be restarted; empty if it need not be.
        """
        # What dies right after it was made must have been seen alive, or nobody knows whose it was.
        running = self._watch.look(search=time.monotonic() < self._search_until)
        if running != self._running:
            self._running, self._changed = running, _clock()
        for stub in self._watch.frozen():
            self._tell(f"error: {stub.model}: a Python process has been stopped by a signal for seconds; killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        if self._renewal is not None:
            self._search_until = time.monotonic() + HEALED_S
            return self._finish(self._renewal) if self._renewal.done else self._stuck(self._renewal)
        if self._watch.nameless(HEALED_S):
            return f"Triton keeps a dead process of {NAMELESS}"
        lost = self._watch.lost()
        now = _clock()
        remaining = [stub for stub in lost if now - self._healed.get(stub, now) > HEALED_S]
        if remaining:
            return f"Triton keeps a dead Python process of {remaining[0].model}"
        new = [stub for stub in lost if stub not in self._healed]
        if new:
            model = new[0].model
            self._healing = [stub for stub in new if stub.model == model]
            count = len(self._healing)
            died = "a Python process died" if count == 1 else f"{count} Python processes died"
            self._tell(f"error: {model}: {died}; replacing the model's processes")
            self._begin(model, running)
        else:
            model = self._overgrown(running)
            if model:
                self._healing = []
                self._begin(model, running)
        return ""

    def _begin(self, model: str, running: list[Stub]) -> None:
        count = sum(stub.model == model for stub in running)
        self._renewal = Renewal(
            self._index,
            model,
            self._timeout,
            # The processes that go on serving may grow meanwhile, by as much as a large batch.
            count * STUB_BYTES + LARGEST > _free(),
            self._counts.get(model),
            self._run,
            urgent=bool(self._healing),
        )

    def _stuck(self, renewal: Renewal) -> str:
        """Why a load will never end: Triton waits for ever for a process that dies while it is started or ended."""
        if _clock() - max(renewal.loading_since, self._changed) <= STUCK_S:
            return ""
        dead = [stub for stub in self._watch.lost(STUCK_S) if stub.model == renewal.model]
        if not (set(dead) - set(self._healing) or self._watch.nameless(STUCK_S)):
            return ""
        return f"Triton waits for a Python process of {renewal.model} that died while the model was loaded anew"

    def _finish(self, renewal: Renewal) -> str:
        model, self._renewal = renewal.model, None
        now = _clock()
        if self._healing and not renewal.paid:
            self._tell(f"warning: {model}: its Python processes still owed answers, whose callers get none")
        if self._healing and renewal.problem:
            self._failures += 1
            if self._failures >= MOST_LOADS or now - renewal.began >= self._timeout:
                return f"the Python processes of {model} could not be replaced: {renewal.problem}"
            self._tell(f"error: {model}: not replaced, trying again: {renewal.problem}")
            return ""
        if renewal.counts is not None:
            self._counts[model] = renewal.counts
        if not self._healing:
            again = now - self._renewed.get(model, -MOST_INTERVAL_S) < 4 * self._interval[model]
            self._interval[model] = min(2 * self._interval[model], MOST_INTERVAL_S) if again else LEAST_INTERVAL_S
            self._renewed[model] = now
        self._healed.update(dict.fromkeys(self._healing, now))
        if not renewal.problem:
            if self._healing:
                self._failures = 0
                self._tell(f"replaced: {model}: all its Python processes, in {now - renewal.began:.1f} s")
            self._counts.pop(model, None)
            self._complained.discard(model)
            return ""
        if model not in self._complained:
            self._complained.add(model)
            self._tell(
                f"warning: {model}: its Python processes cannot be replaced to free their shared memory, trying again "
                f"later: {renewal.problem}"
            )
        return ""

    def _overgrown(self, running: list[Stub]) -> str:
        """The model with the largest region of those that are beyond the bound and at rest; empty if there is none."""
        now = _clock()
        sizes = {stub: stub.size() for stub in running}
        self._sizes = {
            stub: self._sizes[stub] if self._sizes.get(stub, (-1, 0.0))[0] == size else (size, now)
            for stub, size in sizes.items()
        }
        limit = bound(_total(), len(running), _free())
        moving = {stub.model for stub, (_, since) in self._sizes.items() if now - since < SETTLED_S}
        for stub in sorted(sizes, key=lambda stub: -sizes[stub]):
            if sizes[stub] <= limit:
                break
            if stub.model not in moving and self._may_renew(stub.model, now):
                return stub.model
        return ""

    def _may_renew(self, model: str, now: float) -> bool:
        interval = self._interval[model]
        if _free() < _total() / 2:
            interval = min(interval, SHORT_INTERVAL_S)
        return now - self._renewed.get(model, -MOST_INTERVAL_S) >= interval


def bound(total: int, stubs: int, free: int) -> int:
    """How many bytes a stub's region may keep where ``stubs`` share ``total`` bytes of /dev/shm, ``free`` of them free.

    Replacing a process takes memory before it gives any back, so the regions of everyday work are left alone as long as
    there is room for that work.
    """
    least = SMALLEST if free < RESERVE_BYTES else ORDINARY
    return max(least, min(LARGEST, total // 8 // max(stubs, 1)))


def _clock() -> float:
    return time.monotonic()


def _total() -> int:
    info = os.statvfs(SHM)
    return info.f_blocks * info.f_frsize


def _free() -> int:
    info = os.statvfs(SHM)
    return info.f_bavail * info.f_frsize
