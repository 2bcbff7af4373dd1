"""A refusal is the same error whether it comes as an image's STATUS or as the failure of its request."""

from __future__ import annotations

import pytest
from triton_vision_client import BadImageError, ServerError

from tests.unit.client.scripted import CODE, typed


@pytest.mark.parametrize("place", ["", "in ensemble 'faces', ", "in ensemble 'all', in ensemble 'faces', "])
@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("corrupt: the JPEG cannot be decoded", "corrupt", "the JPEG cannot be decoded"),
        ("No-Face2: nobody is to be seen: look: here", "No-Face2", "nobody is to be seen: look: here"),
        ("too blurry: a stage of older days", "too blurry", "a stage of older days"),
        ("empty", "empty", ""),
    ],
)
def test_a_failed_request_names_the_image_as_its_status_would(place: str, text: str, reason: str, detail: str) -> None:
    assert BadImageError.read(text, 3) == BadImageError(reason, detail, 3)
    assert typed(CODE.INVALID_ARGUMENT, f"{place}image 3: {text}") == BadImageError.read(text, 3)


@pytest.mark.parametrize("details", ["image of 3 channels: wrong", "parameters: image 3: no such thing"])
def test_what_only_speaks_of_images_is_no_refusal_of_one(details: str) -> None:
    assert isinstance(typed(CODE.INVALID_ARGUMENT, details), ServerError)
