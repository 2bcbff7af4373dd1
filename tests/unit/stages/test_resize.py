"""The crop's pixels equal resize-then-crop, and cost no more than the crop."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest
from PIL import Image

from tests.conftest import noise
from triton_vision.stages.resize import FILTERS, Frame, resize_crop, resized_size


def test_the_long_side_is_truncated() -> None:
    assert resized_size(500, 375, 256) == (341, 256)
    assert resized_size(375, 500, 256) == (256, 341)
    assert resized_size(256, 256, 256) == (256, 256)


@pytest.mark.parametrize("name", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "size",
    [
        (500, 375),
        (375, 500),
        (256, 256),
        (256, 300),
        (255, 257),
        (257, 1000),
        (17, 23),
        (1, 1),
        (1, 9),
        (2000, 3),
        (224, 224),
    ],
)
def test_equals_resize_then_crop(size: tuple[int, int], name: str) -> None:
    image = noise(1, size)
    whole = image.resize(resized_size(*size, 256), FILTERS[name])
    left, top = round((whole.width - 224) / 2.0), round((whole.height - 224) / 2.0)
    expected = np.asarray(whole.crop((left, top, left + 224, top + 224))).astype(int)
    for pixels in (image, np.asarray(image.convert("RGBA"))):
        found = resize_crop(Frame(pixels, image.size), 256, 224, FILTERS[name])
        assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("size", [(1, 65000), (65000, 1)])
def test_a_sliver_costs_its_crop_alone(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (10, 20, 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    result = resize_crop(Frame(image, image.size), 256, 224, FILTERS["bilinear"])
    assert time.process_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert result.shape == (224, 224, 3)
    assert result[5, 5].tolist() == [10, 20, 30]
