"""What a run counted (FLOPs, bytes), told apart into terms without error: nothing here is noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.claims.claim import Answer, LackingError
from attnbench.claims.exact import said
from attnbench.schema.case import Case
from attnbench.schema.finding import Figure
from attnbench.schema.record import Record

ABSENT = 1e-6  # the share of a term that only rounding gave a coefficient
EXACT = 1e-3  # counts are whole numbers; integer division by tokens leaves this at most
Terms = Mapping[str, Callable[[Case], float]]


def alike(records: Sequence[Record]) -> list[Record]:
    """The records of the most common dtype, G/H and V/D: a coefficient has one value for them."""

    def shape(record: Record) -> tuple[str, float, float]:
        case = record.cell.case
        return case.dtype, case.kv_heads / case.heads, case.value_dim / case.head_dim

    [(commonest, _)] = Counter(map(shape, records)).most_common(1)
    return [record for record in records if shape(record) == commonest]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Σ coefficient · term; `residual` is the largest relative deviation, `shares` at the top n."""

    coefficients: Mapping[str, float]
    shares: Mapping[str, float]
    residual: float

    @property
    def text(self) -> str:
        """As `8 n d^2 + 4 n^2 d`, without terms that are not there."""
        named = {n: value for n, value in self.coefficients.items() if abs(self.shares[n]) > ABSENT}
        parts = [f"{value:.3g} {name}" for name, value in named.items()]
        return " + ".join(parts).replace("+ -", "− ")

    def figures(self, unit: str) -> dict[str, Figure]:
        """Coefficients and shares by the names of the terms."""
        found: dict[str, Figure] = {f"{unit} per {n}": v for n, v in self.coefficients.items()}
        found |= {f"share of {name}": value for name, value in self.shares.items()}
        return found | {"largest_residual": self.residual}


def split(records: Sequence[Record], metric: str, terms: Terms) -> Split:
    """Least squares of relative error; exact where the terms are those that the metric has.

    Raises:
        LackingError: too few cells with a value, or sizes that do not tell the terms apart.
    """
    known = [r for r in records if r.metrics.get(metric)]
    values = np.array([float(r.metrics[metric]) for r in known])
    table = np.array([[term(r.cell.case) for term in terms.values()] for r in known])
    if len(known) <= len(terms):
        raise LackingError(f"{len(known)} cells with {metric} are too few for {len(terms)} terms")
    relative = table / values[:, None]
    scale = np.abs(relative).max(axis=0)
    if np.linalg.matrix_rank(relative / scale, tol=1e-6) < len(terms):
        raise LackingError(f"sizes do not vary enough to tell {', '.join(terms)} apart")
    found = np.linalg.lstsq(relative / scale, np.ones(len(known)), rcond=None)[0] / scale
    top = max(range(len(known)), key=lambda i: known[i].cell.case.seq_len)
    return Split(
        coefficients=dict(zip(terms, map(float, found), strict=True)),
        shares=dict(zip(terms, map(float, relative[top] * found), strict=True)),
        residual=float(np.abs(relative @ found - 1).max()),
    )


def is_sum_of(found: Split, unit: str, *, tolerance: float = EXACT) -> Answer:
    """Holds where the terms explain every count, and none is missing or negative."""
    present = all(value > 0 for value in found.coefficients.values())
    reason = f"{unit} = {found.text}, with a residual of {100 * found.residual:.2g} %"
    return said(present and found.residual <= tolerance, reason, **found.figures(unit))
