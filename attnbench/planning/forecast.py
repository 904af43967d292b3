"""How long cells will take: by what others took on the same machine, or by their sizes alone."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from attnbench.base import units
from attnbench.base.sample import SETTLED_CALLS
from attnbench.planning.plan import GROUPS_PER_JOB, Job, Plan
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record
from attnbench.theory import costs
from attnbench.theory.traits import work

# `make validate PART=forecasts` prints how far off these are.
_SWEEP_S, _PROCESS_S, _CELL_S = 3.6, 0.3, 0.08  # that each takes besides
# Of calls FLOP/s of a thread, byte/s, seconds of a step; FLOP/s of the float64 reference.
_SPEEDS = {"cpu": (6e10, 1e10, 5e-5, 5e9), "cuda": (1e14, 1e12, 5e-5, 1e12)}
# What makes cells unlike, as a logarithm: other names of `_kind`, an octave of its numbers.
_NAMES, _OCTAVES = (0.9, 0.7, 0.5, 0.7, 0.2, 1.0, 99.0), (0.5, 0.07, 0.07)
# How far off stages may be, as a logarithm, where the same was measured and where nothing like it
# was, and all of a sweep besides: so that nine of ten sweeps take what their interval says.
SPREAD = {"call": (0.2, 0.9), "reference": (0.2, 0.6), "around": (0.2, 0.4), "samples": (0.4, 0.9)}
_RUN = 0.3
# Where the most is so many times the least, short calls tell more: with samples of such seconds, in
# so many seconds at most, and such a share of the sweep's.
_UNSURE, QUICK, _QUICK_S, _QUICK_SHARE = 3.0, (0.01, 0.03), 3.0, 0.1
Kind = tuple[tuple[object, ...], tuple[int, ...]]
Ends = tuple[float, float]


class Span(NamedTuple):
    """Seconds, and between which they will probably be, the machine being as busy as it was."""

    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        found, low, high = map(units.seconds, self)
        return f"about {found} ({low} to {high})"


def _kind(cell: Cell) -> Kind:
    """What bounds a cell: names, then octaves of threads, FLOPs, and FLOPs a byte."""
    case, flops = cell.case, work(cell.case)
    few = case.workload == "decode" or 8 * case.seq_len < case.kv_len
    names = cell.impl, case.workload, case.pass_, case.dtype, case.mask.name, few, case.device
    return names, tuple(round(math.log2(x)) for x in (case.threads, flops, flops / _bytes(case)))


def _like(one: Kind, other: Kind) -> float:
    """1 of the same kind, nearly 0 of one that says nothing of the other."""
    names = sum(by for by, a, b in zip(_NAMES, one[0], other[0], strict=True) if a != b)
    sizes = sum(by * abs(a - b) for by, a, b in zip(_OCTAVES, one[1], other[1], strict=True))
    return math.exp(-names - sizes)


def _bytes(case: Case) -> int:
    decodes = case.workload == "decode"
    return costs.decode_bytes_min(case) * case.units if decodes else costs.attention_bytes_min(case)


def _by_sizes(case: Case) -> tuple[float, float]:
    """Seconds of a call, by its arithmetic, traffic and steps; of the reference on both draws."""
    rate, bandwidth, step_s, exact_rate = _SPEEDS[case.device]
    flops, steps = 4 * work(case), case.layers * case.units * (1 if case.pass_ == "forward" else 4)
    slow = 3 if (case.device, case.dtype) == ("cpu", "float16") else 1  # computed as float32
    call_s = steps * step_s + slow * (flops / rate / case.threads + _bytes(case) / bandwidth)
    if case.workload == "decode":  # whose reference makes every key
        flops += case.layers * costs.projection_flops(case, case.units, case.total_len)
    return call_s, 0.02 + flops / exact_rate


def _stages(case: Case, call_s: float, timing: Ends) -> tuple[list[float], Ends]:
    """Seconds of reference, all else and samples where a call takes so long; ends of the last.

    These are 12 calls, or 3 that take 20 times the most; cores are timed beside their layers.
    """
    reference_s, beside = _by_sizes(case)[1], 1.5 if case.workload == "layer" else 1.0
    few_s = max(timing[0], call_s * max(3, min(SETTLED_CALLS, 20 * timing[1] / call_s)))
    most_s = max(few_s, timing[1])
    around_s, samples_s = 0.04 + 7 * call_s + 0.3 * reference_s, few_s**0.2 * most_s**0.8
    return [reference_s, around_s, beside * samples_s], (beside * few_s, beside * most_s)


@dataclass
class Forecast:
    """Seconds of cells, the better the more records it has learned of.

    Sizes say how long a call and the reference take, a call how long all else does. How much longer
    others took in each stage is held to be true of a cell as far as it is like them.
    `timing` are the least and the most seconds of samples that were asked for. `needs` are the
    bytes that cells need at least, by their keys, of which `free` are free; None if unknown.
    `limit_s` is what all may take, if that is limited. `rounds` are those that a race will take at
    least: what was sampled beyond them is not learned. `calibrated_s` was spent on calls for this.
    """

    timing: Ends
    needs: dict[tuple[str, str], int | None] = field(default_factory=dict)
    free: int | None = None
    limit_s: float | None = None
    rounds: int | None = None
    learned: int = 0  # cells
    calibrated_s: float = 0.0
    # By kind the sums over cells of how far off each stage was, as a logarithm, and their number.
    sums: dict[Kind, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 5))
    _off: dict[Kind, tuple[list[float], float]] = field(default_factory=dict)
    _shared: dict[object, list[Kind]] = field(default_factory=dict)  # whose reference is one

    def learn(self, record: Record, timing: tuple[float, float] | None = None) -> None:
        """Take in what a cell took; `timing` is that of its run, where it is another."""
        if record.status != "ok" or not record.spent_s:
            return
        self.learned += 1
        self._off.clear()
        case, spent_s, count = record.cell.case, Counter(record.spent_s), len(record.samples)
        together = self._shared.setdefault((case, record.metrics.get("group")), [])
        for other in together:
            self.sums[other][1] += math.log1p(1 / len(together))
        together.append(_kind(record.cell))
        reference_s = spent_s["reference"] * len(together)
        parts_s = sum(spent_s[name] for name in ("core", "mlp", "head"))
        samples_s = spent_s["samples"] * min(1.0, (self.rounds or count) / count) + parts_s
        around_s = sum(spent_s.values()) - spent_s["reference"] - spent_s["samples"] - parts_s
        call_s = statistics.median(sample.e2e_us for sample in record.kept) * case.units * 1e-6
        expected_s = [_by_sizes(case)[0], *_stages(case, call_s, timing or self.timing)[0]]
        took_s = [call_s, reference_s, around_s, samples_s]
        offs = [math.log(x / y) if x > 0 else 0.0 for x, y in zip(took_s, expected_s, strict=True)]
        sums = self.sums[together[-1]]
        sums[:] = [a + b for a, b in zip(sums, [*offs, 1], strict=True)]

    def off(self, kind: Kind) -> tuple[list[float], float]:
        """How far off sizes are in each stage, and how like the nearest is that says so."""
        if kind not in self._off:
            known = [(_like(kind, other), sums) for other, sums in self.sums.items()]
            likest = max([like for like, _ in known], default=0.0)
            total = [sum(like**4 * sums[i] for like, sums in known) for i in range(5)]
            self._off[kind] = [likest * x / (total[-1] or 1.0) for x in total[:-1]], likest
        return self._off[kind]

    def of(self, cell: Cell, share: float = 1.0) -> Span:
        """Seconds of a cell with a `share` of its case's reference; its stages err together."""
        (offs, like), (call_s, _), found = self.off(_kind(cell)), _by_sizes(cell.case), []
        for side in (0, -1, 1):
            errs = [side * (like * near + (1 - like) * far) for near, far in SPREAD.values()]
            call, *by = [math.exp(off + err) for off, err in zip(offs, errs, strict=True)]
            stages, (few_s, most_s) = _stages(cell.case, call * call_s, self.timing)
            reference_s, around_s, samples_s = (x * y for x, y in zip(stages, by, strict=True))
            samples_s = min(most_s, max(few_s, samples_s))
            found.append(_CELL_S + share * reference_s + around_s + samples_s)
        return Span(*found)

    def too_large(self, cell: Cell) -> bool:
        """Whether the cell needs more memory than is free, so that it will be skipped."""
        return self.free is not None and (self.needs.get(cell.key) or 0) > self.free

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Of all these that fit, without start-up."""
        return sum(span.seconds for span in self._spans(cells))

    def total(self, cells: Iterable[Cell]) -> Span:
        """Of all these that fit, start-up included. Errors do not cancel: cells are much alike."""
        spans = self._spans(cells)
        begun_s = _SWEEP_S + self.calibrated_s + _PROCESS_S * len(spans) / GROUPS_PER_JOB
        seconds, low, high = (begun_s + sum(x) for x in zip(*spans, Span(0, 0, 0), strict=True))
        return Span(seconds, low / math.exp(_RUN), high * math.exp(_RUN))

    def _spans(self, cells: Iterable[Cell]) -> list[Span]:
        fit = [cell for cell in cells if not self.too_large(cell)]
        beside = Counter(case for case, _ in {(cell.case, cell.impl) for cell in fit})
        return [self.of(cell, 1 / beside[cell.case]) for cell in fit]

    def calibration(self, cells: Iterable[Cell]) -> tuple[Job, float] | None:
        """What would tell most of these, the case that may take longest, cut short to two sizes.

        And its most seconds. None where the forecast is sure enough.
        """
        fit = sorted((c for c in cells if not self.too_large(c)), key=lambda c: self.of(c).high)
        total, quick, groups = self.total(fit), replace(self, timing=QUICK), []
        if total.high < _UNSURE * total.low:
            return None
        limit_s, small = min(_QUICK_S, _QUICK_SHARE * total.seconds), fit[-1].case
        names = tuple({cell.impl: None for cell in fit if cell.case == small})
        for share in (0.4, 0.1):
            while small.kv_len > 16 and share * limit_s < quick.seconds(
                Cell(case=small, impl=name) for name in names
            ):
                n, s = max(1, small.seq_len // 2), small.kv_len // 2
                small = replace(small, batch=1, seq_len=n, kv_len=s)
            groups.append(((small, names),))
        return Job(groups=tuple(dict.fromkeys(reversed(groups)))), limit_s


def balanced(jobs: Iterable[Job], forecast: Forecast, left_s: Callable[[], float]) -> Iterator[Job]:
    """Groups as jobs of their own that each will end within `left_s()`, when it is asked for.

    Wherever the sequence ends all axes had their share: cases that differ in more than their sizes
    get the same time, by a forecast that learns meanwhile, and of their sizes the smallest comes
    first, then the middle one, the quarters, and so on.
    """
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        for group in job.groups:
            case = group[0][0]
            key = case.workload, case.pass_, case.dtype, case.threads, case.mask.text
            alike.setdefault(key, []).append(replace(job, groups=(group,)))
    queue = [(0.0, number, _halved(own)) for number, own in enumerate(alike.values())]
    too_long = []

    while queue:
        spent_s, number, own = heapq.heappop(queue)
        left = left_s()
        soon = next((job for job in own if forecast.seconds(job.cells()) <= left), None)
        if soon is None:
            too_long.append((spent_s, number, own))
            continue
        own.remove(soon)
        yield soon
        # Once more is known, what seemed too long may not be.
        queue += [(spent_s + forecast.seconds(soon.cells()), number, own)] * bool(own) + too_long
        too_long.clear()
        heapq.heapify(queue)


def within(plan: Plan, forecast: Forecast, limit_s: float) -> Plan:
    """The plan with the jobs alone that a sweep of `limit_s` seconds will probably measure."""
    left_s, kept = [limit_s - _SWEEP_S], []
    for job in balanced(plan.jobs, forecast, lambda: left_s[0]):
        left_s[0] -= forecast.seconds(job.cells())
        kept.append(job)
    return replace(plan, jobs=tuple(kept))


def _halved(jobs: list[Job]) -> list[Job]:
    """By their work in the order 0, 1/2, 1/4, 3/4, …: van der Corput's, in base 2."""
    ordered = sorted(jobs, key=lambda job: work(job.groups[0][0][0]))
    bits = len(jobs).bit_length()
    return [ordered[i] for i in sorted(range(len(jobs)), key=lambda i: f"{i:0{bits}b}"[::-1])]
