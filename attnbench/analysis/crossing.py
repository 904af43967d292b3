"""Where a ratio that is known at some sizes passes 1 between them, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnbench.analysis.scaling.results import Estimate
from attnbench.base import units

NEAR = 4.0  # sizes further apart than this factor say little of what lies between them

_STEPS = 4  # parts of a gap in which its band is followed
_Point = tuple[float, float]
_Band = tuple[float, float, float]  # log n, and the ends of the ratio's logarithm there


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One change of the lead: `faster_below` is ahead below `n`, `faster_above` above it.

    `low` and `high` are the ends of the n at which the ratio's interval holds 1, None where the
    times have no interval. An end is open where that is so at the smallest or largest size
    already: then the end is that size, and the crossing may lie beyond it.
    """

    n: float
    low: float | None = None
    high: float | None = None
    open_below: bool = False
    open_above: bool = False
    faster_below: str
    faster_above: str

    @property
    def interval(self) -> str:
        """As `512 … 1,024`, `below 128 … 300`, or `–`."""
        if self.low is None or self.high is None:
            return units.UNKNOWN
        ends = ("below " * self.open_below, "above " * self.open_above)
        return f"{ends[0]}{size_text(self.low)} … {ends[1]}{size_text(self.high)}"

    @property
    def text(self) -> str:
        """One clause: who overtakes whom, and where."""
        between = "no interval" if self.low is None else f"95 % interval {self.interval}"
        where = f"at n ≈ {size_text(self.n)} ({between})"
        return f"{self.faster_above} overtakes {self.faster_below} {where}"


def crossings(
    sizes: Sequence[float], ratios: Sequence[Estimate], names: tuple[str, str]
) -> Iterator[Crossing]:
    """Every change of the lead that the intervals show; where there are none, that the values do.

    The interpolated band of the ratio holds 1 over some stretches of n. Over each of them the
    lead is not known: it has changed if it is another one after the stretch than before it. Where
    the ratio itself passes 1 several times in a stretch, the middle one is the crossing. A stretch
    that reaches the smallest or largest size is open there, and the ratio at that size says who
    leads; if it is the whole range, nothing is shown.
    """
    xs = [math.log(n) for n in sizes]
    middle = [math.log(ratio.value) for ratio in ratios]
    roots = _roots(xs, middle)
    if not roots:
        return
    banded = all(ratio.low is not None for ratio in ratios)
    if banded and not any(lead(ratio) for ratio in ratios):
        return
    for low, high in _stretches(xs, ratios) if banded else [(x, x) for x, _ in roots]:
        inside = [(x, sign) for x, sign in roots if low <= x <= high]
        if len(inside) % 2 == 0 or (banded and (low, high) == (xs[0], xs[-1])):
            continue
        x = inside[len(inside) // 2][0]
        below, above = names if inside[0][1] > 0 else names[::-1]
        ends = _widened(xs, low, high) if banded else None
        yield Crossing(
            n=math.exp(x), low=math.exp(ends[0]) if ends else None,
            high=math.exp(ends[1]) if ends else None,
            open_below=banded and low <= xs[0], open_above=banded and high >= xs[-1],
            faster_below=below, faster_above=above,
        )  # fmt: skip


def lead(ratio: Estimate) -> int:
    """1 where the second is faster, -1 where the first is, 0 where the interval does not say."""
    low, high = ratio.low, ratio.high
    low, high = (ratio.value if low is None else low), (ratio.value if high is None else high)
    return 1 if min(low, ratio.value) > 1 else -1 if max(high, ratio.value) < 1 else 0


def _roots(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, int]]:
    """Where the line through the points changes sign, and the sign that it then has."""
    found = []
    nonzero = [(x, y) for x, y in zip(xs, ys, strict=True) if y]
    for (x0, y0), (x1, y1) in pairwise(nonzero):
        if (y0 > 0) != (y1 > 0):
            zeros = [x for x in xs if x0 < x < x1]
            at = sum(zeros) / len(zeros) if zeros else _zero((x0, y0), (x1, y1))
            found.append((at, 1 if y1 > 0 else -1))
    return found


def _zero(before: _Point, after: _Point) -> float:
    (x0, y0), (x1, y1) = before, after
    return x0 + (x1 - x0) * y0 / (y0 - y1)


def _stretches(xs: Sequence[float], ratios: Sequence[Estimate]) -> list[tuple[float, float]]:
    """Where the interpolated band holds 1, from left to right; ends that touch are joined."""
    ends = [(min(r.low or r.value, r.value), max(r.high or r.value, r.value)) for r in ratios]
    band = [(x, math.log(low), math.log(high)) for x, (low, high) in zip(xs, ends, strict=True)]
    bends = _bends(xs, [math.log(ratio.value) for ratio in ratios])
    found: list[tuple[float, float]] = []
    for (x0, low0, high0), (x1, low1, high1) in pairwise(_bent(band, bends)):
        below = _not_above(x0, low0, x1, low1)
        above = _not_above(x0, -high0, x1, -high1)
        if below and above and max(below[0], above[0]) <= min(below[1], above[1]):
            start, end = max(below[0], above[0]), min(below[1], above[1])
            joins = bool(found) and found[-1][1] == start == x0
            found[-1 if joins else len(found) :] = [(found[-1][0] if joins else start, end)]
    return found


def _bends(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """For each gap between points, how far a curve through them may leave the straight line.

    h²/8 · |f''|, as of any linear interpolation, with f'' from the three points around either end
    of the gap, whichever is larger; 0 where there are only two points.
    """
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True))]
    seconds = [
        abs(after - before) / ((xs[i + 2] - xs[i]) / 2)
        for i, (before, after) in enumerate(pairwise(slopes))
    ]
    return [
        (xs[i + 1] - xs[i]) ** 2 / 8 * max(seconds[max(0, i - 1) : i + 1], default=0.0)
        for i in range(len(slopes))
    ]


def _bent(band: Sequence[_Band], bends: Sequence[float]) -> Iterator[_Band]:
    """The band with points between those given, wider there by what the curve may bend."""
    for (x0, low0, high0), (x1, low1, high1), bend in zip(band, band[1:], bends, strict=False):
        decided = min(low0, low1) - bend > 0 or max(high0, high1) + bend < 0
        for step in range(1 if decided else _STEPS):
            t = step / _STEPS
            more = 4 * t * (1 - t) * bend
            low, high = low0 + t * (low1 - low0), high0 + t * (high1 - high0)
            yield x0 + t * (x1 - x0), low - more, high + more
    yield band[-1]


def _not_above(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float] | None:
    """The part of [x0, x1] where the line through two points is 0 or less."""
    if y0 > 0 and y1 > 0:
        return None
    if y0 <= 0 and y1 <= 0:
        return x0, x1
    zero = min(max(_zero((x0, y0), (x1, y1)), x0), x1)
    return (x0, zero) if y0 <= 0 else (zero, x1)


def _widened(xs: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """A stretch that ends within a wide gap between sizes, up to the ends of that gap."""
    for left, right in pairwise(xs):
        if right - left > math.log(NEAR) * (1 + 1e-9):
            low = left if left < low < right else low
            high = right if left < high < right else high
    return low, high


def size_text(n: float) -> str:
    """A size with three digits, more where it is a whole number: `128`, `1,024`, `0.85`."""
    if n >= 100:
        exact = abs(n - round(n)) < 1e-9 * n
        return units.count(round(n) if exact else round(float(units.digits(n))))
    return f"{float(units.digits(n)):g}"
