"""Counting, following two sides, progress and reports."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from triton_vision.accuracy.chain import Chain, Origin, chains_over, read_chain
from triton_vision.accuracy.compare import Answer, Pair, Tally, difference
from triton_vision.accuracy.follow import follow
from triton_vision.accuracy.module import ModuleError, weights_argument
from triton_vision.accuracy.progress import Progress
from triton_vision.accuracy.report import DisagreementFile, as_json, so_far, table
from triton_vision.accuracy.truth import Item
from triton_vision.repository import RepositoryError

RECIPE = {"resize": "256", "crop": "224", "filter": "bicubic"}
ORIGIN = Origin("file", "mine.pth", "12", mean=(127.5,) * 3, std=(58.395, 57.12, 57.375))
CHAIN = Chain("ensemble", "first", "core", RECIPE, ["tabby", "tiger cat", "espresso", "cup"], ORIGIN)
TRAINING = "shorter side 256, centre crop 224, bicubic, mean 0.5,0.5,0.5, std 0.229,0.224,0.225"
REFUSED = Answer(refused="truncated: it ends")


def answer(*ids: int, scores: tuple[float, ...] = (0.5, 0.25, 0.125)) -> Answer:
    return Answer(ids, scores[: len(ids)])


def pair(truth: int, server: Answer, module: Answer, path: str = "a.jpg") -> Pair:
    return Pair(Item(path, truth), server, module)


def test_both_sides_are_judged_on_what_both_answered() -> None:
    tally = Tally()
    tally.add(pair(0, answer(0, 1, 2), answer(0, 1, 2)))
    tally.add(pair(1, answer(0, 1, 2), answer(1, 0, 2)))
    tally.add(pair(3, answer(0, 1, 2), answer(0, 1, 2)))
    tally.add(pair(0, REFUSED, answer(0, 1, 2)))
    tally.add(pair(0, answer(0, 1, 2), REFUSED))
    tally.add(pair(0, REFUSED, REFUSED))
    assert (tally.images, tally.refused, tally.server.refused, tally.module.refused) == (6, 3, 2, 2)
    assert (tally.server.judged, tally.server.top1, tally.server.top5) == (3, 1, 2)
    assert (tally.module.judged, tally.module.top1, tally.module.top5) == (3, 2, 2)
    assert (tally.same_best, tally.differing_count) == (2, 1)
    assert tally.largest_difference == 0.25


def test_the_difference_of_scores() -> None:
    assert difference(answer(0, 1), answer(0, 1)) == 0
    assert difference(answer(0, 1), answer(1, 0)) == 0.25
    # The other side names no class 1: there it has 0.125 at most.
    assert difference(answer(0, 1), Answer((0, 2), (0.5, 0.125))) == pytest.approx(0.125)


def test_the_table_and_the_json_object() -> None:
    tally = Tally(keep=1)
    tally.add(pair(0, answer(0, 1, 2), answer(0, 1, 2)))
    tally.add(pair(1, answer(0, 1, 2), answer(1, 0, 2), "b\n\x1b.jpg"))
    tally.add(pair(1, answer(2, 1, 0), answer(1, 0, 2)))
    tally.add(pair(0, REFUSED, answer(0, 1, 2), "cut.jpg"))
    text = table(tally, CHAIN, "random numbers").splitlines()
    assert [line.split() for line in text[:5]] == [
        ["server", "module"],
        ["images", "4", "4"],
        ["refused", "1", "0"],
        ["top-1", "33.33", "%", "100.00", "%"],
        ["top-5", "100.00", "%", "100.00", "%"],
    ]
    assert text[5:] == [
        "module: core in PyTorch, from random numbers",
        "same best label: 1 of 3 (33.33 %); largest difference of a score: 0.38",
        f"not compared, since both sides take it from the repository: {TRAINING}; whether the network was trained so, "
        "only the top-1 on labels that you trust can tell",
        "refused: cut.jpg: by the server alone: truncated: it ends",
        "differs: b\\n\\x1b.jpg (tiger cat): server tabby 0.500, module tiger cat 0.500",
        "differs: 1 more (--disagreements FILE has them all)",
    ]
    row = json.loads(json.dumps(as_json(tally, CHAIN, "random numbers")))
    assert row["not_compared"] == TRAINING
    assert row["server"] == {"refused": 1, "judged": 3, "top1": pytest.approx(1 / 3), "top5": 1.0}
    assert row["refusals"] == [{"path": "cut.jpg", "server": "truncated: it ends"}]
    assert (row["disagreements"], len(row["first_disagreements"])) == (2, 1)
    assert row["first_disagreements"][0]["module"] == {"class_id": 1, "label": "tiger cat", "score": 0.5}


def test_the_server_alone() -> None:
    tally = Tally()
    tally.add_alone(Item("a.jpg", 0), answer(0, 1))
    tally.add_alone(Item("b.jpg", 0), REFUSED)
    text = table(tally, CHAIN, None)
    assert "module" not in text
    assert "refused: b.jpg: truncated: it ends" in text
    assert "module" not in as_json(tally, CHAIN, None)


def test_nothing_answered_has_no_accuracy() -> None:
    tally = Tally()
    tally.add(pair(0, REFUSED, REFUSED))
    assert [line.split() for line in table(tally, CHAIN, "x").splitlines()][3] == ["top-1", "-", "-"]
    assert as_json(tally, CHAIN, "x")["server"]["top1"] is None


def test_the_file_of_disagreements() -> None:
    file = io.StringIO()
    writer = DisagreementFile(file, CHAIN)
    writer.write(pair(1, answer(0), answer(2), 'a "b", c.jpg'))
    writer.write(pair(1, REFUSED, answer(2)))
    assert file.getvalue().splitlines() == [
        "path,class_id,label,server_class_id,server_label,server_score,module_class_id,module_label,module_score,refused",
        '"a ""b"", c.jpg",1,tiger cat,0,tabby,0.500000,2,espresso,0.500000,',
        "a.jpg,1,tiger cat,,,,2,espresso,0.500000,server: truncated: it ends",
    ]


def test_a_side_that_is_ahead_does_not_wait() -> None:
    ahead = threading.Event()

    def fast() -> Iterator[Answer]:
        for number in range(100):
            yield answer(number)
        ahead.set()

    def slow() -> Iterator[Answer]:
        assert ahead.wait(10)
        for number in range(100):
            yield answer(number)

    ticks: list[dict[str, int]] = []
    given = list(follow({"server": fast(), "module": slow()}, 100, lambda counts: ticks.append(dict(counts))))
    assert given == [(answer(number), answer(number)) for number in range(100)]
    assert {"server": 100, "module": 0} in ticks


def test_a_side_that_fails_or_stops_is_noticed() -> None:
    def failing() -> Iterator[Answer]:
        yield answer(0)
        raise ModuleError("it has ended")

    with pytest.raises(ModuleError, match="it has ended"):
        list(follow({"server": iter([answer(0)] * 3), "module": failing()}, 3, lambda _: None))
    with pytest.raises(EOFError, match="the module has answered 1 of 3 images"):
        list(follow({"server": iter([answer(0)] * 3), "module": iter([answer(0)])}, 3, lambda _: None))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_progress(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tally = Tally()
    tally.add(pair(0, answer(0, 1), answer(0, 1)))
    tally.add(pair(0, answer(0, 1), answer(1, 0)))
    now = 0.0
    progress = Progress(50000, stream, clock=lambda: now)
    for now in (0.1, 1000.0, 1000.1, 2000.0):
        counts = {"server": min(50000, int(now * 50)), "module": int(now * 6)}
        progress(counts, so_far(tally, alone=False))
    progress.end()
    text = stream.getvalue()
    first = "server 50000 50/s, module 6000 6.0/s of 50000; top-1 100.0, 50.0 %"
    last = first.replace("6000 ", "12000 ")
    if stream.isatty():
        assert f"\r  [#.......] {last}"[:80] + "\x1b[K" in text
        assert text.endswith("\r\x1b[K")
    else:
        assert text.splitlines() == [f"  {first}", f"  {last}"]


def test_the_accuracy_so_far() -> None:
    tally = Tally()
    assert so_far(tally, alone=True) == ""
    tally.add_alone(Item("a.jpg", 0), answer(0, 1))
    assert so_far(tally, alone=True) == "top-1 100.0 %"


@pytest.mark.parametrize(
    ("name", "core", "kernel"),
    [("ensemble", "resnet50_trt", "bilinear"), ("ensemble_lite", "efficientnet_lite0", "bicubic")],
)
def test_the_shipped_ensembles_can_be_read(name: str, core: str, kernel: str) -> None:
    chain = read_chain(ROOT / "model_repository", name)
    assert (chain.core, chain.recipe["filter"], chain.recipe["resize"], chain.recipe["crop"]) == (
        core,
        kernel,
        "256",
        "224",
    )
    assert len(chain.labels) == 1000
    assert chain.recipe["decode"] == "exact"


def test_what_is_no_image_ensemble(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="there is no nonesuch"):
        read_chain(ROOT / "model_repository", "nonesuch")
    with pytest.raises(RepositoryError, match="is not an ensemble from IMAGE to labels"):
        read_chain(ROOT / "model_repository", "preprocess")
    (tmp_path / "ensemble").mkdir()
    with pytest.raises(RepositoryError, match=r"there is no config\.pbtxt"):
        read_chain(tmp_path, "ensemble")


def test_where_the_module_has_its_weights_from(tmp_path: Path) -> None:
    def chain(kind: str | None) -> Any:
        return Chain("e", "first", "core", {}, [], Origin(kind, "mine.pth", "") if kind else None)

    assert weights_argument(chain("random"), None) == "random"
    assert weights_argument(chain("package"), None) is None
    assert weights_argument(chain("imagenet1k_v1"), None) is None
    assert weights_argument(chain("file"), str(tmp_path / "mine.pth")) == str(tmp_path / "mine.pth")
    assert weights_argument(chain(None), "random") == "random"
    with pytest.raises(ModuleError, match=r"made from the file mine\.pth: name it with --weights"):
        weights_argument(chain("file"), None)
    with pytest.raises(ModuleError, match="nothing beside the artifacts of core says"):
        weights_argument(chain(None), None)


def test_the_chains_around_a_core() -> None:
    (chain,) = chains_over(ROOT / "model_repository", "resnet50_trt")
    assert (chain.name, chain.first) == ("ensemble", "preprocess")
    assert chain.training().startswith("shorter side 256, centre crop 224, bilinear")
    assert chains_over(ROOT / "model_repository", "none") == []
