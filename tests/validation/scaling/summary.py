"""From all answers to the figures of `summary.json`: matrices, totals, and the goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.validation.scaling.trial import Answers, Picks

Figures = dict[str, Any]
MOST_WRONG, MOST_INCONCLUSIVE = 0.01, 0.10
FULL_OCTAVES = 4.0  # with so many above the floor, a law must be decided

_RIGHT = {"holds": "right laws", "refuted": "wrong laws"}
_LONG, _SHORT = "four octaves above the floor", "fewer octaves above the floor"
_SPANS = "four octaves, floor or not"
_TO_DECIDE = (_LONG, _SPANS)


@dataclass(frozen=True, kw_only=True)
class Total:
    """All verdicts on right laws, on wrong ones, or on both, over ranges of one sort.

    `worst` names the kernel and the law that were undecided (or, first, wrong) most often.
    """

    laws: str
    ranges: str
    asked: int
    wrong: int
    inconclusive: int
    worst: str | None

    @property
    def met(self) -> bool:
        """True where both goals are; how much is inconclusive counts over four octaves alone."""
        decided = self.inconclusive <= MOST_INCONCLUSIVE * self.asked
        return self.wrong <= MOST_WRONG * self.asked and (decided or self.ranges not in _TO_DECIDE)


def totals(answers: Iterable[Answers]) -> list[Total]:
    """By what the floor leaves of the range, and at last all; logarithms' open ends count nowhere.

    A law can be decided only where the work shows beside the floor. The last total looks at the
    sizes alone, so that it also holds what the floor makes inconclusive.
    """
    clear = [answer for answer in answers if answer.right is not None]
    groups: dict[tuple[str, str], list[Answers]] = {}
    for ranges in (_LONG, _SHORT):
        for verdict, laws in _RIGHT.items():
            groups[laws, ranges] = [
                answer
                for answer in clear
                if answer.right == verdict and (answer.octaves >= FULL_OCTAVES) == (ranges == _LONG)
            ]
    groups["all laws", _SPANS] = [answer for answer in clear if answer.span >= FULL_OCTAVES]
    return [_total(*key, found) for key, found in groups.items() if found]


def _total(laws: str, ranges: str, found: Sequence[Answers]) -> Total:
    worst = max(found, key=lambda a: (a.wrong / a.draws, a.counts["inconclusive"] / a.draws))
    said = worst.wrong + worst.counts["inconclusive"]
    return Total(
        laws=laws,
        ranges=ranges,
        asked=sum(answer.draws for answer in found),
        wrong=sum(answer.wrong for answer in found),
        inconclusive=sum(answer.counts["inconclusive"] for answer in found),
        worst=f"{worst.kernel} against {worst.law}, {worst.over}" if said else None,
    )


def summarise(answers: Sequence[Answers], picks: Sequence[Picks]) -> Figures:
    """Everything in `summary.json` but when and by what it was made."""
    found = totals(answers)
    return {
        "goals": {"wrong": MOST_WRONG, "inconclusive": MOST_INCONCLUSIVE, "octaves": FULL_OCTAVES},
        "met": all(total.met for total in found),
        "totals": [
            {
                "laws": total.laws,
                "ranges": total.ranges,
                "asked": total.asked,
                "wrong": total.wrong,
                "inconclusive": total.inconclusive,
                "worst": total.worst,
                "met": total.met,
            }
            for total in found
        ],
        "answers": [
            {
                "range": answer.over,
                "kernel": answer.kernel,
                "octaves": answer.octaves,
                "law": answer.law,
                "own": answer.own,
                "right": answer.right,
                **answer.counts,
            }
            for answer in answers
        ],
        "usual_rule": [
            {"range": pick.over, "kernel": pick.kernel, "counts": pick.counts} for pick in picks
        ],
    }
