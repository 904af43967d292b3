"""The exponent of a series: which sizes count, the fit of many series at once, the finding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from attnbench.analysis.scaling import slopes
from attnbench.analysis.scaling.decide import (
    FINEST,
    TO_REFUTE,
    ExponentEvidence,
    decide,
    needed,
)
from attnbench.analysis.scaling.results import (
    NOTHING_KNOWN,
    NOUNS,
    ExponentFit,
    Missing,
    Series,
    Slope,
    Uncertain,
    as_figures,
    lacking,
    plain_size,
)
from attnbench.analysis.scaling.slopes import Floats, estimates
from attnbench.analysis.times import are_times
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.schema.finding import LawFinding
from attnbench.theory.law import Law
from attnbench.theory.traits import TRAITS

DRAWS = 1000
# Which sizes count. At 3 times a measured overhead what is left after subtracting it is known to
# 1.6 times the relative error of a time, and an overhead that differs by 30 % from the one at n = 1
# moves the slope over four octaves by 0.04. At 20 times the starts of the kernels, which are all
# that is known without a measured overhead, the overhead itself (at n = 1 on CPU 5 to 8 times its
# kernels' starts) still weighs on the smallest size: the interval takes in both.
TIMES_OVERHEAD, TIMES_LEAST, OVERHEAD_PER_LEAST = 3.0, 20.0, 8.0
_UNBOUNDED = 50.0  # as the logarithm of a factor by which a time may be off


@dataclass(frozen=True, kw_only=True)
class _Overhead:
    """What is subtracted, what it may be at most, what a size must take to count, and why."""

    us: float
    most_us: float
    from_us: float
    reason: str


def fit_many(many: Sequence[Series], *, draws: int = DRAWS) -> list[ExponentFit]:
    """The exponents of many series, in their order; the draws are the same for the same input."""
    return [_fit(series, draws) for series in many]


def _fit(series: Series, draws: int) -> ExponentFit:
    middle, low, high = slopes.intervals(series.times_us)
    allowed = series.allowed_us or (None,) * len(middle)
    shorter, longer, low, high = slopes.beyond((middle, low, high), allowed)
    overhead = _overhead(series, middle)
    left_out = tuple(_why_not(series, overhead, us, k) for k, us in enumerate(middle.tolist()))
    used = [index for index, why in enumerate(left_out) if why is None]
    line = slopes.fit(_log_data(series, overhead, used, middle, (shorter, longer), draws))
    return _fitted(series, overhead, left_out, tuple(estimates(middle, low, high)), line, used)


def _log_data(
    series: Series,
    overhead: _Overhead,
    used: list[int],
    middle: Floats,
    factors: tuple[Floats, Floats],
    draws: int,
) -> slopes.LogData:
    times_us, (shorter, longer) = middle[used], (factor[used] for factor in factors)
    of_overhead = [series.overhead_us or ()]
    known = slopes.beyond(slopes.intervals(of_overhead), [series.overhead_allowed_us])
    less, more = known[0][0], known[1][0]
    drawn_overhead = slopes.drawn_medians(of_overhead, draws, seed=1)[0]
    if not (overhead.us > 0 and np.isfinite(drawn_overhead).all()):
        drawn_overhead = np.full(draws, overhead.us)
    net_drawn = slopes.drawn_medians(series.times_us, draws)[used] - drawn_overhead
    least = 1e-3 * times_us[:, None]  # a draw of the overhead may reach a draw of the time
    net = times_us - overhead.us
    # What is left of a time that is too long less an overhead that is too short, and conversely.
    shortest = np.maximum(times_us / shorter - overhead.us * more, net * np.exp(-_UNBOUNDED))
    longest = np.minimum(times_us * longer - overhead.us / less, net * np.exp(_UNBOUNDED))
    switched = [*_switched(series), False]
    return slopes.LogData(
        x=np.log([series.sizes[index] for index in used]),
        y=np.log(net),
        y_other=np.log(times_us - overhead.most_us),
        y_drawn=np.log(np.maximum(net_drawn, least)),
        amplified=times_us / net,
        switched=[switched[index] for index in used],
        too_long=np.log(net / shortest),
        too_short=np.log(longest / net),
    )


def _overhead(series: Series, middle: Floats) -> _Overhead:
    """The overhead of a series, and from which time on a size counts."""
    if series.overhead_us and are_times(series.overhead_us):
        us = median(series.overhead_us)
        reason = f"{TIMES_OVERHEAD:g} × the measured overhead of {units.time(us)}"
        return _Overhead(us=us, most_us=us, from_us=TIMES_OVERHEAD * us, reason=reason)
    smallest = float(np.min(middle, initial=math.inf, where=np.isfinite(middle)))
    least = series.least_overhead_us
    if least:
        most = min(OVERHEAD_PER_LEAST * least, 0.9 * smallest)
        reason = f"{TIMES_LEAST:g} × the {units.time(least)} that its kernels' starts take"
        return _Overhead(us=0.0, most_us=most, from_us=TIMES_LEAST * least, reason=reason)
    reason = f"{TIMES_OVERHEAD:g} × the smallest time, as no overhead is known (measure n = 1 too)"
    return _Overhead(us=0.0, most_us=smallest, from_us=TIMES_OVERHEAD * smallest, reason=reason)


def _why_not(series: Series, overhead: _Overhead, time_us: float, index: int) -> str | None:
    doubt = series.doubts[index] if series.doubts else None
    if not math.isfinite(time_us) or _unknown(series, index):
        return doubt or ("not a valid time" if series.times_us[index] else "no time")
    if not 0 < series.sizes[index] < math.inf:
        return f"a size of {series.sizes[index]:g}"
    if series.launch_bound and series.launch_bound[index]:
        return "launch-bound: the host takes as long to issue the call"
    if time_us < overhead.from_us:
        return f"{units.time(time_us)}, less than {overhead.reason}"
    return None


def _unknown(series: Series, index: int) -> bool:
    """Whether the time of a size may be anything."""
    return bool(series.allowed_us) and series.allowed_us[index] == NOTHING_KNOWN


def _switched(series: Series) -> list[bool]:
    """Before each size but the first, whether the kernel's name has changed."""
    kernels = series.kernels or (None,) * len(series.sizes)
    return [a != b and None not in (a, b) for a, b in pairwise(kernels)]


def _fitted(
    series: Series,
    overhead: _Overhead,
    left_out: tuple[str | None, ...],
    times: tuple[Uncertain, ...],
    slope: Slope,
    used: list[int],
) -> ExponentFit:
    sizes = [series.sizes[index] for index in used]
    power, bound, logs = power_of(series, sizes)
    at = -1 if slope.change_after < 0 else used[slope.change_after]
    change = None if at < 0 else (series.sizes[at], math.exp(slope.change_log))
    finding: LawFinding | None = None
    missing: tuple[Missing, ...] = ()
    if power is not None:
        evidence = ExponentEvidence(
            slope=slope, sizes=len(set(sizes)), power=power, bound=bound, logs=logs,
            noun=NOUNS[series.axis], cut_short=_cut_short(left_out),
            changepoint=change and f"the time changes by {change[1]:.2g} × between"
            f" {_between(series, *series.sizes[at : at + 2])}"
            f"{', where the kernel changes' * _switched(series)[at]}",
            executed=_executed(series, left_out),
        )  # fmt: skip
        missing = tuple(_missing(series, overhead, evidence, left_out, times, used))
        finding = _finding(series, overhead, evidence, missing)
    return ExponentFit(
        series=series, time_us=times, left_out=left_out, overhead_us=overhead.us,
        exponent=slope.exponent, top=slope.top,
        intercept=slope.intercept if slope.exponent else None, declared=power, bound=bound,
        octaves=slope.octaves, changepoint=change, finding=finding,
        missing=missing if finding and finding.verdict == "inconclusive" else (),
    )  # fmt: skip


def _executed(series: Series, left_out: tuple[str | None, ...]) -> float | None:
    """The exponent of the executed FLOPs over the sizes that count; None where not known."""
    rows = zip(series.sizes, series.flops, left_out, strict=False)
    used = [(math.log(size), math.log(n)) for size, n, why in rows if why is None and n]
    xs, ys = zip(*used, strict=True) if used else ((), ())
    return float(np.polyfit(xs, ys, 1)[0]) if len(set(xs)) > 1 else None


def _finding(
    series: Series, overhead: _Overhead, evidence: ExponentEvidence, missing: Sequence[Missing]
) -> LawFinding:
    """The verdict; where the law does not hold, with the caches and kernels that are passed.

    Where nothing was decided, with the times that are missing.
    """
    verdict, reason = decide(evidence)
    slope = evidence.slope
    if verdict != "holds":
        reason = "; ".join((reason, *_boundaries(series)))
    if verdict == "inconclusive" and missing:
        reason += f"; {lacking((_size(series, one), one) for one in missing)}"
    # Of several terms an exponent can only judge the bound by the largest.
    asked = series.axis == "n" and series.law and not (evidence.bound and not series.law.bound)
    return LawFinding(
        subject=series.subject,
        impl=series.impl,
        workload=series.workload,
        quantity="time",
        axis=series.axis,
        question=f"time in {series.axis}",
        law=str(series.law) if asked else evidence.law,
        verdict=verdict,
        reason=reason,
        figures={
            **(as_figures("exponent", slope.exponent) or {"exponent": None}),
            **(as_figures("top_slope", slope.top) or {"top_slope": None}),
            "octaves": slope.octaves,
            "floor_us": overhead.us,  # as stored since the first runs
        },
    )


def _missing(
    series: Series,
    overhead: _Overhead,
    evidence: ExponentEvidence,
    left_out: tuple[str | None, ...],
    times: tuple[Uncertain, ...],
    used: list[int],
) -> Iterator[Missing]:
    """The times that are not known as well as a verdict needs, and those of which nothing is."""
    slope, (of_all, of_top) = evidence.slope, needed(evidence) or (math.inf, math.inf)
    unknown = [
        index
        for index, (time, why) in enumerate(zip(times, left_out, strict=True))
        if _unknown(series, index)  # or it may well be more than the overhead
        or (why and time.high and time.value < overhead.from_us <= time.high)
    ]
    sizes = [series.sizes[index] for index in (*unknown, *used)]
    if unknown and max(sizes) >= 2**TO_REFUTE * min(sizes):
        yield from (Missing(index=i, known=math.inf, needed=FINEST) for i in unknown)
    low, high = series.overhead_allowed_us or (0.0, 0.0)
    of_overhead = Missing(index=-1, known=0.0, needed=1.0)
    for place, (index, precision) in enumerate(zip(used, slope.precision, strict=False)):
        in_top = slope.top_weights and slope.top_weights[place]
        at_most = (min(of_all, of_top) if in_top else of_all) + slopes.USUAL_WIDTH
        known = precision + slopes.USUAL_WIDTH
        share = (high - low) / 2 / (times[index].value - overhead.us)
        if known > at_most and share > known / 2:
            if known / at_most > of_overhead.known / of_overhead.needed:
                of_overhead = Missing(index=-1, known=known, needed=at_most)
        elif known > at_most:
            yield Missing(index=index, known=known, needed=at_most)
    if of_overhead.known:
        yield of_overhead


def _size(series: Series, missing: Missing) -> str:
    if missing.index < 0:
        return "what is left beside the overhead"
    return f"{NOUNS[series.axis]} = {plain_size(series.sizes[missing.index])}"


def _cut_short(left_out: tuple[str | None, ...]) -> str | None:
    """How many sizes do not count, with the last one's reason."""
    reasons = [why for why in left_out if why is not None]
    count = f"{len(reasons)} of {len(left_out)}"
    return f"{count} left out, the last with {reasons[-1]}" if reasons else None


def _boundaries(series: Series) -> list[str]:
    """Between which sizes the working set passes the last cache, and the kernels change."""
    found, cache = [], series.cache_bytes
    working_sets = zip(series.sizes, series.working_set_bytes, strict=False)
    for (size, inside), (larger, outside) in pairwise(working_sets):
        if cache and inside is not None and outside is not None and inside <= cache < outside:
            passed = f"the working set passes the last cache ({units.size(cache)}) between"
            found.append(f"{passed} {_between(series, size, larger)}")
            break
    for (size, larger), switched in zip(pairwise(series.sizes), _switched(series), strict=True):
        if switched:
            found.append(f"the kernels change between {_between(series, size, larger)}")
    return found


def _between(series: Series, size: float, larger: float) -> str:
    return f"{NOUNS[series.axis]} = {plain_size(size)} and {plain_size(larger)}"


def power_of(series: Series, used: Sequence[float]) -> tuple[float | None, bool, float | None]:
    """The power that the declared law gives the axis, whether as a bound, and its logs' slope.

    None, False, None without a law. A law of several terms along the axis bounds the exponent by
    the largest power; the model judges the terms. Only along n is a law taken as exact: products of
    other widths have other tiles, and more heads or batches may be served at once. Batch and
    heads are factors of every term; where d is the width of a layer, more heads at a fixed head
    dim widen it. At a fixed width more heads leave the products alone, and each has a softmax of
    its own.
    """
    law, axis = series.law, series.axis
    if law is None:
        return None, False, None
    several = len({term.degree("n") for term in law.terms}) > 1
    bound = law.bound or axis != "n" or several
    if axis in ("n", "d"):
        logs = _log_slope(law, axis, used) if law.has_logs else None
        return float(law.degree(axis)), bound, logs
    wide = series.workload in TRAITS and "widths" in TRAITS.get(series.workload).axes
    return (float(law.degree("d")) if axis == "heads" and wide else 1.0), bound, None


def _log_slope(law: Law, variable: str, used: Sequence[float]) -> float | None:
    """What the logarithms of the leading terms add to the slope: q / ln(the middle size)."""
    along = law.along(variable)
    leading = [term for term in along.terms if term.degree(variable) == along.degree(variable)]
    power = max(float(dict(term.logs).get(variable, 0)) for term in leading)
    large = [size for size in used if size > math.e]
    if not power:
        return None
    return power / (sum(map(math.log, large)) / len(large)) if large else power
