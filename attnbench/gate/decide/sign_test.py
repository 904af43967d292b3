"""Exact sign tests that may look at the data several times as it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache


@lru_cache(maxsize=256)
def boundaries(looks: tuple[int, ...], level: float) -> tuple[int | None, ...]:
    """How many wins it takes at each look to reject; None where no number would do.

    `looks` are the numbers of rounds after which one looks, ascending. A win falls to each round
    with a probability of 1/2 at most under the null hypothesis, independently of the others: then
    all looks together reject with a probability of at most `level`, whatever the distribution of
    the times. The probability is counted in whole numbers of paths, so nothing is approximated.

    What may be spent up to a look of n rounds is level · sqrt(n / last look): early looks get
    enough to decide clear cases. Source: group sequential designs with the power family of error
    spending, Kim & DeMets, "Design and analysis of group sequential tests based on the type I
    error spending rate function", Biometrika 74 (1987).
    """
    paths, spent, done = [1], Fraction(0), 0  # paths[w]: ways to w wins that crossed nothing yet
    needed: list[int | None] = []
    for look in looks:
        for _ in range(look - done):
            paths = [lost + won for lost, won in zip([*paths, 0], [0, *paths], strict=True)]
        done = look
        allowed = Fraction(level * math.sqrt(look / looks[-1])) - spent
        wins, ways = look + 1, 0
        while wins > 0 and Fraction(ways + paths[wins - 1], 2**look) <= allowed:
            wins -= 1
            ways += paths[wins]
        needed.append(wins if wins <= look else None)
        spent += Fraction(ways, 2**look)
        paths = paths[:wins] + [0] * (look + 1 - wins)
    return tuple(needed)


def rejects(wins: int, rounds: int, looks: Sequence[int], level: float) -> bool:
    """Whether `wins` of `rounds` reject; False between looks."""
    if rounds not in looks:
        return False
    needed = boundaries(tuple(looks), level)[list(looks).index(rounds)]
    return needed is not None and wins >= needed


def enough(rounds: int, level: float) -> int | None:
    """How many wins of `rounds` reject at `level` with a single look; None if none does."""
    return boundaries((rounds,), level)[0] if rounds else None
