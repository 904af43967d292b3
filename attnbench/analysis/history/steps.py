"""Where a line of times changed for good: candidates by PELT, each held against chance.

Times have outliers of any size, so all that follows looks at logarithms clipped to the
neighbourhood of their running median. PELT proposes steps generously. Then the least significant
one is taken out and its neighbours are looked at again, until all that are left pass: Student's
test of up to `WINDOW` runs on either side, with the variance of these or of the whole line,
whichever is larger, and counting fewer runs where those that follow one another resemble each
other. A history asks this at every run of every line: the level is divided by their number
(Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST = 12  # runs of a line without which nothing is said
CONFIRM = 5  # runs on either side that make a step more than suspicious
LEVEL = 0.05  # how often a history without any change may have a step, if its runs are independent
WINDOW = 30  # runs on either side that a test looks at
SMOOTH, CLIP = 9, 2.5  # width of the running median; how many standard deviations may lie off it
PENALTY = 2.0  # of a step, in units of variance · ln(runs): Schwarz's criterion


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change at run `at`, the first one after it; `log` is ln(after / before).

    `p` is the test's; `before` and `after` count the runs up to the next step or end.
    """

    at: int
    log: float
    p: float
    before: int
    after: int


def steps(logs: Sequence[float], least: float, tests: int) -> list[Step]:
    """The significant steps in the logarithms of times, in the order of the runs.

    `least` is the smallest change, as a share, `tests` how many tests the whole history makes. A
    step whose runs after it are still few (below 2 × `CONFIRM`) need only be significant in its own
    line: later runs decide.
    """
    if len(logs) < FEWEST:
        return []
    y = _clipped(np.asarray(logs))
    places = _candidates(y)
    of = _Test(y, places)
    while places:
        ends = [0, *places, len(y)]
        found = [of.step(*three) for three in zip(ends, ends[1:], ends[2:], strict=False)]
        allowed = [LEVEL / tests] * len(found)
        if found[-1].after < 2 * CONFIRM:
            allowed[-1] = LEVEL / (len(y) - 1)
        out = int(np.argmax([step.p / most for step, most in zip(found, allowed, strict=True)]))
        if found[out].p <= allowed[out]:
            out = int(np.argmin([abs(step.log) for step in found]))
            if abs(found[out].log) >= math.log1p(least):
                return found
        del places[out]
    return []


class _Test:
    """Student's test between the two sides of a place in a line."""

    def __init__(self, y: Any, places: list[int]) -> None:
        own = np.concatenate([part - part.mean() for part in np.split(y, places)])
        squares = float(own @ own)
        self._y, self._variance = y, squares / max(1, len(y) - len(places) - 1)
        # Runs count for less where neighbours correlate, as in an autoregressive process.
        lag = float(own[1:] @ own[:-1]) / squares if squares else 0.0
        self._worth = max(1.0, (1 + lag) / (1 - lag))

    def step(self, start: int, at: int, end: int) -> Step:
        from scipy.stats import t

        y = self._y
        left, right = y[max(start, at - WINDOW) : at], y[at : min(end, at + WINDOW)]
        freedom = max(1, len(left) + len(right) - 2)
        squares = sum(float(np.var(side)) * len(side) for side in (left, right))
        variance = max(squares / freedom, self._variance)
        error = math.sqrt(variance * self._worth * (1 / len(left) + 1 / len(right)))
        off = abs(float(right.mean() - left.mean()))
        p = 2 * float(t.sf(off / error, max(1.0, freedom / self._worth))) if error else 0.0
        size = float(y[at:end].mean() - y[start:at].mean())
        return Step(at=at, log=size, p=p, before=at - start, after=end - at)


def _clipped(y: Any) -> Any:
    """The values, no further from their running median than `CLIP` robust standard deviations."""
    from scipy.ndimage import median_filter

    scale = 1.4826 * float(np.median(np.abs(np.diff(y)))) / math.sqrt(2) or float(np.std(y))
    middle = median_filter(y, SMOOTH, mode="nearest")
    return np.clip(y, middle - CLIP * scale, middle + CLIP * scale)


def _candidates(y: Any) -> list[int]:
    """Where the mean changes, by PELT (Killick, Fearnhead & Eckley, JASA 107 (2012))."""
    import ruptures

    variance = float(np.mean(np.diff(y) ** 2)) / 2
    if not variance:
        return []
    pelt = ruptures.KernelCPD(kernel="linear", min_size=2).fit(y.reshape(-1, 1))
    return list(map(int, pelt.predict(pen=PENALTY * variance * math.log(len(y)))[:-1]))
