"""What a stage raises.

StageError           a model before this stage is broken: the request fails (INTERNAL), and no caller can help it
├── ConfigError      at load: a field of config.pbtxt is wrong; the message names it
├── InvalidRequest   the whole request is wrong (INVALID_ARGUMENT)
├── RequestDropped   nobody waits for the answer any more: its timeout has passed, or its caller cancelled
├── Overloaded       the whole request is turned away, since its answer would come too late (UNAVAILABLE)
└── ImageRefused     one item is refused; under ``on_bad_image: mask`` its neighbours are answered
"""

from __future__ import annotations

import re

# What a reason may be: STATUS, errors and metrics hold it, and end it where the word ends.
WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")
# The suite's own; their order is the order in which the checks are made.
REASONS = ("empty", "too_large", "unsupported_format", "too_complex", "too_many_pixels", "truncated", "corrupt")


class StageError(Exception):
    """Base of what a stage raises on purpose; its text reaches the caller."""


class ConfigError(StageError):
    """A field of the model's configuration is missing or wrong."""


class InvalidRequest(StageError):
    """A request as a whole cannot be answered: a wrong parameter, or tensors that do not belong together."""


class RequestDropped(StageError):
    """A request whose answer nobody waits for.

    Attributes:
        cancelled: its caller cancelled it; else its timeout has passed.
    """

    def __init__(self, message: str, *, cancelled: bool) -> None:
        self.cancelled = cancelled
        super().__init__(message)


class Overloaded(StageError):
    """More work than can be done in time: the request is turned away before anything has been paid for it.

    Args:
        wait: seconds that its answer would take.
    """

    def __init__(self, wait: float) -> None:
        # The words with which Triton itself turns requests away, by which clients and health checks know it.
        super().__init__(f"Exceeds maximum queue size: an answer would take about {wait:.1f} s; try again later")


class ImageRefused(StageError):
    """One item cannot be answered.

    Attributes:
        reason: one of REASONS, or a later stage's own word.
        detail: what is wrong, for a person; no path, no stack trace.

    Raises:
        ValueError: the reason is not one word, and no caller could tell where the detail begins.
    """

    def __init__(self, reason: str, detail: str) -> None:
        if WORD.fullmatch(reason) is None:
            raise ValueError(f"ImageRefused: the reason {reason!r} must be one word of letters, digits, _ and -")
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def shown(value: object) -> str:
    """What a caller sent, as an error may repeat it: in full only where it is short."""
    text = value if isinstance(value, str) else str(value)[:100]
    return repr(value) if len(text) <= 60 else f"{text[:40]!r}… ({len(text)} characters)"
