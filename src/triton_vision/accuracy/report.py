"""What is printed and written: a table, a JSON object, and a CSV of the disagreements."""

from __future__ import annotations

import csv
import os
from typing import Any, TextIO

from triton_vision.accuracy.chain import Chain
from triton_vision.accuracy.compare import Answer, Pair, Score, Tally
from triton_vision.accuracy.truth import Item

SIDES = ("server", "module")
COLUMNS = (
    *("path", "class_id", "label"),
    *(f"{side}_{what}" for side in SIDES for what in ("class_id", "label", "score")),
    "refused",
)


class DisagreementFile:
    """A CSV with a line for each image on which the sides disagree, written as they are found."""

    def __init__(self, file: TextIO, chain: Chain) -> None:
        self._file, self._labels = file, chain.labels
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def write(self, pair: Pair) -> None:
        """Appends a line."""
        refused = [f"{side}: {answer.refused}" for side, answer in _sides(pair) if answer.refused]
        row = [pair.item.path, pair.item.class_id, self._labels[pair.item.class_id]]
        row += [*self._best(pair.server), *self._best(pair.module), "; ".join(refused)]
        self._writer.writerow(row)
        self._file.flush()

    def _best(self, answer: Answer) -> list[Any]:
        return (
            ["", "", ""] if answer.refused else [answer.ids[0], self._labels[answer.ids[0]], f"{answer.scores[0]:.6f}"]
        )


def table(tally: Tally, chain: Chain, source: str | None) -> str:
    """The result for a person.

    Args:
        source: where the module's weights come from; None where the server was measured alone.
    """
    sides = [("server", tally.server)] + ([("module", tally.module)] if source is not None else [])
    rows = [
        ("", [name for name, _ in sides]),
        ("images", [str(tally.images)] * len(sides)),
        ("refused", [str(score.refused) for _, score in sides]),
        ("top-1", [_percent(score, score.top1) for _, score in sides]),
        ("top-5", [_percent(score, score.top5) for _, score in sides]),
    ]
    lines = [f"{name:<8}" + "".join(f"{cell:>11}" for cell in cells) for name, cells in rows]
    if source is not None:
        both = tally.module.judged
        share = f" ({100 * tally.same_best / both:.2f} %)" if both else ""
        lines += [
            f"module: {chain.core} in PyTorch, from {source}",
            f"same best label: {tally.same_best} of {both}{share}; largest difference of a score: "
            f"{tally.largest_difference:.2g}",
            f"not compared, since both sides take it from the repository: {chain.training()}; whether the network was "
            "trained so, only the top-1 on labels that you trust can tell",
        ]
    for pair in tally.refusals:
        lines.append(f"refused: {printable(pair.item.path)}: {printable(_why(pair, alone=source is None))}")
    if tally.refused > len(tally.refusals):
        lines.append(f"refused: {tally.refused - len(tally.refusals)} more")
    for pair in tally.differing:
        said = ", ".join(
            f"{side} {chain.labels[answer.ids[0]]} {answer.scores[0]:.3f}" for side, answer in _sides(pair)
        )
        lines.append(f"differs: {printable(pair.item.path)} ({chain.labels[pair.item.class_id]}): {said}")
    if tally.differing_count > len(tally.differing):
        lines.append(
            f"differs: {tally.differing_count - len(tally.differing)} more (--disagreements FILE has them all)"
        )
    return "\n".join(lines)


def as_json(tally: Tally, chain: Chain, source: str | None) -> dict[str, Any]:
    """The result for a program; shares are fractions of 1, and None where nothing was judged."""
    result: dict[str, Any] = {
        "model": chain.name,
        "core": chain.core,
        "images": tally.images,
        "refused": tally.refused,
        "server": _score(tally.server),
        "refusals": [
            {"path": _text(pair.item.path), **{side: answer.refused for side, answer in _sides(pair) if answer.refused}}
            for pair in tally.refusals
        ],
    }
    if source is not None:
        result["module"] = {**_score(tally.module), "weights": source}
        result["not_compared"] = chain.training()
        result["same_best"] = tally.same_best
        result["largest_score_difference"] = tally.largest_difference
        result["disagreements"] = tally.differing_count
        result["first_disagreements"] = [
            {**_truth(pair.item, chain), **{side: _best(answer, chain) for side, answer in _sides(pair)}}
            for pair in tally.differing
        ]
    return result


def so_far(tally: Tally, *, alone: bool) -> str:
    """The accuracy until now, the server's before the module's, for the progress bar; empty without any."""
    shares = [score.share(score.top1) for score in ([tally.server] if alone else [tally.server, tally.module])]
    known = [f"{100 * share:.1f}" for share in shares if share is not None]
    return f"top-1 {', '.join(known)} %" if known else ""


def _sides(pair: Pair) -> tuple[tuple[str, Answer], tuple[str, Answer]]:
    return ("server", pair.server), ("module", pair.module)


def _why(pair: Pair, *, alone: bool) -> str:
    """A refusal's reason, and whose it is if the other side did answer."""
    said = [(side, answer.refused) for side, answer in _sides(pair) if answer.refused]
    side, reason = said[0]
    return reason if alone or len(said) == 2 else f"by the {side} alone: {reason}"


def _truth(item: Item, chain: Chain) -> dict[str, Any]:
    return {"path": _text(item.path), "class_id": item.class_id, "label": chain.labels[item.class_id]}


def _best(answer: Answer, chain: Chain) -> dict[str, Any]:
    return {"class_id": answer.ids[0], "label": chain.labels[answer.ids[0]], "score": answer.scores[0]}


def _score(score: Score) -> dict[str, Any]:
    shares = {"top1": score.share(score.top1), "top5": score.share(score.top5)}
    return {"refused": score.refused, "judged": score.judged, **shares}


def _percent(score: Score, right: int) -> str:
    share = score.share(right)
    return "-" if share is None else f"{100 * share:.2f} %"


def _text(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "replace")


def printable(name: str) -> str:
    """Text that neither breaks a row nor commands a terminal, whatever a file's name or a message is made of."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in _text(name))
