"""From a run to the cells that one model is fitted to: n and d (or heads) vary, all else is one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnbench.analysis.scaling.labels import kind_words
from attnbench.analysis.scaling.laws import Laws
from attnbench.analysis.scaling.measured import Measured, measured
from attnbench.analysis.scaling.medians import Sets, intervals
from attnbench.analysis.scaling.model_terms import TERMS, Array, Candidate, candidates, design
from attnbench.analysis.scaling.results import Estimate
from attnbench.analysis.times import over_processes
from attnbench.execution.store import Run
from attnbench.schema.case import Case
from attnbench.theory.law import Law
from attnbench.theory.traits import TRAITS

FEWEST_POINTS = 6
FEWEST_SIZES = 2  # of n, and of d


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells of one implementation that one model describes.

    `sizes` has n, d, w, heads and batch at every point; d is the head dim in attention and the
    model width elsewhere, w the window or n where that is smaller. `replicates_us` holds what was
    observed at each point, `times_us` their medians, `interval_us` the low and the high ends
    (2 × m, NaN where there are too few), `between` whether over several processes. `law` is the
    declared law as it turns out in this workload, None where none is declared.
    """

    impl: str
    cases: tuple[Case, ...]
    sizes: dict[str, Array]
    replicates_us: Sets
    times_us: Array
    interval_us: Array
    between: bool
    law: Law | None
    terms: tuple[Candidate, ...]

    @cached_property
    def design(self) -> Array:
        """Each term at each point, m × p."""
        return design(self.terms, self.sizes)

    @property
    def estimates_us(self) -> tuple[Estimate, ...]:
        """The time of each point with its interval, where it has one."""
        rows = zip(self.times_us.tolist(), *self.interval_us.tolist(), strict=True)
        return tuple(
            Estimate(value=value, low=low, high=high) if low == low else Estimate(value=value)
            for value, low, high in rows
        )

    @cached_property
    def points(self) -> tuple[dict[str, float], ...]:
        """n, d, heads and batch of each point."""
        names = ("n", "d", "heads", "batch")
        rows = zip(*(self.sizes[name].tolist() for name in names), strict=True)
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    @property
    def same(self) -> str:
        """What the cells share: `layer forward float32 causal fused`."""
        case = self.cases[0]
        parts = [case.workload, case.pass_, case.dtype, *kind_words(case)]
        if case.kv_heads != case.heads:
            parts.append(f"H/G={case.heads / case.kv_heads:g}")
        if case.value_dim != case.head_dim:
            parts.append(f"V/D={case.value_dim / case.head_dim:g}")
        return " ".join(parts)

    @cached_property
    def at_largest(self) -> int:
        """The point that shares are told of: of the largest n, where most n were measured.

        Ties go to the most heads at most width, so that the most work is described.
        """
        n = self.sizes["n"]
        series = list(zip(*(self.sizes[k].tolist() for k in ("batch", "heads", "d")), strict=True))
        counts: dict[Any, int] = {}
        for key in series:
            counts[key] = counts.get(key, 0) + 1
        last = np.flatnonzero(n == n.max()).tolist()
        return max(last, key=lambda i: (counts[series[i]], series[i]))


def groups(run: Run, cells: list[Measured] | None = None) -> list[Cells]:
    """The cells of the run by implementation and by all that is neither n, d, heads nor batch.

    Left out are cells without a time, or with a suspect one, and those whose key/value length is
    not their sequence length, which is another problem. A group needs six points, two n and two d.
    A workload that has no row of terms has no model.
    """
    laws = Laws(run)
    found: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in measured(run) if cells is None else cells:
        case = cell.record.cell.case
        if cell.times_us and case.workload in TERMS and _plain(case):
            found.setdefault((cell.kind, *_ratios(case)), []).append(cell)
    return [_cells(alike, laws) for alike in found.values() if _varied(alike)]


def _plain(case: Case) -> bool:
    return case.kv_len == case.seq_len or "kv_lens" not in TRAITS.get(case.workload).axes


def _ratios(case: Case) -> tuple[float, ...]:
    """Followers by their ratio to what they follow: the cells of one model share them."""
    return (
        case.heads / case.kv_heads, case.value_dim / case.head_dim,
        case.width / (case.heads * case.head_dim) if case.width else 1.0,
    )  # fmt: skip


def _d(case: Case) -> int:
    return int(getattr(case, TERMS[case.workload].d))


def _varied(alike: list[Measured]) -> bool:
    cases = [cell.record.cell.case for cell in alike]
    points = {(case.seq_len, case.heads, _d(case), case.batch) for case in cases}
    n, d = {point[0] for point in points}, {point[2] for point in points}
    return len(points) >= FEWEST_POINTS and min(len(n), len(d)) >= FEWEST_SIZES


def _cells(alike: list[Measured], laws: Laws) -> Cells:
    impl = alike[0].record.cell.impl
    cases = tuple(cell.record.cell.case for cell in alike)
    before = cases[0].mask.before
    replicates = Sets([cell.times_us for cell in alike])
    middle, low, high = intervals(replicates)
    n = _array(case.seq_len for case in cases)
    sizes = {
        "n": n,
        "d": _array(_d(case) for case in cases),
        "w": n if before is None else np.minimum(n, before + 1.0),
        "heads": _array(case.heads for case in cases),
        "batch": _array(case.batch for case in cases),
    }
    return Cells(
        impl=impl,
        cases=cases,
        sizes=sizes,
        replicates_us=replicates,
        times_us=middle,
        interval_us=np.stack([low, high]),
        between=all(over_processes(cell.record) for cell in alike),
        law=laws.time(impl, cases[0]),
        terms=candidates(cases[0].workload, window=before is not None),
    )


def _array(values: Iterable[float]) -> Array:
    return np.array(list(values), dtype=float)
