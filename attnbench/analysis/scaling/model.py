"""Models of several terms: what a call's time is made of, where n and d vary together."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench.analysis.scaling.measured import Measured
from attnbench.analysis.scaling.model_cells import Cells, groups
from attnbench.analysis.scaling.model_figures import (
    as_figures,
    heads_cost,
    overtakes_n,
    overtakes_theory,
    predicted,
    rates,
    share_name,
    shares,
    shares_at_largest,
)
from attnbench.analysis.scaling.model_fit import fit
from attnbench.analysis.scaling.model_terms import Array, design
from attnbench.analysis.scaling.model_verdict import judge
from attnbench.analysis.scaling.results import ModelFit
from attnbench.execution.store import Run
from attnbench.schema.finding import Figure


def models(run: Run, cells: list[Measured] | None = None) -> tuple[ModelFit, ...]:
    """A model for each implementation and each set of cells in which n and d vary together.

    Cells share all but n, d, heads and batch. At least six, with two n and two d; with fewer
    there is no model. Times that are not numbers above 0, and suspect ones, are left out. `cells`
    are those of the run where they are known already.
    """
    return tuple(_model(alike) for alike in groups(run, cells))


def _model(cells: Cells) -> ModelFit:
    found = fit(cells)
    kept = np.flatnonzero(found.coefficients > 0).tolist()
    names = tuple(cells.terms[i].name for i in kept)
    along = _along(cells)
    rows = design(cells.terms, along)
    parts, _ = shares(cells, found, rows)
    at_largest = shares_at_largest(cells, found)
    crossing, theory = overtakes_n(cells, found), overtakes_theory(cells)
    told: dict[str, Any] = {
        "held_out": found.held_out,
        "spread": found.spread,
        "overtakes_n_theory": theory,
        **as_figures("overtakes_n", crossing),
        **rates(cells, found),
        **heads_cost(cells, found),
    }
    for name, share in at_largest.items():
        told |= as_figures(share_name(name), share)
    figures: dict[str, Figure] = {k: v for k, v in told.items() if v is not None}
    return ModelFit(
        impl=cells.impl,
        workload=cells.cases[0].workload,
        same=cells.same,
        terms=names,
        coefficients=tuple(found.coefficients[kept].tolist()),
        points=cells.points,
        time_us=cells.estimates_us,
        predicted_us=predicted(found, cells.design),
        shares=at_largest,
        along_n=tuple(along["n"].tolist()),
        shares_along=tuple(dict(zip(names, row[kept].tolist(), strict=True)) for row in parts),
        along_predicted_us=predicted(found, rows),
        held_out=found.held_out,
        overtakes_n=crossing,
        overtakes_theory=theory,
        figures=figures,
        finding=judge(cells, found, figures),
    )


def _along(cells: Cells) -> dict[str, Array]:
    """Every n of the cells, with all else as at the largest."""
    at = cells.at_largest
    n = np.unique(cells.sizes["n"])
    fixed = {name: np.full_like(n, values[at]) for name, values in cells.sizes.items()}
    window = cells.cases[at].mask.before
    return fixed | {"n": n, "w": n if window is None else np.minimum(n, window + 1.0)}
