"""What the fits find, for the terminal, the report and the claims: plain frozen values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnbench.analysis.pairs import Round
from attnbench.analysis.times import Interval
from attnbench.base import units
from attnbench.schema.finding import Figure, LawFinding
from attnbench.schema.record import Cell, Record
from attnbench.theory.law import Law

Axis = Literal["n", "d", "heads", "heads at fixed width", "batch"]
Quantity = Literal["flops", "workspace"]
NOUNS: dict[Axis, str] = {
    "n": "n", "d": "d", "heads": "H", "heads at fixed width": "H", "batch": "B",
}  # fmt: skip


MOST_LACKING = 3  # times named in a reason
HARDLY = 0.5  # from here on a relative half-width says little
NOTHING_KNOWN = (0.0, math.inf)  # of a time


def power_text(noun: str, power: float) -> str:
    """As people write a power: `n^2`, `n`, `1`."""
    return "1" if power == 0 else noun if power == 1 else f"{noun}^{power:g}"


def plain_size(size: float) -> str:
    """A size with all its digits: 4096, not 4.1e+03."""
    return f"{size:.0f}" if size == round(size) else f"{size:g}"


@dataclass(frozen=True, kw_only=True)
class Uncertain:
    """A figure with the ends of its 95 % interval; None where there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high; the value itself where there is no interval."""
        low, high = self.low, self.high
        return self.value if low is None else low, self.value if high is None else high


def as_figures(name: str, found: Uncertain | None) -> dict[str, Figure]:
    """An estimate as three figures: `name`, `name_low`, `name_high`; None alone for None."""
    if found is None:
        return {name: None}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with the replicates of its time and the ends of what it may be.

    `doubt` says why there are none, or why the time may be anything. `kind` is all that makes cells
    alike but their sizes.
    """

    record: Record
    kind: tuple[Any, ...]
    times_us: tuple[float, ...] = ()
    allowed_us: Interval | None = None
    doubt: str | None = None
    rounds: Mapping[Round, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether there is a time whose error is bounded."""
        return bool(self.times_us) and self.allowed_us != NOTHING_KNOWN


@dataclass(frozen=True, kw_only=True)
class Series:
    """The cells of one implementation that differ along one axis alone, smallest first.

    `times_us` holds the replicates of each size: windows of one process, or the medians of
    several. `overhead_us` are the replicates of the smallest problem there is a time for (n = 1),
    None where there is none; `least_overhead_us` is what starting its kernels takes. `law` is the
    declared law as it turns out in this workload, None where none is declared. `doubts` says of
    each size without a time why. `allowed_us` has the ends of what each time may truly be, where
    that is more than its replicates show; None where not known. `flops` are those that the
    implementation says it executes, `page_faults_us` what fresh pages take at least of each time,
    `caches_bytes` the caches that its `working_set_bytes` may pass; `launch_bound` tells the sizes
    whose time is the host's. `same` says in words what the cells share. `cells` are those measured,
    size by size, and `overhead` that of the smallest problem, where they come from a run.
    `rounds` has of each size the time in µs of each round, and how many times as long as at full
    speed the core took for a fixed loop around it.
    """

    impl: str
    workload: str
    axis: Axis
    same: str
    sizes: tuple[float, ...]
    times_us: tuple[tuple[float, ...], ...]
    overhead_us: tuple[float, ...] | None = None
    law: Law | None = None
    kernels: tuple[str | None, ...] = ()
    page_faults_us: tuple[float | None, ...] = ()
    flops: tuple[int | None, ...] = ()
    working_set_bytes: tuple[float | None, ...] = ()
    caches_bytes: Mapping[str, float] = field(default_factory=dict)
    doubts: tuple[str | None, ...] = ()
    allowed_us: tuple[tuple[float, float] | None, ...] = ()
    overhead_allowed_us: tuple[float, float] | None = None
    least_overhead_us: float | None = None
    launch_bound: tuple[bool, ...] = ()
    cells: tuple[Measured, ...] = ()
    overhead: Measured | None = None
    rounds: tuple[Mapping[Round, tuple[float, float]], ...] = ()

    @property
    def subject(self) -> str:
        """What a finding is about."""
        return f"{self.impl}, {self.same}"


@dataclass(frozen=True, kw_only=True)
class LineSlope(Uncertain):
    """The slope of a line through some sizes.

    `scatter` is the half-width of its interval were every time exactly known; a time's relative
    error adds its `weights` times as much.
    """

    scatter: float
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The regression of one series in log-log, of its sizes that count; None without a slope.

    `exponent` is the slope over the sizes that count, `top` that of the last two doublings, beyond
    a changepoint, `last` that of the last doubling. `octaves` is the range of the sizes, less that
    of a changepoint. `change_after` is the index of the last size before it, −1 where there is
    none; `change_log` the logarithm of its factor; `change_in_top` says that it lies in the last
    doubling. `intercept` is that of the sizes beyond it. `lowest` and `highest` are the ends of the
    exponent's interval whichever change that the times allow, or that the end of a cache may make,
    were taken out. `curvature` is 1 where the slope surely rises with size, −1 where it falls, else
    0. `precision` is how well each time is known, as a relative half-width.
    """

    exponent: LineSlope | None
    top: LineSlope | None
    octaves: float
    last: LineSlope | None = None
    intercept: float = math.nan
    change_after: int = -1
    change_log: float = 0.0
    change_in_top: bool = False
    lowest: float = math.nan
    highest: float = math.nan
    curvature: float = 0.0
    precision: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A time that keeps a verdict open: its size or point by index, −1 for the overhead.

    It is `known` to so much, as a relative half-width (infinite for none at all), and `needed` to
    so much, which would decide.
    """

    index: int
    known: float
    needed: float


def lacking(missing: Iterable[tuple[str, Missing]]) -> str:
    """Where times are known too badly: `n = 512 is known to ± 9.0 %, ± 3.0 % would decide; …`."""
    found = []
    for at, one in sorted(missing, key=lambda m: m[1].needed / m[1].known):
        known = f"known to ± {units.percent(one.known)}" if one.known < HARDLY else "hardly known"
        found.append(f"{at} is {known}, ± {units.percent(one.needed)} would decide")
    more = len(found) - MOST_LACKING
    return "; ".join([*found[:MOST_LACKING], *[f"{more} more"] * (more > 0)])


@dataclass(frozen=True, kw_only=True)
class ExponentFit:
    """time − overhead = e^intercept · size^exponent over the sizes that count.

    `left_out` gives, size by size, why it does not count, or None. `time_us` has the median of each
    size with its interval. `octaves` is the range of the sizes that count. `changepoint` is the
    last size before a sudden change of the constant, and its factor: the exponent is that of both
    sides, the intercept that of the sizes beyond. `missing` are the times to measure again where
    the finding is inconclusive for want of them; `hidden` says that page faults hide sizes.
    """

    series: Series
    time_us: tuple[Uncertain, ...]
    left_out: tuple[str | None, ...]
    overhead_us: float
    exponent: Uncertain | None
    top: Uncertain | None
    intercept: float | None
    octaves: float = 0.0
    changepoint: tuple[float, float] | None = None
    finding: LawFinding | None = None
    missing: tuple[Missing, ...] = ()
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class ExactFit:
    """FLOPs counted, or bytes of workspace, against the formula and the declared law.

    `rows` are size, measured and predicted; None where not known. `growth` is the power of the
    largest octave, which needs no interval: nothing here is noise. There is no finding where
    neither a formula nor a law was declared.
    """

    impl: str
    workload: str
    quantity: Quantity
    axis: Axis
    same: str
    rows: tuple[tuple[float, float | None, float | None], ...]
    growth: float | None
    finding: LawFinding | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFit:
    """time = Σ coefficient · term over sizes that vary together, coefficients not negative.

    `points` are the cells (`n`, `d`, `heads`, `batch` and so on, each a number), `time_us` what was
    measured there, `predicted_us` what the model says. `shares` is each term's part of the
    predicted time at the point `at_largest`, of the largest n, `shares_along` the parts at every
    size along n with all else as there. `held_out` is the relative error (root mean square) at the
    largest n of the model that was fitted without it. `cells` are those of the points, and
    `missing` as of an exponent. `crossing` is the n, with all else as there, from which on a term
    of n² takes more than one of n; None where the law has not one of each.
    """

    impl: str
    workload: str
    same: str
    points: tuple[Mapping[str, float], ...]
    time_us: tuple[Uncertain, ...]
    predicted_us: tuple[float, ...]
    at_largest: int
    shares: Mapping[str, Uncertain]
    along_n: tuple[float, ...]
    shares_along: tuple[Mapping[str, float], ...]
    held_out: float
    cells: tuple[Cell, ...]
    crossing: Uncertain | None = None
    finding: LawFinding | None = None
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Everything found in a run about how cost grows.

    `missing` are the cells that keep findings open, that which is known worst for its purpose
    first.
    """

    exponents: tuple[ExponentFit, ...] = ()
    exact: tuple[ExactFit, ...] = ()
    models: tuple[ModelFit, ...] = ()
    problems: tuple[LawFinding, ...] = ()  # why nothing could be asked at all
    missing: tuple[Cell, ...] = ()

    @property
    def findings(self) -> tuple[LawFinding, ...]:
        """Every verdict: what needs no statistics first."""
        fits: tuple[ExactFit | ExponentFit | ModelFit, ...]
        fits = (*self.exact, *self.exponents, *self.models)
        return (*(fit.finding for fit in fits if fit.finding is not None), *self.problems)


def grows(fits: Iterable[ExponentFit]) -> str:
    """How time grows in n, in a sentence: the fastest's exponent, and which hold to their law.

    Of the cases and the law that most fits are of; empty where none has an exponent.
    """
    groups: dict[tuple[str, str], list[ExponentFit]] = {}
    for fit in fits:
        if fit.series.axis == "n" and fit.exponent and fit.finding:
            groups.setdefault((fit.series.same, fit.finding.law), []).append(fit)
    if not groups:
        return ""
    (_, law), of = max(groups.items(), key=lambda item: len(item[1]))
    of.sort(key=lambda fit: fit.time_us[-1].value)
    names: dict[str, dict[str, None]] = {}
    for fit in of:
        assert fit.finding is not None
        names.setdefault(fit.finding.verdict, {})[fit.series.impl] = None
    first = next((f for f in of if f.finding and f.finding.verdict == "holds"), of[0])
    assert first.exponent is not None
    low, high = first.exponent.ends
    start = next(n for n, why in zip(first.series.sizes, first.left_out, strict=True) if not why)
    power = f"n^{first.exponent.value:.2f} [{low:.2f}–{high:.2f}] from n = {plain_size(start)} on"
    words = {"holds": "holds", "refuted": "is refuted", "inconclusive": "is undecided"}
    said = [f"{text} ({', '.join(names[v])})" for v, text in words.items() if v in names]
    return f"The time of {first.series.impl} grows as {power}: {law} {', '.join(said)}."
