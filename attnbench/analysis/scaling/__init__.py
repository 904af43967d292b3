"""How cost grows in a run: exact counts, exponents, models, and what could not be asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnbench.analysis.scaling.exact import exact_fits
from attnbench.analysis.scaling.exponents import fit_many
from attnbench.analysis.scaling.model import models
from attnbench.analysis.scaling.results import ExponentFit, ModelFit, Scaling, Series
from attnbench.analysis.scaling.series import Laws, all_series, measured
from attnbench.base.units import tally
from attnbench.schema.finding import LawFinding
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import Run

ASK = "verify needs three doublings, e.g. --seq-lens 1,128..1024"
NEVER_RAN = ("unsupported", "skipped")


def scaling(run: Run) -> Scaling:
    """Every fit and finding of a run; where nothing can be fitted, a finding says why."""
    laws, cells = Laws(run), measured(run)
    # What never ran takes none of these cases: that is no failure.
    found = [
        series
        for series in all_series(run, laws, cells)
        if any(cell.record.status not in NEVER_RAN for cell in series.cells)
    ]
    known = {series.impl for series in found if any(series.times_us)}
    exact = exact_fits(found, laws)
    exponents = fit_many([series for series in found if series.impl in known])
    modelled = models(cells, laws)
    unreadable = [
        _problem(impl, text, "its law", impl=impl, quantity=quantity)
        for (impl, quantity), text in laws.problems.items()
    ]
    return Scaling(
        exponents=tuple(exponents),
        exact=exact,
        models=tuple(modelled),
        problems=(*unreadable, *_unanswered(run, found)),
        missing=_missing(exponents, modelled),
    )


def _missing(fits: Iterable[ExponentFit], modelled: Iterable[ModelFit]) -> tuple[Cell, ...]:
    """The cells whose times keep findings open, that which is known worst for its purpose first."""
    wanted = [(model.cells[one.index], one) for model in modelled for one in model.missing]
    for fit in fits:
        measured = *fit.series.cells, fit.series.overhead  # the −1st
        wanted += [(m.record.cell, one) for one in fit.missing if (m := measured[one.index])]
    found: dict[Cell, float] = {}
    for cell, one in wanted:
        found[cell] = max(one.known / one.needed, found.get(cell, 0.0))
    return tuple(sorted(found, key=lambda cell: -found[cell]))


def _problem(
    subject: str, reason: str, question: str = "how its cost grows", **of: Any
) -> LawFinding:
    return LawFinding(
        subject=subject, question=question, law="–", verdict="inconclusive", reason=reason, **of
    )


def _unanswered(run: Run, found: list[Series]) -> Iterator[LawFinding]:
    """One line for each implementation without any series."""
    if not run.records:
        yield _problem(run.run_id, f"no record in this run; {ASK}")
    answered = {(one.impl, one.workload) for one in found if any(one.times_us)}
    records_of: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        records_of.setdefault((record.cell.impl, record.cell.case.workload), []).append(record)
    for (impl, workload), records in records_of.items():
        if (impl, workload) not in answered:
            of = {"impl": impl, "workload": workload, "quantity": "time"}
            yield _problem(f"{impl}, {workload}", _why(records), **of)


def _why(records: list[Record]) -> str:
    """Why the records of one implementation and workload make no series along n."""
    sizes = {record.cell.case.seq_len for record in records if record.status == "ok"}
    if not sizes:
        statuses = [record.status for record in records]
        listed = tally(statuses, dict.fromkeys(statuses))
        return f"no cell was measured ({listed}: {records[0].reason})"
    listed = ", ".join(map(str, sorted(sizes)[:8]))
    if len(sizes) == 1:
        return f"one size of n only ({listed}); {ASK}"
    alone = "no two sizes of n with all else the same and a time, beside an overhead"
    return f"{alone} (n = {listed}); {ASK}"
