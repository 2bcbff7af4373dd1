"""The photo that shows whether an image ensemble works: which photo, which ensembles, and what the answer means.

The start of ``serve`` and the health check share this, so that they agree. Standard library only: the health check
must start quickly.
"""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

PHOTO = Path(__file__).parent / "server" / "warm.jpg"
# In an ensemble's directory, beside its config.pbtxt, for a pipeline that does not take the package's photo.
OWN_PHOTO = "probe.jpg"
LARGEST = 32 * 1024 * 1024

# What Triton answers, with 503 or UNAVAILABLE, when there is more work than it can do.
BUSY = re.compile(r"exceeds maximum queue size|timeout expired", re.IGNORECASE)
# How the suite refuses an image; Triton puts the ensemble in front. Any other 400 is a failure: Triton answers so when
# models of a chain do not fit together, and a model may fail with that status, too.
REFUSAL = re.compile(r"(in ensemble '.+?', )*image \d+: [A-Za-z0-9_-]+:")

Verdict = Literal["answered", "refused", "busy", "closed", "broken"]


def takes_a_photo(
    platform: str, max_batch_size: int, inputs: Sequence[tuple[str, str, Sequence[int]]], outputs: Collection[str]
) -> bool:
    """Whether a model is an image ensemble of the suite: one encoded file as ``IMAGE``, and a ``STATUS`` for it.

    Args:
        platform: the configuration's.
        max_batch_size: the configuration's; 0 where there is no batch dimension.
        inputs: name, type (such as ``TYPE_STRING``) and dims of each.
        outputs: the names.
    """
    if platform != "ensemble" or max_batch_size < 1 or len(inputs) != 1:
        return False
    name, data_type, dims = inputs[0]
    return (name, data_type, list(dims)) == ("IMAGE", "TYPE_STRING", [1]) and "STATUS" in outputs


def photo_for(folder: Path | None) -> bytes:
    """The photo to send to an ensemble: ``probe.jpg`` in its directory, else the package's own.

    Args:
        folder: the ensemble's directory; None if it is not known.

    Raises:
        OSError: there is a ``probe.jpg`` that cannot be read.
    """
    if folder is not None:
        own = folder / OWN_PHOTO
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = own.stat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST:
                raise OSError(errno.EINVAL, f"must be a file of at most {LARGEST} bytes", str(own))
            return own.read_bytes()
    return PHOTO.read_bytes()


def verdict(status: int, message: str) -> Verdict:
    """What an answer to the photo says about the server.

    ``refused`` is as good as ``answered``: the pipeline works, and does not like this photo. ``closed`` says nothing
    about the pipeline: the caller lacks the token.

    Args:
        status: the HTTP status.
        message: Triton's error, in one line.
    """
    if status == 200:
        return "answered"
    if status == 503 and BUSY.search(message):
        return "busy"
    if status in (401, 403):
        return "closed"
    if status == 400 and REFUSAL.match(message):
        return "refused"
    return "broken"
