"""What a stage raises.

StageError
├── ConfigError      at load: a field of config.pbtxt is wrong; the message names it
├── InvalidRequest   the whole request is wrong (INVALID_ARGUMENT)
├── RequestDropped   nobody waits for the answer any more: its timeout has passed, or its caller cancelled
└── ImageRefused     one item is refused; under ``on_bad_image: mask`` its neighbours are answered
"""

from __future__ import annotations

# The words that STATUS, errors and metrics use; their order is the order in which the checks are made.
REASONS = ("empty", "too_large", "unsupported_format", "too_many_pixels", "truncated", "corrupt")


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


class ImageRefused(StageError):
    """One item cannot be answered.

    Attributes:
        reason: one of REASONS, or a later stage's own word.
        detail: what is wrong, for a person; no path, no stack trace.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")
