"""What Triton says of a model that does not load, in one sentence that begins with the cause."""

from __future__ import annotations

import pytest

from triton_vision.server.index import plain_reason
from triton_vision.server.logs import LOADING


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Internal: ConfigError: preprocess: parameters resize: 'x' must be a whole number\n\nAt:\n"
            "  /opt/venv/lib/triton_vision/stages/adapter.py(79): initialize\n",
            "parameters resize: 'x' must be a whole number",
        ),
        (
            "Internal: ValueError: my own words\n\nAt:\n  /lib/numpy/core.py(9): f\n"
            "  /dev/shm/triton-vision-0/triton_vision_1_/models/mine/1/model.py(3): initialize\n",
            "ValueError: my own words (mine/1/model.py, line 3)",
        ),
        ("Invalid argument: unexpected platform ;", "unexpected platform"),
    ],
)
def test_the_cause_comes_first_with_the_place_in_the_user_s_own_file(said: str, told: str) -> None:
    assert plain_reason(said) == told


def test_what_serve_says_itself_is_not_passed_on() -> None:
    stamp = "E1201 02:56:15.881563 21897 model_lifecycle.cc:642] "
    assert LOADING.search(stamp + "\"failed to load 'postprocess' version 1: Internal: …\"")
    assert LOADING.search(stamp + "\"Invalid argument: ensemble 'e' depends on 'postprocess' which has no …\"")
    assert not LOADING.search(stamp + '"preprocess: refused image 0: corrupt: …"')
