"""A verdict from a few fresh processes a side, each of which is one observation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnbench.base.stats import median, median_interval
from attnbench.base.units import brief_percent
from attnbench.gate.decide.ranks import least_p, p_greater, shift_interval
from attnbench.gate.decide.rules import Rules, Verdict
from attnbench.gate.decide.sequential import enough

# How the sides were measured: in turns and as many of each; in turns; one side after the other.
Order = Literal["pairs", "turns", "batches"]


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A verdict with its ratio (candidate / base), 95 % interval, and pairs won of all pairs."""

    verdict: Verdict
    reason: str
    ratio: float
    low: float | None
    high: float | None
    wins: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What an exact test has shown: `logs` of all ratios that count, and what it could show."""

    slower: bool
    faster: bool
    excluded: bool
    able: bool
    wins: int
    logs: Sequence[float]
    interval: tuple[float, float] | None
    beyond: float


def judge(
    base: Sequence[float], candidate: Sequence[float], rules: Rules, level: float, order: Order
) -> Replicated:
    """The verdict on the logarithms of times of several processes a side, in order of time.

    A regression is reported with a probability of `level` at most where there is none beyond the
    margin; of batches, beyond the threshold, since no turns cancel what the machine did between.
    A slowdown of the threshold passes with `rules.beta` at most, given a bias within the margin.
    """
    if order == "pairs":
        shown = _signs(base, candidate, rules, level)
    else:
        beyond = rules.threshold if order == "batches" else rules.margin
        shown = _ranks(base, candidate, rules, level, beyond)
    verdict, reason = _verdict(shown, rules, level)
    low, high = shown.interval or (None, None)
    return Replicated(
        verdict=verdict,
        reason=reason,
        ratio=math.exp(median(shown.logs)),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        wins=shown.wins,
        rounds=len(shown.logs),
    )


def _signs(base: Sequence[float], candidate: Sequence[float], rules: Rules, level: float) -> _Shown:
    """Neighbours in time are pairs; an exact sign test of their ratios."""
    logs = [above - below for above, below in zip(candidate, base, strict=True)]
    margin, threshold = math.log1p(rules.margin), math.log1p(rules.threshold)
    needed, passing = enough(len(logs), level), enough(len(logs), rules.beta)
    wins, losses = sum(x > margin for x in logs), sum(x < -margin for x in logs)
    below = sum(x < threshold for x in logs)
    return _Shown(
        slower=needed is not None and wins >= needed,
        faster=needed is not None and losses >= needed,
        excluded=passing is not None and below >= passing,
        able=needed is not None,
        wins=wins,
        logs=logs,
        interval=median_interval(logs),
        beyond=rules.margin,
    )


def _ranks(
    base: Sequence[float], candidate: Sequence[float], rules: Rules, level: float, beyond: float
) -> _Shown:
    """Each of one side against each of the other; the exact Mann-Whitney test."""
    margin, threshold = math.log1p(beyond), math.log1p(rules.threshold)
    slowed, slowed_most = ([x + by for x in base] for by in (margin, threshold))
    logs = sorted(above - below for above in candidate for below in base)
    return _Shown(
        slower=p_greater(candidate, slowed) <= level,
        faster=p_greater([x - margin for x in base], candidate) <= level,
        excluded=p_greater(slowed_most, candidate) <= rules.beta,
        able=least_p(len(base), len(candidate)) <= level,
        wins=sum(x > margin for x in logs),
        logs=logs,
        interval=shift_interval(candidate, base),
        beyond=beyond,
    )


def _verdict(shown: _Shown, rules: Rules, level: float) -> tuple[Verdict, str]:
    pairs = f"{shown.wins} of {len(shown.logs)} pairs"
    if shown.slower:
        return "regressed", f"slower by more than {brief_percent(shown.beyond)} in {pairs}"
    if shown.faster:
        return "improved", f"faster by more than {brief_percent(shown.beyond)}"
    middle = median(shown.logs)
    if shown.excluded and middle <= math.log1p(rules.margin):
        return "ok", f"slower by {brief_percent(rules.threshold)} is excluded"
    if not shown.able:
        return "inconclusive", (
            f"too few files: no outcome would be rarer than {level:.2g} by chance; it takes"
            f" {_files_needed(level)} a side in turns"
        )
    return "inconclusive", (
        f"neither slower by more than {brief_percent(shown.beyond)} ({pairs}) nor not slower by"
        f" {brief_percent(rules.threshold)} is shown"
    )


def _files_needed(level: float) -> int:
    """How many pairs a sign test needs at least: all of them on one side."""
    return next(n for n in range(1, 1100) if enough(n, level) is not None)
