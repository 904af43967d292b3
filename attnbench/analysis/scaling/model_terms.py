"""What a model of time is fitted to: the terms that it may be made of, and the cells of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnbench.analysis.scaling.series import Laws, Measured
from attnbench.analysis.scaling.slopes import Floats, Replicates, beyond
from attnbench.analysis.times import over_processes
from attnbench.schema.case import Case
from attnbench.theory.law import Law, Term, parse
from attnbench.theory.traits import TRAITS, kind_words

Bools = NDArray[np.bool_]

OVERHEAD = "floor"  # the name under which runs and claims know the overhead of a call
FEWEST_POINTS = 6
FEWEST_SIZES = 2  # of n, and of d


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A term in n, d and w, times the sizes named in `per` (batch, heads)."""

    name: str
    per: tuple[str, ...] = ()

    @cached_property
    def term(self) -> Term:
        """The powers of n, d and w."""
        return parse("1" if self.name == OVERHEAD else self.name.removeprefix("H ")).terms[0]


_EACH_HEAD = ("batch", "heads")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the model of a workload is made of, beside the overhead.

    `d` is the property of a case that d stands for. Each of the `products` is there by `per`, and
    what is in `once` whatever the batch. H before a name is what each head pays once more, whatever
    its dim: softmax, traffic of the scores. `overtakes` says that terms in n² overtake those of its
    projections at some n.
    """

    d: Literal["head_dim", "model_width"] = "model_width"
    per: tuple[str, ...] = ("batch",)  # the width contains the heads
    products: tuple[str, ...]
    once: tuple[str, ...] = ()
    overtakes: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of all terms that there may be."""
        return OVERHEAD, *self.once, *self.products


_PRODUCTS = ("n d", "n w d", "H n w", "n d^2", "H n^2", "n^2 d")
# A new workload is one row. At n below the window w is n.
TERMS: dict[str, Terms] = {
    "attention": Terms(d="head_dim", per=_EACH_HEAD, products=_PRODUCTS),
    # The weights are read once, however many tokens there are.
    "layer": Terms(products=_PRODUCTS, once=("d^2",), overtakes=True),
    "decode": Terms(products=("d^2", "n d", "w d", "H n", "n d^2", "H n^2", "n^2 d")),
    # A step costs something however narrow the network is: n steps one after another.
    "recurrent": Terms(products=("n d", "n d^2", "n^2 d"), once=("n",)),
}


def candidates(workload: str, *, window: bool) -> tuple[Candidate, ...]:
    """The terms of a workload; what has a w is there under a window alone."""
    row = TERMS[workload]
    found = [Candidate(name=name) for name in (OVERHEAD, *row.once)]
    for name in row.products:
        same = name == "n d" and "n w d" in row.products  # but for a factor, under a window
        if not (same if window else "w" in name):
            per = _EACH_HEAD if name.startswith("H ") else row.per
            found.append(Candidate(name=name, per=per))
    return tuple(found)


def design(terms: Sequence[Candidate], sizes: dict[str, Floats]) -> Floats:
    """Each term at each point, m × p. `sizes` has n, d, w, heads and batch of every point."""
    columns = [
        math.prod((sizes[name] for name in candidate.per), start=_at(candidate.term, sizes))
        for candidate in terms
    ]
    return np.stack(columns, axis=1)


def _at(term: Term, sizes: dict[str, Floats]) -> Floats:
    one = np.ones_like(sizes["n"])
    return math.prod((sizes[name] ** float(power) for name, power in term.powers), start=one)


# The terms of a law.


def carriers(law: Law, terms: Sequence[Candidate]) -> dict[Term, list[int]]:
    """For each term of the law the candidates that stand for it, by index.

    Those of the same power in n (and w) and at most its power in d: n² stands for n²d where the
    softmax outweighs the products, and powers in d are upper bounds, since tiles change with d.
    One that two terms of the law could claim goes to the one that is nearest.
    """
    found: dict[Term, list[int]] = {term: [] for term in law.terms}
    for index, candidate in enumerate(terms):
        owners = [t for t in law.terms if not t.logs and _stands_for(candidate, t)]
        if owners:
            found[min(owners, key=lambda term: term.degree("d"))].append(index)
    return found


def _stands_for(candidate: Candidate, term: Term) -> bool:
    own = candidate.term
    if candidate.name == OVERHEAD or not term.powers:
        return candidate.name == OVERHEAD and not term.powers
    same = all(own.degree(name) == term.degree(name) for name in ("n", "w"))
    return same and own.degree("d") <= term.degree("d")


def surplus(law: Law, terms: Sequence[Candidate]) -> list[int]:
    """Candidates of a higher order than the law: no term of it grows as fast in each variable."""

    def orders(term: Term) -> tuple[Any, ...]:  # a window is at most n
        return term.degree("n"), term.degree("n") + term.degree("w"), term.degree("d")

    def bounds(term: Term, other: Term) -> bool:
        return all(mine >= its for mine, its in zip(orders(term), orders(other), strict=True))

    above = (not any(bounds(term, other.term) for term in law.terms) for other in terms)
    return [index for index, is_above in enumerate(above) if is_above]


def expected_shares(law: Law, sizes: dict[str, Floats]) -> dict[Term, Floats]:
    """Each term's part of the law at every point, each counted once: what theory lets one see."""
    values = {term: _at(term, sizes) for term in law.terms}
    total = sum(values.values())
    return {term: value / total for term, value in values.items()}


# From a run to the cells of a model.


@dataclass(frozen=True, kw_only=True)
class ModelCells:
    """The cells of one implementation that one model describes.

    `sizes` has n, d, w, heads and batch at every point; d is the head dim in attention and the
    model width elsewhere, w the window or n where that is smaller. `replicates_us` holds what was
    observed at each point, `times_us` their medians, `interval_us` the low and the high ends
    (2 × m, NaN where there are too few), `between` whether over several processes. `beyond` are the
    factors (2 × m) by which times may be shorter and longer than that shows. `law` is the
    declared law as it turns out in this workload, None where none is declared.
    """

    impl: str
    cases: tuple[Case, ...]
    sizes: dict[str, Floats]
    replicates_us: Replicates
    times_us: Floats
    interval_us: Floats
    beyond: Floats
    between: bool
    law: Law | None
    terms: tuple[Candidate, ...]

    @cached_property
    def design(self) -> Floats:
        """Each term at each point, m × p."""
        return design(self.terms, self.sizes)

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
        """The point that shares are reported at: of the largest n, where most n were measured.

        Ties go to the most heads at most width, so that the most work is described.
        """
        n = self.sizes["n"]
        series = list(zip(*(self.sizes[k].tolist() for k in ("batch", "heads", "d")), strict=True))
        counts, largest = Counter(series), np.flatnonzero(n == n.max()).tolist()
        return max(largest, key=lambda i: (counts[series[i]], series[i]))


def model_cells(cells: list[Measured], laws: Laws) -> list[ModelCells]:
    """The cells of a run by implementation and by all that is neither n, d, heads nor batch.

    Left out are cells without a time, or with one that may be anything, and those whose key/value
    length is not their sequence length, which is another problem. A group needs six points, two n
    and two d. A workload that has no row of terms has no model.
    """
    found: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in cells:
        case = cell.record.cell.case
        keys_follow = case.kv_len == case.seq_len or "kv_lens" not in TRAITS.get(case.workload).axes
        if cell.is_known and case.workload in TERMS and keys_follow:
            # Followers by their ratio to what they follow: the cells of one model share them.
            width = case.width / (case.heads * case.head_dim) if case.width else 1.0
            ratios = case.heads / case.kv_heads, case.value_dim / case.head_dim, width
            found.setdefault((cell.kind, *ratios), []).append(cell)
    return [
        model
        for model in (_model_cells(alike, laws) for alike in found.values())
        if len({tuple(point.values()) for point in model.points}) >= FEWEST_POINTS
        and min(len(np.unique(model.sizes[name])) for name in ("n", "d")) >= FEWEST_SIZES
    ]


def _model_cells(alike: list[Measured], laws: Laws) -> ModelCells:
    cases = tuple([cell.record.cell.case for cell in alike])
    impl, before = alike[0].record.cell.impl, cases[0].mask.before
    replicates = Replicates([cell.times_us for cell in alike])
    middle, low, high = replicates.intervals()
    *factors, low, high = beyond((middle, low, high), [cell.allowed_us for cell in alike])
    d_of = attrgetter(TERMS[cases[0].workload].d)
    rows = [(case.seq_len, d_of(case), case.heads, case.batch) for case in cases]
    n, d, heads, batch = np.array(rows, dtype=float).T
    w = n if before is None else np.minimum(n, before + 1.0)
    sizes = {"n": n, "d": d, "w": w, "heads": heads, "batch": batch}
    return ModelCells(
        impl=impl,
        cases=cases,
        sizes=sizes,
        replicates_us=replicates,
        times_us=middle,
        interval_us=np.stack([low, high]),
        beyond=np.stack(factors),
        between=all(over_processes(cell.record) for cell in alike),
        law=laws.of(impl, "time", cases[0]),
        terms=candidates(cases[0].workload, window=before is not None),
    )
