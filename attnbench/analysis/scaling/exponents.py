"""The exponent of a series: which sizes count, the fit, the finding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import trim_mean

from attnbench.analysis.scaling import slopes
from attnbench.analysis.scaling.decide import (
    FINEST,
    TO_HOLD,
    TO_REFUTE,
    TOLERANCE,
    ExponentEvidence,
    decide,
    needed,
)
from attnbench.analysis.scaling.results import (
    NOUNS,
    ExponentFit,
    Missing,
    Series,
    as_figures,
    lacking,
    plain_size,
)
from attnbench.analysis.scaling.slopes import Time, drawn_medians, known_time
from attnbench.base import units
from attnbench.schema.axes import AXES
from attnbench.schema.finding import LawFinding
from attnbench.theory.law import Law

DRAWS = 1000
# Which sizes count. At 3 times a measured overhead what is left after subtracting it is known to
# 1.6 times the relative error of a time, and an overhead that differs by 30 % from the one at n = 1
# moves the slope over four octaves by 0.04. At 20 times the starts of the kernels, which are all
# that is known without a measured overhead, the overhead itself (at n = 1 on CPU 5 to 8 times its
# kernels' starts) still weighs on the smallest size: the interval takes in both.
TIMES_OVERHEAD, TIMES_LEAST, OVERHEAD_PER_LEAST = 3.0, 20.0, 8.0
# Others share the last cache of a machine: calls slow down before it is full. naive, H = 2, D = 16
# (4 and 17 MiB in use at n = 512 and 1024, of 32 for all tenants) has slopes of 1.96, 2.46, 2.08.
# Beside three other processes the same rounds have 2.18, 2.23, 2.17: n^2.20 [2.15, 2.23].
FILLED, CONTENDED = 0.5, 0.2
FRESH = 0.05  # of a time, in recorded page faults: from here on they weigh on a slope
# Of rounds that all sizes share. A call's time follows the core's speed with a slope of 0.3
# (memory-bound) to 0.9 (dispatch-bound): the middle is taken off, the rest may be there.
FEWEST_ROUNDS, FOLLOWS, FOLLOWS_OFF, TRIMMED = 7, 0.6, 0.3, 0.2
_MOST_OFF = math.exp(50.0)  # the factor by which a time of which nothing is known may be off


@dataclass(frozen=True, kw_only=True)
class _Overhead(Time):
    """What is subtracted, what it may be at most, what a size must take to count, and why."""

    most_us: float
    from_us: float
    reason: str


def fit_many(many: Sequence[Series], *, draws: int = DRAWS) -> list[ExponentFit]:
    """The exponents of many series, in their order; the draws are the same for the same input."""
    return [_fit(series, draws) for series in many]


def _fit(series: Series, draws: int) -> ExponentFit:
    """By the times alone; where these leave a law open, by the rounds that all sizes share.

    What keeps rounds apart from a law must be more than other work does to large working sets,
    which it slows more than small ones.
    """
    alone = _fit_of(series, draws)
    if alone.finding is None or alone.finding.verdict != "inconclusive":
        return alone
    rounds = _shared_rounds(series, [i for i, why in enumerate(alone.left_out) if why is None])
    if rounds is None:
        return alone
    shared = _fit_of(series, draws, rounds)
    assert shared.finding is not None
    power, _, logs = power_of(series, series.sizes)
    low = shared.exponent.ends[0] if shared.exponent else 0.0
    most = (power or 0.0) + TOLERANCE + (logs or 0.0)
    contended = most < low <= most + CONTENDED
    return alone if shared.finding.verdict == "inconclusive" or contended else shared


def _fit_of(series: Series, draws: int, rounds: slopes.Floats | None = None) -> ExponentFit:
    """By the times, or where `rounds` are given (`_shared_rounds`) by what they say of ratios."""
    allowed = series.allowed_us or (None,) * len(series.sizes)
    times = [known_time(*pair) for pair in zip(series.times_us, allowed, strict=True)]
    overhead = _overhead(series, times)
    left_out = [_why_not(series, overhead, time, i) for i, time in enumerate(times)]
    used = [index for index, why in enumerate(left_out) if why is None]
    fresh = _fresh(series, times, used)
    left_out = [fresh.get(index, why) for index, why in enumerate(left_out)]
    used = [index for index in used if index not in fresh]
    slope = slopes.fit(_log_data(series, overhead, times, used, draws, rounds))
    change, text = None, None
    if slope.change_after >= 0:
        at = used[slope.change_after]
        change = series.sizes[at], math.exp(slope.change_log)
        text = f"the time changes by {change[1]:.2g} × between {_between(series, at)}"
        text += ", where the kernel changes" * _switches(series, at)
    cut_short, sizes = None, [series.sizes[i] for i in used]
    if reasons := [why for why in left_out if why]:
        cut_short = f"{len(reasons)} of {len(left_out)} left out, the last: {reasons[-1]}"
    power, bound, logs = power_of(series, sizes)
    finding: LawFinding | None = None
    missing: tuple[Missing, ...] = ()
    if power is not None:
        evidence = ExponentEvidence(
            slope=slope, sizes=len(set(sizes)), power=power, bound=bound, logs=logs,
            noun=NOUNS[series.axis], cut_short=cut_short, changepoint=text,
            executed=_executed(series, used), fresh=bool(fresh),
        )  # fmt: skip
        missing = tuple(_missing(series, overhead, times, used, evidence))
        finding = _finding(series, overhead, evidence, missing)
    return ExponentFit(
        series=series, time_us=tuple(times), left_out=tuple(left_out),
        overhead_us=overhead.value, exponent=slope.exponent, top=slope.top,
        intercept=slope.intercept if slope.exponent else None,
        octaves=slope.octaves, changepoint=change, finding=finding, hidden=bool(fresh),
        missing=missing if finding and finding.verdict == "inconclusive" else (),
    )  # fmt: skip


def _overhead(series: Series, times: Sequence[Time]) -> _Overhead:
    """The overhead of a series, and from which time on a size counts."""
    measured = known_time(series.overhead_us, series.overhead_allowed_us)
    if (us := measured.value) > 0:
        reason = f"{TIMES_OVERHEAD:g} × the measured overhead of {units.time(us)}"
        return _Overhead(**vars(measured), most_us=us, from_us=TIMES_OVERHEAD * us, reason=reason)
    smallest = min((t.value for t in times if math.isfinite(t.value)), default=math.inf)
    least = series.least_overhead_us
    if least:
        most = min(OVERHEAD_PER_LEAST * least, 0.9 * smallest)
        reason = f"{TIMES_LEAST:g} × the {units.time(least)} that its kernels' starts take"
        return _Overhead(value=0.0, most_us=most, from_us=TIMES_LEAST * least, reason=reason)
    reason = f"{TIMES_OVERHEAD:g} × the smallest time, as no overhead is known (measure n = 1 too)"
    return _Overhead(value=0.0, most_us=smallest, from_us=TIMES_OVERHEAD * smallest, reason=reason)


def _why_not(series: Series, overhead: _Overhead, time: Time, index: int) -> str | None:
    """Why a size does not count; None where it does."""
    if not math.isfinite(time.value) or math.isinf(time.longer):
        doubt = series.doubts[index] if series.doubts else None
        return doubt or ("not a valid time" if series.times_us[index] else "no time")
    if not 0 < series.sizes[index] < math.inf:
        return f"a size of {series.sizes[index]:g}"
    if series.launch_bound and series.launch_bound[index]:
        return "launch-bound: the host takes as long to issue the call"
    if time.value < overhead.from_us:
        return f"{units.time(time.value)}, less than {overhead.reason}"
    return None


def _fresh(series: Series, times: Sequence[Time], used: list[int]) -> dict[int, str]:
    """Why sizes of the last doubling do not count where they alone touch much fresh memory.

    If enough doublings are left. How much longer these sizes take is hardly known: a page takes up
    to twice what is recorded, which holds neither its return nor what it pushes from the caches.
    """
    faults_us = dict(enumerate(series.page_faults_us))
    shares = {i: x for i in used if (x := (faults_us.get(i) or 0.0) / times[i].value) > FRESH}
    rest = [series.sizes[i] for i in used if i not in shares]
    fresh = [series.sizes[i] for i in shares]
    alone = fresh and rest and max(rest) < min(fresh) <= max(fresh) <= 2 * max(rest)
    if not alone or max(rest) < 2**TO_HOLD * min(rest):
        return {}
    why = "of its time and more goes to page faults of fresh memory (--allocator keep)"
    return {i: f"{units.percent(share)} {why}" for i, share in shares.items()}


def _log_data(
    series: Series, overhead: _Overhead, times: Sequence[Time], used: list[int], draws: int,
    rounds: slopes.Floats | None,
) -> slopes.LogData:  # fmt: skip
    rows = [(times[i].value, times[i].shorter, times[i].longer) for i in used]
    times_us, shorter, longer = np.array(rows).reshape(-1, 3).T
    drawn = drawn_medians(series.times_us, draws)[used]
    if rounds is not None:
        times_us, shorter, longer, drawn = _within_rounds(times_us, rounds, draws)
    net = times_us - overhead.value
    # What is left of a time that is too long less an overhead that is too short, and conversely.
    shortest = times_us / shorter - overhead.value * overhead.longer
    longest = times_us * longer - overhead.value / overhead.shorter
    if overhead.value:
        drawn -= drawn_medians([series.overhead_us or ()], draws, seed=1)
    least = 1e-3 * times_us[:, None]  # a draw of the overhead may reach a draw of the time
    return slopes.LogData(
        x=np.log([series.sizes[i] for i in used]),
        y=np.log(net),
        y_other=np.log(times_us - overhead.most_us),
        y_drawn=np.log(np.maximum(drawn, least)),
        amplified=times_us / net,
        switched=[_switches(series, i) for i in used],
        passes=[bool(_passed(series, i, FILLED)) for i in used],
        too_long=np.log(net / np.maximum(shortest, net / _MOST_OFF)),
        too_short=np.log(np.minimum(longest, net * _MOST_OFF) / net),
    )


def _shared_rounds(series: Series, used: list[int]) -> slopes.Floats | None:
    """Logarithms of times and of the core's slowness: 2 × sizes × rounds that all sizes share."""
    rounds = [series.rounds[index] for index in used] if series.rounds else []
    shared = set.intersection(*map(set, rounds)) if rounds else set()
    if len(shared) < FEWEST_ROUNDS:
        return None
    return np.log([[of[place] for place in sorted(shared)] for of in rounds]).transpose(2, 0, 1)


def _within_rounds(
    times_us: slopes.Floats, shared: slopes.Floats, draws: int
) -> tuple[slopes.Floats, ...]:
    """Times by what the rounds say of their ratios; how far off they may be; and their draws.

    What slows all sizes of a round alike, a core or other work, leaves a slope as it is. What a
    size alone meets is trimmed or averaged, and the draws, of whole rounds, know how well.
    """
    logs = shared[0] - FOLLOWS * shared[1]
    drawn = np.random.default_rng(DRAWS).integers(logs.shape[1], size=(draws, logs.shape[1]))
    levels = trim_mean(logs, TRIMMED, axis=1)
    level = float((np.log(times_us) - levels).mean())  # that of the reported times stays
    off = np.exp(FOLLOWS_OFF * trim_mean(shared[1], TRIMMED, axis=1))
    drawn_levels = trim_mean(logs[:, drawn], TRIMMED, axis=2)
    return np.exp(levels + level), off, off, np.exp(drawn_levels + level)


def _passed(series: Series, index: int, share: float = 1.0) -> list[tuple[str, float]]:
    """The caches of which the working set passes a share between a size and the next, with bytes.

    It is within the whole before, and beyond the share after.
    """
    sets = [size for size in series.working_set_bytes[index : index + 2] if size is not None]
    caches = series.caches_bytes.items()
    return [one for one in caches if sets and sets[0] <= one[1] and share * one[1] < sets[-1]]


def _switches(series: Series, index: int) -> bool:
    """Whether the kernel's name changes between a size and the next."""
    names = series.kernels[index : index + 2]
    return len(set(names)) > 1 and None not in names


def _executed(series: Series, used: list[int]) -> float | None:
    """The exponent of the executed FLOPs over the sizes that count; None where not known."""
    if not series.flops:
        return None
    known = [(series.sizes[i], flops) for i in used if (flops := series.flops[i])]
    sizes, counts = np.log([size for size, _ in known]), np.log([flops for _, flops in known])
    return float(np.polyfit(sizes, counts, 1)[0]) if len(set(sizes.tolist())) > 1 else None


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
        noun, beside = NOUNS[series.axis], "what is left beside the overhead"
        sizes = [f"{noun} = {plain_size(size)}" for size in series.sizes] + [beside]  # the −1st
        reason += f"; {lacking((sizes[one.index], one) for one in missing)}"
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
            **as_figures("exponent", slope.exponent),
            **as_figures("top_slope", slope.top),
            "octaves": slope.octaves,
            "floor_us": overhead.value,  # as stored since the first runs
        },
    )


def _missing(
    series: Series,
    overhead: _Overhead,
    times: Sequence[Time],
    used: list[int],
    evidence: ExponentEvidence,
) -> Iterator[Missing]:
    """The times that are not known as well as a verdict needs, and those of which nothing is."""
    slope, (of_all, of_top) = evidence.slope, needed(evidence) or (math.inf, math.inf)
    unknown = [
        index
        for index, time in enumerate(times)
        if math.isinf(time.longer)  # or it may well be more than the overhead
        or (index not in used and time.value < overhead.from_us <= (time.high or 0.0))
    ]
    sizes = [series.sizes[index] for index in (*unknown, *used)]
    if unknown and max(sizes) >= 2**TO_REFUTE * min(sizes):
        yield from (Missing(index=i, known=math.inf, needed=FINEST) for i in unknown)
    low, high = series.overhead_allowed_us or (0.0, 0.0)
    of_overhead = []
    for place, (index, precision) in enumerate(zip(used, slope.precision, strict=False)):
        in_top = slope.top and slope.top.weights[place]
        at_most = (min(of_all, of_top) if in_top else of_all) + slopes.USUAL_WIDTH
        known = precision + slopes.USUAL_WIDTH
        share = (high - low) / 2 / (times[index].value - overhead.value)
        if known > at_most and share > known / 2:
            of_overhead.append(Missing(index=-1, known=known, needed=at_most))
        elif known > at_most:
            yield Missing(index=index, known=known, needed=at_most)
    if of_overhead:
        yield max(of_overhead, key=lambda one: one.known / one.needed)


def _boundaries(series: Series) -> list[str]:
    """Between which sizes the working set passes a cache, and the kernels change."""
    found = []
    for index in range(len(series.sizes) - 1):
        whole = _passed(series, index)
        filled = [one for one in _passed(series, index, FILLED) if one not in whole]
        passed = [
            f"{of}the {name} ({units.size(size)})"
            for of, caches in (("", whole), ("half of ", filled))
            for name, size in caches
        ]
        if caches := " and ".join(passed):
            found.append(f"the working set passes {caches} between {_between(series, index)}")
    switches = [i for i in range(len(series.sizes)) if _switches(series, i)]
    return found + [f"the kernels change between {_between(series, i)}" for i in switches]


def _between(series: Series, index: int) -> str:
    """A size and the next: `n = 512 and 1024`."""
    size, larger = series.sizes[index : index + 2]
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
        return float(law.degree(axis)), bound, _log_slope(law, axis, used)
    wide = AXES["width"].applies(series.workload)
    return (float(law.degree("d")) if axis == "heads" and wide else 1.0), bound, None


def _log_slope(law: Law, variable: str, used: Sequence[float]) -> float | None:
    """What the logarithms of the leading terms add to the slope: q / ln(the middle size)."""
    leading = [term for term in law.terms if term.degree(variable) == law.degree(variable)]
    power = max(float(dict(term.logs).get(variable, 0)) for term in leading)
    large = [size for size in used if size > math.e]
    if not power:
        return None
    return power / (sum(map(math.log, large)) / len(large)) if large else power
