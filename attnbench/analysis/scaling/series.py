"""From a run to series: cells that differ along one axis alone, with law and overhead."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal

from attnbench.analysis import notes, times
from attnbench.analysis.pairs import Round, samples_by_round
from attnbench.analysis.scaling.results import NOTHING_KNOWN, NOUNS, Axis, Measured, Series
from attnbench.base.parameters import base_name
from attnbench.base.sample import FULL_SPEED
from attnbench.base.stats import median, robust_least
from attnbench.errors import UsageError
from attnbench.machine import limits
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.finding import Cost
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.law import Law, parse
from attnbench.theory.traits import TRAITS, kind_words, size_words

OVERHEAD_CONTEXT = 16  # a decode step after so few tokens is all overhead
OVERHEAD_OFF = 1.25  # the factor by which that of a few calls may be off
_PEAK = "memory_peak_bytes"
_SIZES = {name for name, axis in AXES.items() if axis.size}
# The fields that vary along the axis of a series.
_VARIED: dict[Axis, tuple[str, ...]] = {
    "n": ("seq_len", "kv_len"),
    "batch": ("batch",),
    "heads": ("heads", "kv_heads", "width"),
    "heads at fixed width": ("heads", "kv_heads", "head_dim", "value_dim"),
    "d": ("head_dim", "value_dim", "width"),
}
_COST_OF: dict[str, Cost] = {"time": "time", "flops_law": "flops", "memory": "workspace"}


def measured(run: Run) -> list[Measured]:
    """Every record of the run. Those that failed or are suspect have a doubt and no times."""
    found = []
    for record in run.records:
        case, environment = record.cell.case, run.environment_of(record)
        alike = {name: v for name, v in case.to_json().items() if name not in _SIZES}
        kind = (record.cell.impl, *alike.values(), environment.get("device_name"))
        known: dict[str, Any] = {"doubt": _doubt(record, environment)}
        if known["doubt"] is None:
            known["times_us"], known["allowed_us"] = _replicates_and_ends(record)
            known["rounds"] = _rounds(record)
            if unsteady := notes.unsteady(record):
                known |= {"allowed_us": NOTHING_KNOWN, "doubt": f"unsteady ({unsteady})"}
        found.append(Measured(record=record, kind=kind, **known))
    return found


def _doubt(record: Record, environment: dict[str, Any]) -> str | None:
    """Why there is no time; None where there is one."""
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    if not times.are_times(times.observations_us(record)):
        return "not a valid time (0 or NaN)"
    suspect = times.suspect(record, environment, times.time_us(record))
    return f"suspect: {suspect}" if suspect else None


def _replicates_and_ends(record: Record) -> tuple[tuple[float, ...], times.Interval | None]:
    """On a CPU the low end alone, and where it would lie on a core at full speed, left alone.

    The sizes of a series meet other states of the machine. The time is no longer than any sample
    took by the wall clock; a slow core took nothing from a call that is no faster at full speed;
    and what one fresh process bounds holds of all.
    """
    if "probe_us" not in record.metrics:
        return tuple(times.observations_us(record)), times.interval_us(record)
    lows, highs, leasts = [], [], []
    full_speed_us = FULL_SPEED * record.metrics["probe_us"]
    for samples in times.by_process(record):
        least, low, _ = times.low_end(record, samples)
        near = [us for s in samples if s.own_us <= FULL_SPEED * least and (us := s.probe_us)]
        leasts.append(least)
        at_full_speed = near and robust_least(near) <= full_speed_us
        lows.append(least if at_full_speed else low)
        highs.append(times.least_wall_us(samples))
    low, high = sorted((max(lows), min(highs)))
    return (min(max(median(leasts), low), high),), (low, high)


def _rounds(record: Record) -> dict[Round, tuple[float, float]]:
    """Time in µs and the core's slowness by round, as `Series` has it; none without a speed."""
    if not (full_us := record.metrics.get("probe_us")):
        return {}
    return {
        place: (sample.own_us, max(1.0, (sample.probe_us or full_us) / full_us))
        for place, sample in samples_by_round(record).items()
    }


class Laws:
    """Declared laws by implementation; text that cannot be parsed is a problem and no law."""

    def __init__(self, run: Run) -> None:
        rows = run.info.get("implementations") or []
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows if "name" in row}
        self.problems: dict[tuple[str, Cost], str] = {}

    def of(self, impl: str, quantity: Literal["time", "flops", "memory"], case: Case) -> Law | None:
        """How a quantity grows in the case's workload: FLOPs as time unless declared apart.

        They are declared for the masks full and causal; under another it may need less.
        """
        row = self._rows.get(base_name(impl)) or {}
        field: str = quantity
        if quantity == "flops":
            field = "flops_law" if row.get("flops_law") else "time"
        if not row.get(field):
            return None
        try:
            core = parse(str(row[field]))
        except UsageError as err:
            self.problems[impl, _COST_OF[field]] = f"{field}: {err}"
            return None
        traits = TRAITS.get(case.workload)
        law = (traits.memory if field == "memory" else traits.time)(core, case)
        return law if case.mask.name in ("full", "causal") else replace(law, bound=True)


def same_text(case: Case, axis: Axis) -> str:
    """As `attention forward B=1 H=2 D=64 float32`: all but what varies along the axis."""
    sizes = size_words(case, _VARIED[axis])
    if case.width and "width" not in _VARIED[axis]:
        sizes.append(f"E={case.width}")
    if axis == "heads at fixed width":
        sizes.append(f"H·D={case.heads * case.head_dim}")
    if "kv_heads" in _VARIED[axis] and case.kv_heads != case.heads:
        sizes.append(f"H/G={case.heads // case.kv_heads}")
    words = [case.workload, case.pass_, *sizes]
    return " ".join([*words, case.dtype, *kind_words(case, minor=True)])


def all_series(run: Run, laws: Laws, cells: list[Measured]) -> list[Series]:
    """Every series of a run that could show how cost grows.

    Along n from two sizes on. Along the other axes from three, and once for all else alike: at the
    n that has most sizes, the largest of those, since a small problem shows its overhead. Cells
    that failed or that are suspect have no replicates, and a doubt that says why.
    """
    small = defaultdict[tuple[Any, ...], list[Measured]](list)
    for cell in cells:
        if _is_overhead(cell.record.cell.case) and cell.times_us:
            small[_near(cell)].append(cell)
    found = []
    for axis in NOUNS:
        for chosen in _members(cells, axis):
            overhead = _overhead(small[_near(chosen[0])], chosen[0])
            found.append(_series(run, axis, chosen, overhead, laws))
    return found


def _is_overhead(case: Case) -> bool:
    return max(case.seq_len, case.kv_len) <= (OVERHEAD_CONTEXT if case.workload == "decode" else 1)


def _members(cells: list[Measured], axis: Axis) -> list[list[Measured]]:
    """The cells of each series along `axis`, in ascending order of size."""
    groups = defaultdict[tuple[Any, ...], list[Measured]](list)
    for cell in cells:
        case = cell.record.cell.case
        shared = _shared(case, axis)
        if shared and not _is_overhead(case):
            lengths = () if axis == "n" else (case.seq_len, case.kv_len)
            groups[(cell.kind, *shared), lengths].append(cell)
    best: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
    for (shared, lengths), group in groups.items():
        group.sort(key=lambda cell: _size(cell.record.cell.case, axis))
        rank = len({_size(cell.record.cell.case, axis) for cell in group}), lengths
        best[shared] = max(rank, best.get(shared, rank))
    least = 2 if axis == "n" else 3
    enough = {shared: lengths for shared, (sizes, lengths) in best.items() if sizes >= least}
    return [group for (shared, lengths), group in groups.items() if enough.get(shared) == lengths]


def _shared(case: Case, axis: Axis) -> tuple[int | None, ...] | None:
    """The sizes but lengths that a series along an axis shares; None where one fails to follow."""
    group, inner = case.heads // case.kv_heads, case.heads * case.head_dim
    heads, dims = (case.heads, case.kv_heads), (case.head_dim, case.value_dim, case.width)
    value_follows, width_follows = case.value_dim == case.head_dim, case.width in (None, inner)
    if axis == "n":
        return (case.batch, *heads, *dims) if case.kv_len == case.seq_len else None
    if axis == "d":
        return (case.batch, *heads) if value_follows and width_follows else None
    if axis == "heads":
        return (case.batch, group, *dims[:2]) if width_follows else None
    if axis == "heads at fixed width":
        return (case.batch, group, inner, case.width) if value_follows else None
    return *heads, *dims


def _near(cell: Measured) -> tuple[Any, ...]:
    """What a cell has in common with others that start as many kernels."""
    case = cell.record.cell.case
    return cell.kind, case.batch, case.heads, case.kv_heads


def _overhead(small: list[Measured], cell: Measured) -> Measured | None:
    """The overhead of the series that begins with the cell.

    `small` are those near it with next to nothing to do: n = 1, or a decode step after a few
    tokens. Of the same sizes but n; else of another head dim. Not of a wider layer: for one token
    it reads more weights.
    """

    def dims(one: Measured) -> tuple[int, int, int]:
        case = one.record.cell.case
        return case.head_dim, case.value_dim, case.width or 0

    same = [one for one in small if dims(one) == dims(cell)]
    first = min(same or small, key=lambda c: (c.record.cell.case.seq_len, dims(c)), default=cell)
    return None if first is cell or dims(first)[2] > dims(cell)[2] else first


def _series(
    run: Run, axis: Axis, cells: list[Measured], overhead: Measured | None, laws: Laws
) -> Series:
    first, metrics = cells[0].record.cell, [cell.record.metrics for cell in cells]
    environment = run.environment_of(cells[0].record)
    ceilings = limits.ceilings_of(environment, first.case.threads)
    overhead_us = overhead.times_us if overhead else None
    overhead_allowed_us = overhead.allowed_us if overhead else None
    if not overhead and (us := metrics[0].get("overhead_us")):  # timed beside the smallest
        overhead_us, overhead_allowed_us = (us,), (us / OVERHEAD_OFF, us * OVERHEAD_OFF)
    if overhead and not overhead.is_known:  # it is no more than was ever seen
        overhead_allowed_us = 0.0, max(overhead.times_us)
    inner = list((environment.get("caches") or {}).items())[1:-1]
    caches = {f"{name} cache": size * first.case.threads for name, size in inner}
    if ceilings.cache_bytes:
        caches["last cache"] = ceilings.cache_bytes
    starts_us = ceilings.starts_us(metrics[0].get("kernel_count"), l2=metrics[0].get("l2"))
    return Series(
        impl=first.impl,
        workload=first.case.workload,
        axis=axis,
        same=same_text(first.case, axis),
        cells=tuple(cells),
        overhead=overhead,
        sizes=tuple([_size(cell.record.cell.case, axis) for cell in cells]),
        times_us=tuple([cell.times_us for cell in cells]),
        overhead_us=overhead_us,
        overhead_allowed_us=overhead_allowed_us,
        law=laws.of(first.impl, "time", first.case),
        kernels=tuple([known.get("kernel") for known in metrics]),
        page_faults_us=tuple([known.get("page_faults_us") for known in metrics]),
        flops=tuple([known.get("flops_executed") for known in metrics]),
        working_set_bytes=tuple(
            [m.get("bytes_min") if m.get(_PEAK) is None else m[_PEAK] for m in metrics]
        ),
        caches_bytes=caches,
        doubts=tuple([cell.doubt for cell in cells]),
        allowed_us=tuple([cell.allowed_us for cell in cells]),
        # Time to start the kernels of the smallest size one after another, per call or token.
        least_overhead_us=starts_us and starts_us / first.case.units,
        launch_bound=tuple([times.launch_bound(cell.record) for cell in cells]),
        rounds=tuple([cell.rounds for cell in cells]),
    )


def _size(case: Case, axis: Axis) -> float:
    if axis == "d":
        return float(case.width or case.head_dim)
    return float({"n": case.seq_len, "batch": case.batch}.get(axis, case.heads))
