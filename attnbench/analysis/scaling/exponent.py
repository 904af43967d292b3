"""The exponent of a series: which sizes count, the fit of many series at once, the finding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attnbench.analysis.roofline import launch_bound
from attnbench.analysis.scaling import slopes
from attnbench.analysis.scaling.decide import Evidence, decide
from attnbench.analysis.scaling.medians import Sets, drawn_medians, intervals
from attnbench.analysis.scaling.remarks import BOUNDARIES, NOUNS, power_of, remarks, size_text
from attnbench.analysis.scaling.results import Estimate, ExponentFit, Series
from attnbench.analysis.scaling.scatter import Floats
from attnbench.analysis.times import are_times
from attnbench.base.stats import median
from attnbench.base.units import time as time_text
from attnbench.schema.finding import Figure, Finding

DRAWS = 1000
# Which sizes count. At 3 times a measured floor what is left after subtracting it is known to
# 1.6 times the relative error of a time, and a floor that differs by 30 % from the one at n = 1
# moves the slope over four octaves by 0.04. At 20 times the starts of the kernels, which are all
# that is known without a measured floor, the floor itself (at n = 1 on CPU 5 to 8 times its
# kernels' starts) still weighs on the smallest size: the interval takes in both.
TIMES_FLOOR, TIMES_LEAST, FLOOR_PER_LEAST = 3.0, 20.0, 8.0
_CELLS_AT_ONCE = 2_000_000  # sizes × draws held in memory


@dataclass(frozen=True, kw_only=True)
class _Floor:
    """What is subtracted, what it may be at most, what a size must take to count, and why."""

    us: float
    most_us: float
    from_us: float
    said: str


def fit_series(series: Series, *, draws: int = DRAWS) -> ExponentFit:
    """The exponent of one series, with its finding where a law is declared."""
    return fit_many([series], draws=draws)[0]


def fit_many(many: Sequence[Series], *, draws: int = DRAWS) -> list[ExponentFit]:
    """The exponents of many series, in their order; the draws are the same for the same input."""
    alike: dict[int, list[int]] = defaultdict(list)
    for index, series in enumerate(many):
        alike[len(series.sizes)].append(index)
    found: dict[int, ExponentFit] = {}
    for sizes, members in alike.items():
        step = max(1, _CELLS_AT_ONCE // max(1, sizes * draws))
        for first in range(0, len(members), step):
            chunk = members[first : first + step]
            found.update(zip(chunk, _fit_alike([many[i] for i in chunk], draws), strict=True))
    return [found[index] for index in range(len(many))]


def _fit_alike(many: list[Series], draws: int) -> list[ExponentFit]:
    """Series of as many sizes each."""
    if not many[0].sizes:
        return [_unknown(series) for series in many]
    replicates = Sets([times for series in many for times in series.times_us])
    floor_replicates = Sets([series.floor_us or () for series in many])
    shape = (len(many), len(many[0].sizes))
    middle, low, high = (part.reshape(shape) for part in intervals(replicates))
    floors = [_floor(series, row) for series, row in zip(many, middle, strict=True)]
    left_out = [_left_out(s, f, row) for s, f, row in zip(many, floors, middle, strict=True)]
    weight = np.array([[why is None for why in row] for row in left_out], dtype=np.float64)
    drawn = drawn_medians(replicates, draws, shape[1]).reshape(*shape, draws)
    floor_drawn = drawn_medians(floor_replicates, draws, 1, seed=1)
    data = _data(many, floors, weight, middle, drawn, floor_drawn)
    lines = slopes.fit(data)
    times = _estimates(middle, low, high)
    return [
        _fitted(series, floors[i], left_out[i], times[i], lines, i) for i, series in enumerate(many)
    ]


def _data(
    many: list[Series],
    floors: list[_Floor],
    weight: Floats,
    middle: Floats,
    drawn: Floats,
    floor_drawn: Floats,
) -> slopes.Data:
    counts = weight > 0
    floor = np.array([f.us for f in floors])[:, None]
    most = np.array([f.most_us for f in floors])[:, None]
    measured = np.isfinite(floor_drawn) & (floor > 0)
    floor_drawn = np.where(measured, floor_drawn, floor)
    least = 1e-3 * middle[:, :, None]  # a draw of the floor may reach a draw of the time
    net_drawn = np.where(counts[:, :, None], drawn - floor_drawn[:, None, :], 1.0)
    sizes = np.array([series.sizes for series in many], dtype=np.float64)
    return slopes.Data(
        x=np.log(np.where(counts, sizes, 1.0)),
        y=np.log(np.where(counts, middle - floor, 1.0)),
        y_other=np.log(np.where(counts, middle - most, 1.0)),
        y_drawn=np.log(np.maximum(net_drawn, np.where(counts[:, :, None], least, 1.0))),
        weight=weight,
        amplified=np.where(counts, middle / np.where(counts, middle - floor, 1.0), 0.0),
        switched=np.array([_switched(series) for series in many], dtype=bool),
        excess=_net_excess(many, middle, np.maximum(floor, most), counts),
    )


def _floor(series: Series, middle: NDArray[np.float64]) -> _Floor:
    """The floor of a series, and from which time on a size counts."""
    if series.floor_us and are_times(series.floor_us):
        us = median(series.floor_us)
        said = f"{TIMES_FLOOR:g} × the measured floor of {time_text(us)}"
        return _Floor(us=us, most_us=us, from_us=TIMES_FLOOR * us, said=said)
    known = middle[np.isfinite(middle)]
    smallest = float(known.min()) if known.size else math.inf
    least = series.least_floor_us
    if least:
        most = min(FLOOR_PER_LEAST * least, 0.9 * smallest)
        said = f"{TIMES_LEAST:g} × the {time_text(least)} that its kernels' starts take"
        return _Floor(us=0.0, most_us=most, from_us=TIMES_LEAST * least, said=said)
    said = f"{TIMES_FLOOR:g} × the smallest time, as no floor is known (measure n = 1 too)"
    return _Floor(us=0.0, most_us=smallest, from_us=TIMES_FLOOR * smallest, said=said)


def _left_out(series: Series, floor: _Floor, middle: NDArray[np.float64]) -> tuple[str | None, ...]:
    """Size by size, why it does not count, or None."""
    return tuple(
        _why_not(series, floor, float(time_us), index) for index, time_us in enumerate(middle)
    )


def _why_not(series: Series, floor: _Floor, time_us: float, index: int) -> str | None:
    if not math.isfinite(time_us):
        doubt = series.doubts[index] if series.doubts else None
        return doubt or ("no time" if not series.times_us[index] else "a time that is none")
    if not 0 < series.sizes[index] < math.inf:
        return f"a size of {series.sizes[index]:g}"
    if series.enqueue_us and launch_bound(series.enqueue_us[index], time_us):
        return "launch-bound: the host takes as long to issue the call"
    if time_us < floor.from_us:
        return f"{time_text(time_us)}, less than {floor.said}"
    return None


def _switched(series: Series) -> list[bool]:
    """Before each size but the first, whether the kernel's name has changed."""
    kernels = series.kernels or (None,) * len(series.sizes)
    return [a != b and None not in (a, b) for a, b in pairwise(kernels)]


def _net_excess(
    many: list[Series], middle: Floats, floor: Floats, counts: NDArray[np.bool_]
) -> Floats:
    """Logarithms of the factors by which times less their floor may be too long.

    Subtracting a floor magnifies what disturbed a time that is near it, beyond any bound where the
    undisturbed time may be the floor.
    """
    shorter = middle / np.array([_excess(series) for series in many]) - floor
    possible = counts & (shorter > 0)
    factor = np.where(possible, (middle - floor) / np.where(possible, shorter, 1.0), np.inf)
    found: Floats = np.log(np.where(counts, factor, 1.0))
    return found


def _excess(series: Series) -> list[float]:
    """By which factor each time may be too long: by any where there is a doubt and no bound."""
    doubts = series.doubts or (None,) * len(series.sizes)
    known = series.excess or (math.inf,) * len(series.sizes)
    return [factor if doubt else 1.0 for factor, doubt in zip(known, doubts, strict=True)]


def _estimates(middle: Floats, low: Floats, high: Floats) -> list[tuple[Estimate, ...]]:
    rows = zip(middle.tolist(), low.tolist(), high.tolist(), strict=True)
    return [tuple(_estimate(*ends) for ends in zip(*row, strict=True)) for row in rows]


def _estimate(value: float, low: float, high: float) -> Estimate:
    if low != low or high != high:
        return Estimate(value=value)
    return Estimate(value=value, low=low, high=high)


def _unknown(series: Series) -> ExponentFit:
    power, bound, _ = power_of(series, ())
    return ExponentFit(
        series=series, time_us=(), left_out=(), floor_us=0.0, exponent=None, top=None,
        intercept=None, declared=power, bound=bound,
    )  # fmt: skip


def _fitted(
    series: Series,
    floor: _Floor,
    left_out: tuple[str | None, ...],
    times: tuple[Estimate, ...],
    lines: slopes.Lines,
    i: int,
) -> ExponentFit:
    used = [size for size, why in zip(series.sizes, left_out, strict=True) if why is None]
    whole = _line_estimate(lines.whole, i)
    power, bound, logs = power_of(series, used)
    at = int(lines.jump_after[i])
    jump = None if at < 0 else (series.sizes[at], math.exp(lines.jump_log[i]))
    top = _line_estimate(lines.top, i) if whole else None
    octaves, said = float(lines.octaves[i]), remarks(series, left_out, floor.said)
    evidence = None if power is None else Evidence(
        exponent=whole, top=top, octaves=octaves, sizes=len(set(used)), power=power,
        bound=bound, logs=logs, noun=NOUNS[series.axis], cut_short=_cut_short(left_out),
        jump=jump and _jump_text(series, at, jump[1]), jump_last=bool(lines.jump_last[i]),
        lowest=float(lines.least[i]), highest=float(lines.most[i]),
        bend=int(lines.bend[i]), disturbed=_disturbed(series, left_out),
        lower=float(lines.lower[i]), higher=float(lines.higher[i]),
    )  # fmt: skip
    return ExponentFit(
        series=series, time_us=times, left_out=left_out, floor_us=floor.us, exponent=whole,
        top=top, intercept=float(lines.intercept[i]) if whole else None, declared=power,
        bound=bound, octaves=octaves, jump=jump, remarks=said,
        finding=None if evidence is None else _finding(series, evidence, floor, said),
    )  # fmt: skip


def _line_estimate(line: slopes.Line, i: int) -> Estimate | None:
    value, low, high = float(line.slope[i]), float(line.low[i]), float(line.high[i])
    return None if value != value else _estimate(value, low, high)


def _jump_text(series: Series, at: int, factor: float) -> str:
    noun, before, after = NOUNS[series.axis], series.sizes[at], series.sizes[at + 1]
    kernel = ", where the kernel changes" if _switched(series)[at] else ""
    between = f"between {noun} = {size_text(before)} and {size_text(after)}{kernel}"
    return f"the time jumps by {factor:.2g} × {between}"


def _cut_short(left_out: tuple[str | None, ...]) -> str | None:
    """The reason most sizes do not count for, with their number."""
    reasons = [why for why in left_out if why is not None]
    if not reasons:
        return None
    return f"{len(reasons)} of {len(left_out)} left out, the last with {reasons[-1]}"


def _disturbed(series: Series, left_out: tuple[str | None, ...]) -> str | None:
    """Which of the sizes that count have serious notes on their times."""
    doubts = series.doubts or (None,) * len(series.sizes)
    known = zip(series.sizes, doubts, left_out, strict=True)
    bad = [size_text(size) for size, doubt, why in known if doubt and why is None]
    if not bad:
        return None
    return f"the times at {NOUNS[series.axis]} = {', '.join(bad)} were disturbed or unsteady"


def _finding(series: Series, evidence: Evidence, floor: _Floor, known: tuple[str, ...]) -> Finding:
    """The verdict; where the law does not hold, what is known of caches and kernels beside it."""
    verdict, reason = decide(evidence)
    if verdict != "holds":
        beside = [text for text in known if text.startswith(BOUNDARIES)]
        reason = "; ".join((reason, *beside))
    return Finding(
        subject=series.subject,
        question=f"time in {series.axis}",
        law=_law_asked(series, evidence),
        verdict=verdict,
        reason=reason,
        figures={
            **_figures("exponent", evidence.exponent),
            **_figures("top_slope", evidence.top),
            "octaves": evidence.octaves,
            "floor_us": floor.us,
        },
    )


def _law_asked(series: Series, evidence: Evidence) -> str:
    """The law as declared; of several terms what an exponent can tell: the bound by the largest."""
    law = series.law
    if law is None or series.axis != "n" or (evidence.bound and not law.bound):
        return evidence.law
    return str(law)


def _figures(name: str, found: Estimate | None) -> dict[str, Figure]:
    if found is None:
        return {name: None}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
