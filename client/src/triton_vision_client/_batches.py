"""Filling the requests of ``classify_many``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from triton_vision_client._errors import BadImageError, ServerOverloadedError, VisionClientError
from triton_vision_client._images import ImageSource, encode_or_refuse
from triton_vision_client._results import Result

# A request holds at most this many images and, unless one alone is larger, bytes.
BATCH = 16
BATCH_BYTES = 8 << 20
# How many requests are under way at once: for each server, enough to keep every stage busy; and in all.
WINDOW = 6
LARGEST_WINDOW = 24


@dataclass
class Batch:
    """Images that travel in one request, and those among them that cannot travel."""

    sources: list[Any] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    refused: dict[int, BadImageError] = field(default_factory=dict)
    size: int = 0

    def singles(self) -> Iterator[Batch]:
        """The images that travel, each in a batch of its own."""
        for source, image in zip(self.travelling(), self.images):
            yield Batch([source], [image], size=len(image))

    def travelling(self) -> list[Any]:
        """The sources whose images are in the request."""
        return [source for row, source in enumerate(self.sources) if row not in self.refused]

    def merge(self, answers: list[Result]) -> Iterator[Result]:
        """The results in the order of the sources: the server's, and the refusals made here."""
        served = iter(answers)
        for row, source in enumerate(self.sources):
            yield Result(source, error=self.refused[row]) if row in self.refused else next(served)


def splits(error: VisionClientError, batch: Batch) -> bool:
    """Whether a batch's images may do one by one: the server's shared memory had no room for all of them."""
    return isinstance(error, ServerOverloadedError) and error.no_room and len(batch.images) > 1


def window(servers: int) -> int:
    """How many requests may be under way at so many servers."""
    return min(LARGEST_WINDOW, WINDOW * servers)


def check_many(images: Any) -> None:
    """Raises TypeError for a single image where many are wanted."""
    if isinstance(images, (str, bytes, bytearray, os.PathLike)):
        raise TypeError("classify_many takes many images, such as a list of paths; for one there is classify")


def pack(images: Iterable[ImageSource]) -> Iterator[Union[Batch, BaseException]]:
    """Batches of consecutive images, read one by one, so that an endless iterable is fine.

    What the iterable itself raises comes last, behind the images that it gave before.
    """
    batch, source_of = Batch(), iter(images)
    failure: Optional[BaseException] = None
    while True:
        try:
            source = next(source_of)
        except StopIteration:
            break
        except Exception as error:  # noqa: BLE001 - the caller's own code
            failure = error
            break
        image = encode_or_refuse(source)
        size = 0 if isinstance(image, BadImageError) else len(image)
        if batch.sources and (len(batch.sources) == BATCH or batch.size + size > BATCH_BYTES):
            yield batch
            batch = Batch()
        if isinstance(image, BadImageError):
            batch.refused[len(batch.sources)] = image
        else:
            batch.images.append(image)
            batch.size += size
        batch.sources.append(source)
    if batch.sources:
        yield batch
    if failure is not None:
        yield failure
