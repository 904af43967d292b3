"""The verdict on a law of several terms: they are there, and none of a higher order is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from attnbench.analysis.scaling.model_cells import Cells
from attnbench.analysis.scaling.model_figures import shares
from attnbench.analysis.scaling.model_fit import FEWEST_N, Fit
from attnbench.analysis.scaling.model_terms import (
    FLOOR,
    Array,
    Bools,
    carriers,
    expected_shares,
    surplus,
)
from attnbench.base import units
from attnbench.schema.finding import Figure, Finding, Verdict
from attnbench.theory.law import Law, Term

QUESTION = "terms of time"
VISIBLE = 0.1  # from this part of the law's terms on, theory expects a term to show
ABSENT = 0.02  # a term that should show and certainly takes less is not there
SURPLUS = 0.1  # what terms of a higher order than the law may take at most
MISSED = 0.2  # a model that misses the held-out n by more describes nothing
SCATTERED = 0.3  # nor one from which cells lie further (root mean square)
_MOST_FLOOR = 0.5  # where the floor takes more, no other term need show
_ENDS = (0.025, 0.975)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one check says, with its sentence."""

    verdict: Verdict
    reason: str


def judge(cells: Cells, fit: Fit, figures: Mapping[str, Figure]) -> Finding | None:
    """The verdict on the declared law; None where none is declared, or one of a single term.

    Refuted where a term that theory makes visible certainly takes less than 2 % of the time
    (a law written O(…) need not reach its terms), or where terms of a higher order than the law
    certainly take more than 10 %. Inconclusive where the sizes cannot tell.
    """
    law = cells.law
    if law is None or len(law.terms) < 2:
        return None
    answers = list(_obstacles(cells, fit, law)) or list(_answers(cells, fit, law))
    for verdict in ("refuted", "inconclusive", "holds"):
        reasons = [answer.reason for answer in answers if answer.verdict == verdict]
        if reasons:
            break
    return Finding(
        subject=f"{cells.impl}, {cells.same}",
        question=QUESTION,
        law=str(law),
        verdict=verdict,
        reason="; ".join(reasons),
        figures=figures,
    )


def _obstacles(cells: Cells, fit: Fit, law: Law) -> Iterator[Answer]:
    """Why nothing can be asked of the model."""
    sizes = len(np.unique(cells.sizes["n"]))
    if sizes < FEWEST_N:
        yield _unknown(
            f"{sizes} sizes of n are too few to predict one from the others ({FEWEST_N})"
        )
    if fit.held_out is not None and fit.held_out > MISSED:
        n = int(cells.sizes["n"].max())
        yield _unknown(
            f"fitted without n = {n}, the model misses it by {units.percent(fit.held_out)}"
        )
    if fit.spread > SCATTERED:
        yield _unknown(f"cells lie {units.percent(fit.spread)} from the model")
    if any(term.logs for term in law.terms):
        yield _unknown("a logarithm is no term of the model")
    owners = carriers(law, cells.terms)
    for first, second in fit.twins:
        if not any(first in group and second in group for group in owners.values()):
            names = f"{cells.terms[first].name} and {cells.terms[second].name}"
            yield _unknown(f"the sizes measured cannot tell {names} apart")


def _unknown(reason: str) -> Answer:
    return Answer(verdict="inconclusive", reason=reason)


def _answers(cells: Cells, fit: Fit, law: Law) -> Iterator[Answer]:
    _, many = shares(cells, fit, cells.design)
    expected = expected_shares(law, cells.sizes)
    floor = next(i for i, term in enumerate(cells.terms) if term.name == FLOOR)
    telling = np.median(many[:, floor], axis=1) <= _MOST_FLOOR
    for term, owned in carriers(law, cells.terms).items():
        if term.powers:  # the floor of a call is always there
            yield _presence(cells, law, term, many[:, owned].sum(axis=1), expected[term], telling)
    yield _excess(cells, law, many)


def _presence(
    cells: Cells, law: Law, term: Term, draws: Array, expected: Array, telling: Bools
) -> Answer:
    """Is a term of the law there? `draws` is its share, m × draws."""
    visible = np.flatnonzero((expected >= VISIBLE) & telling)
    if not len(visible):
        return _unknown(f"at no size measured would {term} show beside the rest")
    low, high = np.quantile(draws[visible], _ENDS, axis=1)
    clearest = int(low.argmax()) if low.max() > 0 else int(high.argmax())
    where = _place(cells, int(visible[clearest]))
    part = f"{units.percent(float(low[clearest]))} to {units.percent(float(high[clearest]))}"
    if high.max() >= ABSENT:
        if low[clearest] > 0:
            return Answer(verdict="holds", reason=f"{term} takes {part} of the time at {where}")
        return _unknown(f"{term} takes {part} of the time at {where}: it may not be there")
    if law.bound:
        return Answer(verdict="holds", reason=f"{term} does not show, which O(…) allows")
    share = units.percent(float(expected[visible[clearest]]))
    return Answer(
        verdict="refuted",
        reason=f"{term} takes {part} of the time at {where}, where the law makes it {share}",
    )


def _excess(cells: Cells, law: Law, many: Array) -> Answer:
    """Do terms of a higher order than the law take time? `many` are shares, m × p × draws."""
    extra = surplus(law, cells.terms)
    if not extra:
        return Answer(verdict="holds", reason="no term of a higher order is among those tried")
    draws = many[:, extra].sum(axis=1)
    low, high = np.quantile(draws, _ENDS, axis=1)
    at = int(low.argmax()) if low.max() > SURPLUS else int(high.argmax())
    mean = many[at, extra].mean(axis=1)
    largest = cells.terms[extra[int(mean.argmax())]].name
    part = f"{units.percent(float(low[at]))} to {units.percent(float(high[at]))}"
    told = f"terms above the law ({largest}) take {part} of the time at {_place(cells, at)}"
    if low[at] > SURPLUS:
        return Answer(verdict="refuted", reason=told)
    if high[at] > SURPLUS:
        return _unknown(told)
    most = units.percent(float(high[at]))
    return Answer(verdict="holds", reason=f"terms above the law take {most} at most")


def _place(cells: Cells, index: int) -> str:
    point = cells.points[index]
    return f"n = {point['n']:g}, d = {point['d']:g}"
