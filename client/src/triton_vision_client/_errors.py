"""What a call can raise.

VisionClientError
├── BadImageError              an image was refused, or could not be read; ``reason`` says why
├── RequestTooLargeError       the request is larger than one message may be
├── DeadlineExceededError      a server took the call and was late
├── ServerUnavailableError     no server could be reached, or its model is broken
│   └── ServerOverloadedError  a queue was full, or the wait in it expired
├── ModelNotFoundError         the server has no such model
├── AuthenticationError        the server wants other credentials
└── ServerError                anything else that the server answers
"""

from __future__ import annotations

from typing import Optional


class VisionClientError(Exception):
    """Base of all errors of this package."""


class BadImageError(VisionClientError):
    """One image was refused.

    Attributes:
        reason: the server's word, such as ``empty``, ``too_large``, ``too_many_pixels``, ``too_complex``,
            ``unsupported_format``, ``truncated`` or ``corrupt``; or ``unreadable`` where the client could not read its
            source.
        detail: what is wrong, for a person.
        index: which image of the request, from 0; None if it is known by other means.
    """

    def __init__(self, reason: str, detail: str, index: Optional[int] = None) -> None:
        self.reason = reason
        self.detail = detail
        self.index = index
        super().__init__(reason, detail, index)

    @classmethod
    def read(cls, text: str, index: Optional[int]) -> BadImageError:
        """The error of a server's words, which are ``REASON: DETAIL`` wherever they stand."""
        reason, _, detail = text.partition(": ")
        return cls(reason, detail, index)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class RequestTooLargeError(VisionClientError):
    """The request does not fit into one message; send fewer or smaller images."""


class DeadlineExceededError(VisionClientError):
    """The call's timeout passed after a server had taken it."""


class ServerUnavailableError(VisionClientError):
    """No server could be reached, or the server's model is broken.

    Attributes:
        broken: whether it is the model; then only a restart of that server helps.
    """

    broken = False


class ServerOverloadedError(ServerUnavailableError):
    """The server's queue or its memory was full, or the request waited for too long.

    Attributes:
        waited: whether it waited in vain; then no other server is asked, for the time is gone.
        no_room: whether it was the server's shared memory that had no room, for this request or for others that it
            was batched with.
        wait: seconds after which the server expects to have room, where it says so.
    """

    waited = no_room = False
    wait: Optional[float] = None


class ModelNotFoundError(VisionClientError):
    """The server has no such model, or has not loaded it."""


class AuthenticationError(VisionClientError):
    """The server refuses the credentials, or the lack of them."""


class ServerError(VisionClientError):
    """The server answered with an error that no other class describes.

    Attributes:
        suspect: whether it may be the server's own fault, so that another one is worth a try.
    """

    suspect = False
