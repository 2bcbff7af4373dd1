"""Fitting a model to the machine: how many instances it gets, and how long its queue may grow.

A model asks for it with parameters in its ``config.pbtxt``, the one place where they are set::

    parameters [
      { key: "instances" value: { string_value: "auto" } },
      { key: "queue_size" value: { string_value: "auto" } }
    ]

Either may be a number instead. A server that is started without ``triton-vision serve`` takes what the
configuration's own fields say.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from triton_vision.cpu import threads_of, visible_cores
from triton_vision.repository.model import Model, RepositoryError

AUTO = "auto"
# One more than there are cores: while one hands over its results, another has work for the core; and while some are
# busy with a request of 32 large images, one answers small ones. An instance is a process of some 60 MB, so beyond
# this many each gets several threads instead.
MOST = 16
# Requests that may wait, for each core: well under a second of work.
QUEUE_PER_CORE = 128


@dataclass(frozen=True)
class Scale:
    """What a model gets on this machine.

    Attributes:
        instances: processes of the model.
        threads: of each of them; None where the configuration sets them itself.
        queue_size: requests that may wait; 0 is any number.
    """

    instances: int
    threads: int | None
    queue_size: int

    def __str__(self) -> str:
        threads = "" if self.threads is None else f" of {_count(self.threads, 'thread')}"
        queue = f", {self.queue_size} requests may wait" if self.queue_size else ""
        return f"{_count(self.instances, 'instance')}{threads}{queue}"


def scaled(model: Model, cores: int | None = None) -> tuple[Model, Scale] | None:
    """The model with its configuration fitted to the machine, or None if it does not ask for that.

    Args:
        cores: by default those visible to this process, in a container not the host's.

    Raises:
        RepositoryError: a parameter is neither ``auto`` nor a number of at least 1.
    """
    parameters = {} if model.config is None else model.config.parameters
    wanted = {key: parameters[key].string_value.strip() for key in ("instances", "queue_size") if key in parameters}
    if not wanted:
        return None
    cores = cores or visible_cores()
    config = copy.deepcopy(model.config)
    if "instances" in wanted:
        count = _number(model.name, "instances", wanted["instances"], min(cores + 1, MOST))
        groups = config.instance_group
        if len(groups) > 1:
            raise RepositoryError(f"{model.name}: parameters instances: there are several instance groups; set one")
        group = groups[0] if groups else groups.add()
        group.count = count
    queue = config.dynamic_batching.default_queue_policy
    if "queue_size" in wanted:
        queue.max_queue_size = _number(model.name, "queue_size", wanted["queue_size"], QUEUE_PER_CORE * cores)
    instances = sum(max(1, group.count) for group in config.instance_group) or 1
    threads = None if "threads" in parameters else threads_of(cores, instances)
    return replace(model, config=config), Scale(instances, threads, queue.max_queue_size)


def _number(model: str, key: str, text: str, auto: int) -> int:
    if text == AUTO:
        return auto
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise RepositoryError(f"{model}: parameters {key}: {text!r} is neither auto nor a number of at least 1")
    return int(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
