"""From the outcomes of all runs to plain figures: spread, seconds needed, bias, estimators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from attnbench.base.stats import median
from tests.validation.timer.candidates import CANDIDATES, Candidate
from tests.validation.timer.experiment import Experiment, Outcome
from tests.validation.timer.programs import PROGRAMS, READINGS, Reading
from tests.validation.timer.raw import Raw, turns
from tests.validation.timer.spread import curve, mad_cv, p95_deviation, seconds_needed

Figures = dict[str, Any]
_FEWEST = 2  # runs that give a spread


def summarise(experiment: Experiment, spin: tuple[str, float] | None) -> Figures:
    """Everything in `summary.json` but the machine; unknown is None.

    `spin` is the cell whose length (µs) is known: it takes no part in the spread.
    """
    names = [cell["name"] for cell in experiment.launch.cells]
    cells = [name for name in names if spin is None or name != spin[0]]
    readings = [reading for reading in READINGS if reading.program in experiment.programs]
    rows = [_row(reading, experiment, cells, spin) for reading in readings]
    return {
        "cells": cells,
        "spin": {"cell": spin[0], "known_us": spin[1]} if spin else None,
        "runs": experiment.runs,
        "budget_s": experiment.budget_s,
        "interrupted": experiment.interrupted,
        "tools": experiment.facts,
        "stretch": {name: pilot.stretch for name, pilot in experiment.pilots.items()},
        "rows": rows,
        "factors": factors(rows),
        "estimators": _estimators(experiment, cells, spin),
    }


def _row(
    reading: Reading, experiment: Experiment, cells: list[str], spin: tuple[str, float] | None
) -> Figures:
    all_runs = [outcome for outcome in experiment.outcomes if outcome.program == reading.program]
    good = [outcome for outcome in all_runs if outcome.failure is None]
    by_cell = {name: _of_cell(reading, _raws(good, name)) for name in cells}
    return {
        "label": reading.label,
        "program": reading.program,
        "ours": reading.ours,
        "runs": len(good),
        "problems": _problems(reading.program, experiment, all_runs),
        "seconds": _middle([outcome.total_s for outcome in good]),
        "startup_s": _middle([outcome.startup_s for outcome in good]),
        "cells": by_cell,
        "spread": _over_cells([found["cv"] for found in by_cell.values()]),
        "p95": _over_cells([found["p95"] for found in by_cell.values()]),
        "needed": _needed(list(by_cell.values())),
        "bias": _bias(_raws(good, spin[0]), reading.reported_us, spin[1]) if spin else None,
    }


def _raws(outcomes: Iterable[Outcome], cell: str) -> list[list[Raw]]:
    """The raw samples of one cell, by run and process."""
    return [outcome.cells[cell] for outcome in outcomes if cell in outcome.cells]


def _problems(program: str, experiment: Experiment, outcomes: Sequence[Outcome]) -> list[str]:
    """Why runs or cells of a program are missing, each reason once, with how often."""
    if program in experiment.refused:
        return [experiment.refused[program]]
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        told = [f"{cell}: {reason}" for cell, reason in outcome.errors.items()]
        for reason in [outcome.failure] if outcome.failure else told:
            reasons[reason] = reasons.get(reason, 0) + 1
    return [f"{reason} (in {count} of {len(outcomes)} runs)" for reason, count in reasons.items()]


def _of_cell(reading: Reading, runs: list[list[Raw]]) -> Figures:
    """One cell's figures over runs; `needed_s` is None where it is not within at the end.

    `seconds` is how long a run took at most, start-up and this cell alone counted.
    """
    if len(runs) < _FEWEST:
        unknown = dict.fromkeys(("median_us", "cv", "p95", "needed_s", "seconds"))
        return {"runs": len(runs)} | unknown
    reported = [reading.reported_us(raws) for raws in runs]
    target = median(reported)
    needed_s = seconds_needed([curve(reading, raws) for raws in runs], target)
    return {
        "runs": len(runs),
        "median_us": target,
        "cv": mad_cv(reported),
        "p95": p95_deviation(reported),
        "needed_s": _finite(needed_s),
        "seconds": median([sum(raw.ended_s[-1] for raw in raws) for raws in runs]),
    }


def _over_cells(values: Sequence[float | None]) -> Figures:
    known = [value for value in values if value is not None]
    return {"median": _middle(known), "worst": max(known, default=None)}


def _needed(found: list[Figures]) -> Figures:
    """Seconds to come within: the median and the worst cell, None where it does not in time.

    `within` counts the cells that do, `of` those measured; `limit_s` is the time there was.
    """
    measured = [row for row in found if row["seconds"] is not None]
    seconds = [math.inf if row["needed_s"] is None else row["needed_s"] for row in measured]
    return {
        "median": _finite(median(seconds)) if seconds else None,
        "worst": _finite(max(seconds)) if seconds else None,
        "within": sum(value < math.inf for value in seconds),
        "of": len(measured),
        "limit_s": _middle([row["seconds"] for row in measured]),
    }


def _bias(runs: list[list[Raw]], reported: Any, known_us: float) -> Figures | None:
    """Reported / known − 1 over runs: the median, and the one furthest from 0."""
    errors = [reported(raws) / known_us - 1 for raws in runs]
    return {"median": median(errors), "worst": max(errors, key=abs)} if errors else None


def factors(rows: Sequence[Figures]) -> list[Figures]:
    """Each of our rows against the best peer's: spread / the least spread of a peer.

    For the median over cells and for the worst cell, each against the peer that is best in that.
    A factor is None where there is nothing to compare, or the best peer has no spread at all.
    """
    found = []
    for row in rows:
        if not row["ours"]:
            continue
        entry: Figures = {"label": row["label"]}
        for figure, kind in (("spread", "median"), ("spread", "worst"), ("p95", "median")):
            peers = [p for p in rows if not p["ours"] and p[figure][kind] is not None]
            best = min(peers, key=lambda p: p[figure][kind], default=None)
            own = row[figure][kind]
            usable = own is not None and best is not None and best[figure][kind] > 0
            entry[f"{figure}_{kind}"] = {
                "factor": own / best[figure][kind] if usable and best else None,
                "peer": best["label"] if best else None,
            }
        found.append(entry)
    return found


def _estimators(
    experiment: Experiment, cells: list[str], spin: tuple[str, float] | None
) -> list[Figures]:
    """Every candidate on our own raw samples, for each of our programs that gave any."""
    rows = []
    for program in experiment.programs:
        good = [o for o in experiment.outcomes if o.program == program and o.failure is None]
        if not PROGRAMS.get(program).ours or len(good) < _FEWEST:
            continue
        for name, (label, candidate) in CANDIDATES.items():
            values = [[_reported(candidate, raws) for raws in _raws(good, cell)] for cell in cells]
            known = [found for found in values if len(found) >= _FEWEST]

            def reported(raws: list[Raw], candidate: Candidate = candidate) -> float:
                return _reported(candidate, raws)

            rows.append(
                {
                    "program": program,
                    "processes": PROGRAMS.get(program).processes,
                    "name": name,
                    "label": label,
                    "spread": _over_cells([mad_cv(found) for found in known]),
                    "p95": _over_cells([p95_deviation(found) for found in known]),
                    "bias": _bias(_raws(good, spin[0]), reported, spin[1]) if spin else None,
                }
            )
    return rows


def _reported(candidate: Candidate, raws: list[Raw]) -> float:
    return median([candidate(turns(raw)) for raw in raws])


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _finite(value: float) -> float | None:
    return value if value < math.inf else None
