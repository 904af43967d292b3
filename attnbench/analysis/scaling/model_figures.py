"""What a model says of shares, of heads, and of where a layer's quadratic terms take over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnbench.analysis.scaling.model_cells import Cells
from attnbench.analysis.scaling.model_fit import Fit
from attnbench.analysis.scaling.model_terms import TERMS, Array
from attnbench.analysis.scaling.results import Estimate
from attnbench.schema.case import Case
from attnbench.schema.finding import Figure
from attnbench.theory import costs

_ENDS = (0.025, 0.975)
# A causal mask admits half of the pairs. Any other band has no n at which it overtakes.
_PAIRS_OF_SQUARE = {"full": 1.0, "causal": 0.5}
# The projections' FLOPs of a pass, in those of the forward pass: their backward is two products.
_PROJECTIONS = {"forward": 1.0, "backward": 2.0, "both": 3.0}


def estimate(value: float, draws: Array) -> Estimate:
    """A figure with the 95 % interval of its draws; an end that is not finite is not known."""
    low, high = np.quantile(draws, _ENDS, method="nearest")
    ends = [min(low, value), max(high, value)]
    known = [float(end) if np.isfinite(end) else None for end in ends]
    return Estimate(value=value, low=known[0], high=known[1])


def shares(cells: Cells, fit: Fit, rows: Array) -> tuple[Array, Array]:
    """Each term's part of the modelled time at each row: m × p, and m × p × draws."""
    parts = rows * fit.coefficients
    many = rows[:, :, None] * fit.draws[None, :, :]
    return parts / parts.sum(axis=1, keepdims=True), many / many.sum(axis=1, keepdims=True)


def shares_at_largest(cells: Cells, fit: Fit) -> dict[str, Estimate]:
    """The share of every candidate where `Cells.at_largest` says; 0 for what was left out."""
    at = cells.at_largest
    values, draws = shares(cells, fit, cells.design[at : at + 1])
    return {
        term.name: estimate(float(values[0, i]), draws[0, i]) for i, term in enumerate(cells.terms)
    }


def predicted(fit: Fit, rows: Array) -> tuple[Estimate, ...]:
    """The model's time with a band for one cell: of the fit, and of a cell about the model."""
    values, covariance = rows @ fit.coefficients, np.cov(fit.draws, ddof=0)
    own = np.sqrt(np.maximum(np.einsum("mp,pq,mq->m", rows, covariance, rows), 0.0)) / values
    half = 1.96 * np.hypot(own, fit.spread)
    return tuple(
        Estimate(value=value, low=value / factor, high=value * factor)
        for value, factor in zip(values.tolist(), np.exp(half).tolist(), strict=True)
    )


def overtakes_n(cells: Cells, fit: Fit) -> Estimate | None:
    """The n from which a layer's quadratic terms take more time than its projections, or None.

    Terms linear in n against those in n², at the width and the heads of the largest cell.
    """
    if not _crosses(cells):
        return None
    at = cells.at_largest
    row, n = cells.design[at], cells.sizes["n"][at]
    powers = [term.term.degree("n") for term in cells.terms]
    linear, square = (np.array([power == wanted for power in powers]) for wanted in (1, 2))

    def crossing(coefficients: Array) -> Any:
        parts = coefficients.T * row
        with np.errstate(divide="ignore", invalid="ignore"):
            return parts[..., linear].sum(axis=-1) / parts[..., square].sum(axis=-1) * n

    value = float(crossing(fit.coefficients))
    if not 0 < value < np.inf:
        return None
    return estimate(value, np.nan_to_num(crossing(fit.draws), nan=np.inf, posinf=np.inf))


def overtakes_theory(cells: Cells) -> float | None:
    """Where the FLOPs of attention equal those of the projections: E·(1 + G/H) forward, full.

    Twice that for causal, × 0.8 for the backward pass, × 6/7 for both. None under other masks.
    """
    case = cells.cases[cells.at_largest]
    if not _crosses(cells):
        return None
    projections, pairs = _flops(case)
    return projections / pairs


def _crosses(cells: Cells) -> bool:
    case = cells.cases[0]
    return TERMS[case.workload].overtakes and case.mask.text in _PAIRS_OF_SQUARE


def _flops(case: Case) -> tuple[float, float]:
    """FLOPs of the projections a token, and of attention a token squared, in the case's pass."""
    wide = replace(case, width=case.model_width)
    projections = costs.projection_flops(wide, 1, 1) * _PROJECTIONS[case.pass_]
    return projections, costs.core_flops(case, 1) * _PAIRS_OF_SQUARE[case.mask.text]


def rates(cells: Cells, fit: Fit) -> dict[str, Figure]:
    """The FLOP rates, by the model, of a layer's attention and of its projections at the largest.

    `rate_ratio` is attention's / the projections': by it the crossing in time lies from that in
    FLOPs.
    """
    if not _crosses(cells):
        return {}
    at = cells.at_largest
    parts, n = cells.design[at] * fit.coefficients, float(cells.sizes["n"][at])
    projections, pairs = _flops(cells.cases[at])
    powers = [term.term.degree("n") for term in cells.terms]
    linear_us, square_us = (
        sum(part for part, power in zip(parts.tolist(), powers, strict=True) if power == wanted)
        for wanted in (1, 2)
    )
    if not linear_us or not square_us:
        return {}
    projection_rate, attention_rate = projections * n / linear_us, pairs * n**2 / square_us
    return {
        "projections_gflops": projection_rate / 1e3,
        "attention_gflops": attention_rate / 1e3,
        "rate_ratio": attention_rate / projection_rate,
    }


def heads_cost(cells: Cells, fit: Fit) -> dict[str, Figure]:
    """By how much many heads cost more than few of the same total width, measured and modelled.

    At the largest n at which the run has that, between the fewest and the most heads; {} where it
    has not.
    """
    found: dict[tuple[int, int, int], list[int]] = {}
    for index, case in enumerate(cells.cases):
        key = (case.seq_len, case.heads * case.head_dim, case.batch)
        found.setdefault(key, []).append(index)
    several = {key: rows for key, rows in found.items() if len(rows) > 1}
    if not several:
        return {}
    key = max(several, key=lambda k: (k[0], len(several[k]), k[1], -k[2]))
    by_heads = sorted(several[key], key=lambda index: cells.cases[index].heads)
    few, many = by_heads[0], by_heads[-1]
    rows = cells.design[[few, many]]
    modelled, draws = rows @ fit.coefficients, rows @ fit.draws
    cost = estimate(float(modelled[1] / modelled[0]), draws[1] / draws[0])
    return {
        "heads_few": cells.cases[few].heads,
        "heads_many": cells.cases[many].heads,
        "heads_n": cells.cases[few].seq_len,
        "heads_width": key[1],
        "heads_cost_measured": float(cells.times_us[many] / cells.times_us[few]),
        "heads_cost_model": cost.value,
        "heads_cost_model_low": cost.low,
        "heads_cost_model_high": cost.high,
    }


def as_figures(name: str, found: Estimate | None) -> dict[str, Figure]:
    """An estimate as three figures: `name`, `name_low`, `name_high`; {} for None."""
    if found is None:
        return {}
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def share_name(term: str) -> str:
    """What the share of a term is called among the figures: H n^2 -> share_H_n2."""
    return "share_" + term.replace("^", "").replace(" ", "_")
