"""Models of several terms: what a call's time is made of, and the verdict on the declared law."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attnbench.analysis.scaling.decide import Decision
from attnbench.analysis.scaling.model_fit import FEWEST_N, FittedModel, fit
from attnbench.analysis.scaling.model_terms import (
    OVERHEAD,
    TERMS,
    Bools,
    ModelCells,
    carriers,
    design,
    expected_shares,
    model_cells,
    surplus,
)
from attnbench.analysis.scaling.results import (
    Missing,
    ModelFit,
    Uncertain,
    as_figures,
    lacking,
)
from attnbench.analysis.scaling.series import Laws, Measured
from attnbench.analysis.scaling.slopes import Floats, estimates
from attnbench.base import units
from attnbench.schema.finding import Figure, LawFinding, Verdict
from attnbench.schema.record import Cell
from attnbench.theory import costs
from attnbench.theory.law import Law, Term
from attnbench.theory.projections import computed

_ENDS = (0.025, 0.975)
# A causal mask admits half of the pairs. Any other band has no n at which it overtakes.
_PAIRS_OF_SQUARE = {"full": 1.0, "causal": 0.5}
VISIBLE = 0.1  # from this part of the law's terms on, theory expects a term to show
ABSENT = 0.02  # a term that should show and certainly takes less is not there
SURPLUS = 0.1  # what terms of a higher order than the law may take at most
MISSED = 0.2  # a model that misses the held-out n by more describes nothing
SCATTERED = 0.3  # nor one from which cells lie further (root mean square)
KNOWN_WELL = 0.1  # a time may be off by so much beyond its scatter
_MOST_OVERHEAD = 0.5  # where the overhead takes more, no other term need show


def models(cells: list[Measured], laws: Laws) -> tuple[ModelFit, ...]:
    """A model for each implementation and each set of cells as `model_cells` gives them."""
    return tuple(_model(alike) for alike in model_cells(cells, laws))


def _model(cells: ModelCells) -> ModelFit:
    found = fit(cells)
    kept = np.flatnonzero(found.coefficients > 0).tolist()
    names = tuple(cells.terms[i].name for i in kept)
    at, n = cells.at_largest, np.unique(cells.sizes["n"])
    window = cells.cases[at].mask.before
    # Every n, with all else as at the largest.
    along = {name: np.full_like(n, values[at]) for name, values in cells.sizes.items()}
    along |= {"n": n, "w": n if window is None else np.minimum(n, window + 1.0)}
    rows = design(cells.terms, along)
    parts, _ = shares(found, rows)
    values, draws = shares(found, cells.design[at : at + 1])
    at_largest = {
        term.name: _estimate(float(values[0, i]), draws[0, i]) for i, term in enumerate(cells.terms)
    }
    crossing, theory = _overtaking(cells, found)
    model = ModelFit(
        impl=cells.impl,
        workload=cells.cases[0].workload,
        same=cells.same,
        terms=names,
        points=cells.points,
        time_us=tuple(estimates(cells.times_us, *cells.interval_us)),
        predicted_us=predicted(found, cells.design),
        at_largest=at,
        shares=at_largest,
        along_n=tuple(n.tolist()),
        shares_along=tuple(dict(zip(names, row[kept].tolist(), strict=True)) for row in parts),
        along_predicted_us=predicted(found, rows),
        held_out=found.held_out,
        overtakes_n=crossing,
        overtakes_theory=theory,
        cells=tuple(Cell(case=case, impl=cells.impl) for case in cells.cases),
    )
    finding = _judge(cells, found, model)
    if finding is None or finding.verdict != "inconclusive":
        return replace(model, finding=finding)
    missing = tuple(_missing(cells))
    lacks = lacking((_place(cells, one.index), one) for one in missing)
    finding = replace(finding, reason="; ".join(filter(None, (finding.reason, lacks))))
    return replace(model, finding=finding, missing=missing)


def _missing(cells: ModelCells) -> Iterator[Missing]:
    """The cells that may be off by more than what their replicates show, where that is much."""
    known = np.log(cells.beyond).sum(axis=0) / 2
    for index in np.flatnonzero(known > KNOWN_WELL).tolist():
        yield Missing(index=index, known=float(known[index]), needed=KNOWN_WELL)


def _estimate(value: float, draws: Floats) -> Uncertain:
    """A figure with the 95 % interval of its draws; an end that is not finite is not known."""
    low, high = np.quantile(draws, _ENDS, method="nearest")
    ends = [min(low, value), max(high, value)]
    known = [float(end) if np.isfinite(end) else None for end in ends]
    return Uncertain(value=value, low=known[0], high=known[1])


def shares(fit: FittedModel, rows: Floats) -> tuple[Floats, Floats]:
    """Each term's part of the modelled time at each row: m × p, and m × p × draws."""
    parts = rows * fit.coefficients
    many = rows[:, :, None] * fit.draws[None, :, :]
    return parts / parts.sum(axis=1, keepdims=True), many / many.sum(axis=1, keepdims=True)


def predicted(fit: FittedModel, rows: Floats) -> tuple[Uncertain, ...]:
    """The model's time with a band for one cell: of the fit, and of a cell about the model."""
    values, covariance = rows @ fit.coefficients, np.cov(fit.draws, ddof=0)
    own = np.sqrt(np.maximum(np.einsum("mp,pq,mq->m", rows, covariance, rows), 0.0)) / values
    half = 1.96 * np.hypot(own, fit.spread)
    return tuple(
        Uncertain(value=value, low=value / factor, high=value * factor)
        for value, factor in zip(values.tolist(), np.exp(half).tolist(), strict=True)
    )


def _overtaking(cells: ModelCells, fit: FittedModel) -> tuple[Uncertain | None, float | None]:
    """Where a layer's quadratic terms overtake its projections: the n by the model, that by theory.

    By the model: terms linear in n against those in n², at the width and the heads of the largest
    cell. By theory: where the FLOPs of attention equal those of the projections, E·(1 + G/H)
    forward, full; twice that for causal, × 0.8 for the backward pass, × 6/7 for both. None under
    other masks and for other workloads. The two differ by the ratio of the FLOP rates of both.
    """
    at = cells.at_largest
    case = cells.cases[at]
    pairs_of_square = _PAIRS_OF_SQUARE.get(case.mask.text)
    if not TERMS[case.workload].overtakes or pairs_of_square is None:
        return None, None
    # FLOPs of the projections a token, and of attention a token squared, in the case's pass.
    projections = costs.layer_projection_flops(replace(case, seq_len=1, kv_len=1))
    attention = case.layers * costs.core_flops(computed(case), 1) * pairs_of_square
    row, n = cells.design[at], float(cells.sizes["n"][at])
    powers = np.array([int(term.term.degree("n")) for term in cells.terms])

    def times_us(coefficients: Floats) -> tuple[Any, Any]:
        parts = coefficients.T * row
        return parts[..., powers == 1].sum(axis=-1), parts[..., powers == 2].sum(axis=-1)

    linear_us, square_us = map(float, times_us(fit.coefficients))
    theory = projections / attention
    if not linear_us or not square_us:
        return None, theory
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = np.divide(*times_us(fit.draws)) * n
    crossing = _estimate(linear_us / square_us * n, np.nan_to_num(draws, nan=np.inf, posinf=np.inf))
    return crossing, theory


# The verdict: the law's terms are there, and none of a higher order is.


def _judge(cells: ModelCells, fit: FittedModel, model: ModelFit) -> LawFinding | None:
    """The verdict on the declared law; None where none is declared, or one of a single term.

    Refuted where a term that theory makes visible certainly takes less than 2 % of the time
    (a law written O(…) need not reach its terms), or where terms of a higher order than the law
    certainly take more than 10 %. Inconclusive where the sizes cannot tell.
    """
    law = cells.law
    if law is None or len(law.terms) < 2:
        return None
    decisions = list(_obstacles(cells, fit, law)) or list(_decisions(cells, fit, law))
    verdicts: tuple[Verdict, ...] = ("refuted", "inconclusive", "holds")
    verdict = min((verdict for verdict, _ in decisions), key=verdicts.index)
    figures: dict[str, Figure] = {
        "held_out": fit.held_out,
        "spread": fit.spread,
        "overtakes_n_theory": model.overtakes_theory,
        **as_figures("overtakes_n", model.overtakes_n),
    }
    for name, share in model.shares.items():  # as share_H_n2
        figures |= as_figures("share_" + name.replace("^", "").replace(" ", "_"), share)
    return LawFinding(
        subject=f"{cells.impl}, {cells.same}",
        impl=cells.impl,
        workload=model.workload,
        quantity="time",
        question="terms of time",
        law=str(law),
        verdict=verdict,
        reason="; ".join(reason for found, reason in decisions if found == verdict),
        figures={name: value for name, value in figures.items() if value is not None},
    )


def _obstacles(cells: ModelCells, fit: FittedModel, law: Law) -> Iterator[Decision]:
    n = cells.sizes["n"]
    sizes = len(np.unique(n))
    if sizes < FEWEST_N:
        few = "sizes of n are too few to predict one from the others"
        yield "inconclusive", f"{sizes} {few} ({FEWEST_N})"
    if fit.held_out is not None and fit.held_out > MISSED:
        missed = f"the model misses it by {units.percent(fit.held_out)}"
        yield "inconclusive", f"fitted without n = {int(n.max())}, {missed}"
    if fit.spread > SCATTERED:
        yield "inconclusive", f"cells lie {units.percent(fit.spread)} from the model"
    if law.has_logs:
        yield "inconclusive", "a logarithm is no term of the model"
    owners = carriers(law, cells.terms).values()
    for first, second in fit.collinear:
        if not any(first in group and second in group for group in owners):
            names = f"{cells.terms[first].name} and {cells.terms[second].name}"
            yield "inconclusive", f"the sizes measured cannot tell {names} apart"


def _decisions(cells: ModelCells, fit: FittedModel, law: Law) -> Iterator[Decision]:
    _, many = shares(fit, cells.design)
    expected = expected_shares(law, cells.sizes)
    overhead = [term.name for term in cells.terms].index(OVERHEAD)
    small = np.median(many[:, overhead], axis=1) <= _MOST_OVERHEAD
    for term, owned in carriers(law, cells.terms).items():
        if term.powers:  # the overhead of a call is always there
            visible = (expected[term] >= VISIBLE) & small
            yield presence(cells, law, term, many[:, owned].sum(axis=1), expected[term], visible)
    yield _surplus(cells, law, many)


def presence(
    cells: ModelCells, law: Law, term: Term, draws: Floats, expected: Floats, visible: Bools
) -> Decision:
    """Is a term of the law there? `draws` is its share, m × draws, `visible` where it must show."""
    if not visible.any():
        return "inconclusive", f"at no size measured would {term} show beside the rest"
    places = np.flatnonzero(visible)
    low, high = np.quantile(draws[places], _ENDS, axis=1)
    clearest = int(low.argmax()) if low.max() > 0 else int(high.argmax())
    at = int(places[clearest])
    part = _part(low[clearest], high[clearest])
    found = f"{term} takes {part} of the time at {_place(cells, at)}"
    if high.max() >= ABSENT:
        if low[clearest] > 0:
            return "holds", found
        return "inconclusive", f"{found}: it may not be there"
    if law.bound:
        return "holds", f"{term} does not show, which O(…) allows"
    return "refuted", f"{found}, where the law makes it {units.percent(float(expected[at]))}"


def _surplus(cells: ModelCells, law: Law, many: Floats) -> Decision:
    """Do terms of a higher order than the law take time? `many` are shares, m × p × draws."""
    extra = surplus(law, cells.terms)
    if not extra:
        return "holds", "no term of a higher order is among those tried"
    low, high = np.quantile(many[:, extra].sum(axis=1), _ENDS, axis=1)
    at = int(low.argmax()) if low.max() > SURPLUS else int(high.argmax())
    if high[at] <= SURPLUS:
        return "holds", f"terms above the law take {units.percent(float(high[at]))} at most"
    largest = cells.terms[extra[int(many[at, extra].mean(axis=1).argmax())]].name
    part = f"take {_part(low[at], high[at])} of the time at {_place(cells, at)}"
    verdict: Verdict = "refuted" if low[at] > SURPLUS else "inconclusive"
    return verdict, f"terms above the law ({largest}) {part}"


def _part(low: float, high: float) -> str:
    return f"{units.percent(float(low))} to {units.percent(float(high))}"


def _place(cells: ModelCells, index: int) -> str:
    point = cells.points[index]
    return f"n = {point['n']:g}, d = {point['d']:g}"
