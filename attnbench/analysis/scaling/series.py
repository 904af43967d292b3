"""From a run to series: cells that differ along one axis alone, with law and overhead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from attnbench.analysis import notes, times
from attnbench.analysis.scaling.results import NOTHING_KNOWN, Axis, Series
from attnbench.base.parameters import base_name
from attnbench.base.sample import FULL_SPEED
from attnbench.base.stats import median, robust_least
from attnbench.errors import UsageError
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.schema.finding import Cost
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.law import Law, parse
from attnbench.theory.traits import TRAITS, kind_words

OVERHEAD_CONTEXT = 16  # a decode step after so few tokens is all overhead
_PEAK = "memory_peak_bytes"
_COST_OF: dict[str, Cost] = {"time": "time", "flops_law": "flops", "memory": "workspace"}
MOST_WITH_NOTES = 5000  # cells; notes look at every sample, which takes longer than the fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with the replicates of its time and the ends of what it may be.

    `doubt` says why there are none, or why the time may be anything. `kind` numbers all that makes
    cells alike but their sizes.
    """

    record: Record
    kind: int
    times_us: tuple[float, ...] = ()
    allowed_us: times.Interval | None = None
    doubt: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is a time whose error is bounded."""
        return bool(self.times_us) and self.allowed_us != NOTHING_KNOWN


def measured(run: Run) -> list[Measured]:
    """Every record of the run. Those that failed or are suspect have a doubt and no times."""
    with_notes = len(run.records) <= MOST_WITH_NOTES
    kinds: dict[tuple[Any, ...], int] = {}
    found = []
    for record in run.records:
        case, environment = record.cell.case, run.environment_of(record)
        alike = (
            record.cell.impl, case.workload, case.pass_, case.device, case.dtype, case.mask.text,
            case.position.text, case.projection, case.cache, case.new_tokens, case.query_tokens,
            case.layers, case.scale, case.threads, environment.get("device_name"),
        )  # fmt: skip
        kind = kinds.setdefault(alike, len(kinds))
        times_us, allowed_us, doubt = _times_or_doubt(record, environment)
        if times_us and with_notes and (unsteady := notes.unsteady(record)):
            allowed_us, doubt = NOTHING_KNOWN, f"unsteady ({unsteady})"
        found.append(
            Measured(
                record=record, kind=kind, times_us=times_us, allowed_us=allowed_us, doubt=doubt
            )
        )
    return found


def _times_or_doubt(
    record: Record, environment: dict[str, Any]
) -> tuple[tuple[float, ...], times.Interval | None, str | None]:
    """The replicates of a time, the ends of what it may be, and why there is none."""
    if record.status != "ok":
        return (), None, f"{record.status}: {record.reason}"
    if not times.are_times(times.observations_us(record)):
        return (), None, "not a valid time (0 or NaN)"
    if suspect := times.suspect(record, environment, times.time_us(record)):
        return (), None, f"suspect: {suspect}"
    return (*_replicates_and_ends(record), None)


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


class Laws:
    """Declared laws by implementation; text that cannot be parsed is a problem and no law."""

    def __init__(self, run: Run) -> None:
        rows = run.info.get("implementations") or []
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows if "name" in row}
        self._known: dict[tuple[Any, ...], Law | None] = {}
        self.problems: dict[tuple[str, Cost], str] = {}

    def of(self, impl: str, quantity: Literal["time", "flops", "memory"], case: Case) -> Law | None:
        """How a quantity grows in the case's workload: FLOPs as time unless declared apart.

        They are declared for the masks full and causal; under another it may need less.
        """
        row = self._rows.get(base_name(impl)) or {}
        field: str = quantity
        if quantity == "flops":
            field = "flops_law" if row.get("flops_law") else "time"
        masked = case.mask.name not in ("full", "causal")
        key = impl, field, case.workload, case.cache, case.projection, masked
        if key not in self._known:
            text, law = row.get(field), None
            try:
                core = parse(str(text)) if text else None
            except UsageError as err:
                self.problems[impl, _COST_OF[field]] = f"{field}: {err}"
                core = None
            if core:
                traits = TRAITS.get(case.workload)
                law = (traits.memory if field == "memory" else traits.time)(core, case)
            self._known[key] = replace(law, bound=True) if law and masked else law
        return self._known[key]


def same_text(case: Case, axis: Axis) -> str:
    """As `attention forward B=1 H=2 D=64 float32`: all but what varies along the axis."""
    of_heads, of_dims = ("heads", "heads at fixed width"), ("d", "heads at fixed width")
    own_keys, grouped = case.kv_len != case.seq_len, case.kv_heads != case.heads
    # Each size with the axes along which it varies.
    sizes: list[tuple[str, tuple[str, ...]]] = [
        (f"n={case.seq_len}", ("n",)),
        (f"S={case.kv_len}" * own_keys, ("n",)),
        (f"B={case.batch}", ("batch",)),
    ]
    if TRAITS.get(case.workload).heads:
        sizes += [
            (f"H={case.heads}", of_heads),
            (f"G={case.kv_heads}" * grouped, of_heads),
            (f"D={case.head_dim}", of_dims),
            (f"V={case.value_dim}" * (case.value_dim != case.head_dim), of_dims),
            (f"E={case.width}" if case.width else "", ("d", "heads")),
        ]
    else:
        sizes.append((f"E={case.model_width}", ("d",)))
    words = [case.workload, case.pass_, *(text for text, varies in sizes if axis not in varies)]
    words += [f"H·D={case.heads * case.head_dim}"] if axis == "heads at fixed width" else []
    words += [f"H/G={case.heads // case.kv_heads}"] if axis in of_heads and grouped else []
    words += [case.dtype, *kind_words(case)]
    words += [f"T={case.new_tokens}"] if case.new_tokens else []
    words += [f"scale={case.scale:g}"] if case.scale is not None else []
    return " ".join(filter(None, words))


@dataclass(frozen=True)
class _AxisRule:
    """How series along an axis are made of columns of `_frame`.

    `size` is the column that varies, `fixed` what the cells share beside their kind. A cell is
    taken where all `follow`: what follows the axis must do so. `least` sizes make a series.
    """

    size: str
    fixed: str
    follow: str = ""
    least: int = 3


_RULES: dict[Axis, _AxisRule] = {
    "n": _AxisRule(
        "seq_len", "batch heads kv_heads head_dim value_dim width", "keys_follow", least=2
    ),
    "d": _AxisRule("dim", "batch heads kv_heads seq_len kv_len", "value_follows width_follows"),
    "heads": _AxisRule("heads", "batch group head_dim value_dim seq_len kv_len", "width_follows"),
    "heads at fixed width": _AxisRule(
        "heads", "batch group inner width seq_len kv_len", "value_follows"
    ),
    "batch": _AxisRule("batch", "heads kv_heads head_dim value_dim width seq_len kv_len"),
}


@dataclass(frozen=True, kw_only=True)
class SeriesCells:
    """A series with the cells it comes from, size by size, and that of its overhead."""

    series: Series
    cells: tuple[Measured, ...]
    overhead: Measured | None = None

    @property
    def case(self) -> Case:
        """The case of the smallest size."""
        return self.cells[0].record.cell.case


def all_series(run: Run, laws: Laws, cells: list[Measured]) -> list[SeriesCells]:
    """Every series of a run that could show how cost grows.

    Along n from two sizes on. Along the other axes from three, and once for all else alike: at the
    n that has most sizes, the largest of those, since a small problem shows its overhead. Cells
    that failed or that are suspect have no replicates, and a doubt that says why.
    """
    if not cells:
        return []
    frame = _frame(cells)
    small = defaultdict[tuple[int, ...], list[Measured]](list)
    for cell, is_small in zip(cells, frame["is_overhead"], strict=True):
        if is_small and cell.times_us:
            small[_near(cell)].append(cell)
    found = []
    for axis, rule in _RULES.items():
        for members in _members(frame, axis, rule):
            chosen = [cells[i] for i in members]
            first = chosen[0].record
            here = times.described(run.environment_of(first), first.cell.case.device)
            overhead = _overhead(small[_near(chosen[0])], chosen[0])
            ceilings = limits.ceilings_of(here, first.cell.case.threads)
            series = _series(axis, chosen, overhead, laws, ceilings)
            found.append(SeriesCells(series=series, cells=tuple(chosen), overhead=overhead))
    return found


def _frame(cells: list[Measured]) -> pd.DataFrame:
    """One row a cell: its kind, sizes, and what follows which of them."""
    rows = []
    for cell in cells:
        case = cell.record.cell.case
        rows.append(
            (cell.kind, case.batch, case.heads, case.kv_heads, case.seq_len, case.kv_len,
             case.head_dim, case.value_dim, case.width or 0, case.workload == "decode")
        )  # fmt: skip
    columns = "kind batch heads kv_heads seq_len kv_len head_dim value_dim width decode".split()
    frame = pd.DataFrame(np.array(rows, dtype=np.int64), columns=columns)
    frame["inner"] = frame["heads"] * frame["head_dim"]
    frame["group"] = frame["heads"] // frame["kv_heads"]
    frame["dim"] = np.where(frame["width"] > 0, frame["width"], frame["head_dim"])
    frame["keys_follow"] = frame["kv_len"] == frame["seq_len"]
    frame["value_follows"] = frame["value_dim"] == frame["head_dim"]
    frame["width_follows"] = (frame["width"] == 0) | (frame["width"] == frame["inner"])
    most = np.where(frame["decode"] > 0, OVERHEAD_CONTEXT, 1)
    frame["is_overhead"] = frame[["seq_len", "kv_len"]].max(axis=1) <= most
    return frame


def _members(frame: pd.DataFrame, axis: Axis, rule: _AxisRule) -> Iterator[list[int]]:
    """Row numbers of each series along `axis`, in ascending order of size."""
    rows = frame[~frame["is_overhead"] & frame[rule.follow.split()].all(axis=1)]
    by = ["kind", *rule.fixed.split()]
    grouped = rows.groupby(by, sort=False)
    distinct = grouped[rule.size].transform("nunique")
    kept = rows.assign(series=grouped.ngroup(), distinct=distinct)[distinct >= rule.least]
    if axis != "n":  # of series that differ in n alone, that with most sizes, then the largest n
        ordered = kept.sort_values(["distinct", "seq_len", "kv_len"], kind="stable")
        but_n = [name for name in by if name not in ("seq_len", "kv_len")]
        kept = kept[kept["series"].isin(ordered.groupby(but_n, sort=False)["series"].last())]
    kept = kept.sort_values(["series", rule.size], kind="stable")
    where, series = kept.index.to_numpy(), kept["series"].to_numpy()
    for part in np.split(where, np.flatnonzero(np.diff(series)) + 1):
        if len(part):
            yield part.tolist()


def _near(cell: Measured) -> tuple[int, ...]:
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
    axis: Axis,
    cells: list[Measured],
    overhead: Measured | None,
    laws: Laws,
    ceilings: limits.Ceilings,
) -> Series:
    first = cells[0].record.cell
    metrics = [cell.record.metrics for cell in cells]
    overhead_us = overhead.times_us if overhead else None
    overhead_allowed_us = overhead.allowed_us if overhead else None
    if overhead and not overhead.is_known:  # it is no more than was ever seen
        overhead_allowed_us = 0.0, max(overhead.times_us)
    starts_us = ceilings.starts_us(metrics[0].get("kernel_count"), l2=metrics[0].get("l2"))
    return Series(
        impl=first.impl,
        workload=first.case.workload,
        axis=axis,
        same=same_text(first.case, axis),
        sizes=tuple([_size(cell.record.cell.case, axis) for cell in cells]),
        times_us=tuple([cell.times_us for cell in cells]),
        overhead_us=overhead_us,
        overhead_allowed_us=overhead_allowed_us,
        law=laws.of(first.impl, "time", first.case),
        kernels=tuple([known.get("kernel") for known in metrics]),
        flops=tuple([known.get("flops_executed") for known in metrics]),
        working_set_bytes=tuple(
            [m.get("bytes_min") if m.get(_PEAK) is None else m[_PEAK] for m in metrics]
        ),
        cache_bytes=ceilings.cache_bytes,
        doubts=tuple([cell.doubt for cell in cells]),
        allowed_us=tuple([cell.allowed_us for cell in cells]),
        # Time to start the kernels of the smallest size one after another, per call or token.
        least_overhead_us=starts_us and starts_us / (first.case.new_tokens or 1),
        launch_bound=tuple([times.launch_bound(cell.record) for cell in cells]),
    )


def _size(case: Case, axis: Axis) -> float:
    return float(case.width or case.head_dim if axis == "d" else getattr(case, _RULES[axis].size))
