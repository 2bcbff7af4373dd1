"""The first photo of a start: which answers let the server count as ready."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from triton_vision.probe import PHOTO
from triton_vision.server import ModelLoadError, warmup

FULL = (503, "Exceeds maximum queue size")


def insist(answers: Iterable[tuple[int, str]], folder: Path | None = None) -> list[bytes]:
    """Plays the answers; returns the photos that were sent."""
    sent = []
    left = iter(answers)

    def ask(photo: bytes, seconds: float) -> tuple[int, str]:
        assert seconds > 0
        sent.append(photo)
        return next(left)

    warmup.insist("ensemble", ask, 60.0, folder)
    return sent


@pytest.mark.parametrize("answer", [(200, ""), (400, "image 0: no_face: nobody is to be seen")])
def test_an_answer_or_a_refusal_is_enough(answer: tuple[int, str]) -> None:
    assert insist([answer]) == [PHOTO.read_bytes()]


@pytest.mark.parametrize(
    "answer",
    [
        (500, "Stub process 'x' is not healthy."),
        (503, "Server is stopping"),
        (403, "This API is restricted"),
        (400, "core says no"),
        (400, "Request for unknown model: 'core' is not found"),
        (500, "Request timeout expired"),
    ],
)
def test_a_failure_is_none(answer: tuple[int, str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        insist([answer])
    assert caught.value.reasons == {"ensemble": answer[1]}


def test_a_photo_that_is_turned_away_is_sent_again_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(insist([FULL, FULL, (200, "")])) == 3
    with pytest.raises(ModelLoadError):
        insist([FULL, (500, "this core fails on every photo")])
    monkeypatch.setattr(warmup, "INSIST_S", 0.1)
    assert len(insist(FULL for _ in range(100))) > 1


def test_an_ensemble_may_have_a_photo_of_its_own(tmp_path: Path) -> None:
    assert insist([(200, "")], tmp_path) == [PHOTO.read_bytes()]
    (tmp_path / "probe.jpg").write_bytes(b"a face")
    assert insist([(200, "")], tmp_path) == [b"a face"]
