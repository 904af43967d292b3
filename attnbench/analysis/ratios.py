"""Each cell of a run against the baseline, and against the fastest of its case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnbench.analysis.columns import TableRow
from attnbench.analysis.pairs import CellTimes, core_times, paired, step_times, unpaired
from attnbench.base import units
from attnbench.base.registry import require
from attnbench.store.runs import Run

PREFERRED = ("naive", "sdpa")  # as the baseline, where they ran


def baseline_of(run: Run, name: str | None = None) -> str:
    """The baseline: `name`, else that of the sweep, else naive or sdpa if timed, else the first.

    Raises:
        UnknownNameError: the run has no implementation of that name.
    """
    known = dict.fromkeys(cell.impl for cell in (*run.cells, *(r.cell for r in run.records)))
    if name := name or run.info.get("baseline"):
        require("implementation", [name], known, "--baseline")
        return name
    timed = [record.cell.impl for record in run.records if record.samples]
    return next((each for each in (*PREFERRED, *timed) if each in timed), next(iter(known), ""))


def set_ratios(rows: Sequence[TableRow], baseline: str) -> list[TableRow]:
    """Fill in the `ratios` of each row; return the rows best first within case and device model.

    `speedup` is the baseline's time / that of the row, `behind` the row's time / that of the first
    row whose time can be right, `core_share` and `step_share` the time of a layer's attention /
    that of the layer, or of its part of the step. Rows are
    in the order of `speedup` where all that have a time have one, else of their times; those
    without a time come last.
    """
    cases: dict[tuple[str, Any], list[TableRow]] = {}
    for row in rows:
        place = row.record.cell.case.case_id, row.environment.get("device_name")
        cases.setdefault(place, []).append(row)
    found: list[TableRow] = []
    for own in cases.values():
        base = next((row for row in own if row.record.cell.impl == baseline), None)
        for row in own:
            row.ratios = {"baseline": baseline or None, **_speedup(row, base, baseline)}
        timed = [row for row in own if row.times]
        by_speedup = all(row.ratios.get("speedup") for row in timed)
        timed.sort(key=lambda r: -r.ratios["speedup"] if by_speedup else r.time_us or 0.0)
        leader = next((row for row in timed if not row.suspect), None)
        for row in timed:
            if row.times and (alone := core_times(row.record)):
                row.ratios |= _ratio("core_share", alone, row.times)[0]
                if step := step_times(row.record):
                    row.ratios |= _ratio("step_share", alone, step)[0]
            if leader and leader.times and row.times:
                row.ratios |= _ratio("behind", row.times, leader.times)[0]
        found += [*timed, *(row for row in own if not row.times)]
    return found


def _speedup(row: TableRow, base: TableRow | None, baseline: str) -> dict[str, Any]:
    if row.times is None:
        return {"speedup_reason": "no time"}
    if base is None:
        return {"speedup_reason": f"{baseline} was not measured on this case and device model"}
    if base.times is None:
        return {"speedup_reason": f"{baseline}: {base.record.status}, {base.record.reason}"}
    found, source = _ratio("speedup", base.times, row.times)
    if base is row:
        return {**found, "speedup_reason": "the baseline itself"}
    rounds = len(base.times.rounds_us.keys() & row.times.rounds_us.keys())
    found["speedup_source"] = source
    low, high = found["speedup_low"], found["speedup_high"]
    quotient = base.times.time_us / row.times.time_us
    if low is not None and not low <= quotient <= high:
        found["speedup_reason"] = (
            f"the two times give {units.ratio(quotient)}: they rest on all samples, the ratio on"
            f" the {rounds} rounds that both were timed in"
        )
    return found


def _ratio(name: str, above: CellTimes, below: CellTimes) -> tuple[dict[str, Any], str]:
    """`above` / `below` and its interval under this name, and its source; of one by itself 1."""
    pair = (1.0, None) if above is below else paired(above, below)
    value, interval = pair or unpaired(above, below)
    low, high = interval or (None, None)
    found = {name: value, f"{name}_low": low, f"{name}_high": high}
    return found, "paired" if pair else "unpaired"
