"""Counting: how often each side is right, and how far the two are apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from triton_vision.accuracy.truth import Item

TOP = 5


@dataclass(frozen=True)
class Answer:
    """One side's answer to one image.

    Attributes:
        ids: the best classes, best first, at most TOP of them.
        scores: theirs, shares of a softmax over all classes.
        refused: why there is no answer; empty if there is one.
    """

    ids: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class Pair:
    """An image, and both sides' answers to it."""

    item: Item
    server: Answer
    module: Answer

    @property
    def differs(self) -> bool:
        """Whether the sides disagree in the best label, or in whether the image can be answered at all."""
        return self.server.ids[:1] != self.module.ids[:1]


@dataclass
class Score:
    """One side's count.

    Attributes:
        refused: images that it did not answer.
        judged: images that count for its accuracy.
        top1, top5: of them, those where the right class is the best, or among the best five.
    """

    refused: int = 0
    judged: int = 0
    top1: int = 0
    top5: int = 0

    def judge(self, answer: Answer, class_id: int) -> None:
        """Counts an answer."""
        self.judged += 1
        self.top1 += class_id in answer.ids[:1]
        self.top5 += class_id in answer.ids

    def share(self, right: int) -> float | None:
        """``right`` as a share of the judged images; None without any."""
        return right / self.judged if self.judged else None


@dataclass
class Tally:
    """The whole comparison.

    Both sides are judged on the same images: those that both answered, or without a module all that the server did.

    Attributes:
        images: how many there were.
        refused: those that one side or both refused.
        same_best: of those that both answered, how many have the same best class on both sides.
        largest_difference: between both sides' scores of a class, over all images and the classes in either's best.
        differing: the first ``keep`` of those that both answered, differently.
        differing_count: all of these.
        refusals: the first ``keep`` of the refused.
    """

    keep: int = 10
    images: int = 0
    refused: int = 0
    server: Score = field(default_factory=Score)
    module: Score = field(default_factory=Score)
    same_best: int = 0
    largest_difference: float = 0.0
    differing: list[Pair] = field(default_factory=list)
    differing_count: int = 0
    refusals: list[Pair] = field(default_factory=list)

    def add_alone(self, item: Item, server: Answer) -> None:
        """Counts an image that the server alone was asked about."""
        self.images += 1
        if server.refused:
            self.server.refused += 1
            self._refuse(Pair(item, server, Answer()))
        else:
            self.server.judge(server, item.class_id)

    def add(self, pair: Pair) -> None:
        """Counts an image that both sides were asked about."""
        self.images += 1
        server, module = pair.server, pair.module
        self.server.refused += bool(server.refused)
        self.module.refused += bool(module.refused)
        if server.refused or module.refused:
            self._refuse(pair)
            return
        self.server.judge(server, pair.item.class_id)
        self.module.judge(module, pair.item.class_id)
        self.largest_difference = max(self.largest_difference, difference(server, module))
        if not pair.differs:
            self.same_best += 1
            return
        self.differing_count += 1
        if len(self.differing) < self.keep:
            self.differing.append(pair)

    def _refuse(self, pair: Pair) -> None:
        self.refused += 1
        if len(self.refusals) < self.keep:
            self.refusals.append(pair)


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a class's scores, over the classes that either answer names.

    Of a class that one of them does not name, it is known that its score is at most the lowest that is named: so much
    less it is at least.
    """
    left, right = dict(zip(one.ids, one.scores, strict=True)), dict(zip(other.ids, other.scores, strict=True))
    lowest_left, lowest_right = min(one.scores), min(other.scores)
    return max(abs(left.get(name, lowest_left) - right.get(name, lowest_right)) for name in left.keys() | right.keys())
