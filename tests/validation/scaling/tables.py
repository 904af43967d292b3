"""The confusion matrices as tables, for the terminal and for `scaling.md`."""

from __future__ import annotations

from typing import Any

from attnbench.base import units
from tests.validation.page import Table
from tests.validation.scaling.usual import CURVES

Figures = dict[str, Any]
_VERDICTS = ("holds", "refuted", "inconclusive")
MATRIX_NOTE = (
    "Percent of the draws: holds / refuted / inconclusive. [ ]: the kernel's own law, or a bound"
    " that is right. ~: logarithms leave it open. !: a wrong verdict is among them. Octaves: where"
    " the work is at least twice the floor."
)


def tables(summary: Figures) -> list[Table]:
    """For each range our matrix and the usual rule's, and the totals last."""
    found = []
    for over in dict.fromkeys(row["range"] for row in summary["answers"]):
        found += [_ours(summary, over), _usual(summary, over)]
    return [*found, _totals(summary)]


def _ours(summary: Figures, over: str) -> Table:
    rows = [row for row in summary["answers"] if row["range"] == over]
    laws = tuple(dict.fromkeys(row["law"] for row in rows))
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = {row["law"]: row for row in rows if row["kernel"] == kernel}
        octaves = f"{own[laws[0]]['octaves']:.0f}"
        lines.append((kernel, octaves, *(_cell(own[law]) for law in laws)))
    title = f"Verdicts, n = {over}: kernels by laws"
    return Table(
        title=title, header=("kernel", "octaves", *laws), rows=tuple(lines), note=MATRIX_NOTE
    )


def _cell(row: Figures) -> str:
    draws = sum(row[verdict] for verdict in _VERDICTS)
    text = " / ".join(_share(row[verdict], draws) for verdict in _VERDICTS)
    if row["right"] is None:
        return f"~ {text}"
    opposite = "refuted" if row["right"] == "holds" else "holds"
    marked = f"[{text}]" if row["right"] == "holds" else text
    return f"! {marked}" if row[opposite] else marked


def _share(count: int, draws: int) -> str:
    """Whole percent; never 0 for what happened, never 100 for what did not always."""
    if count in (0, draws):
        return "100" if count else "0"
    return str(min(99, max(1, round(100 * count / draws))))


def _usual(summary: Figures, over: str) -> Table:
    rows = [row for row in summary["usual_rule"] if row["range"] == over]
    lines = [
        (
            row["kernel"],
            *(_share(row["counts"].get(name, 0), sum(row["counts"].values())) for name in CURVES),
        )
        for row in rows
    ]
    return Table(
        title=f"The usual rule, n = {over}: kernels by what it picks",
        header=("kernel", *CURVES),
        rows=tuple(lines),
        note="Percent of the draws. One coefficient, least RMS; it has no way to say that it does"
        " not know.",
    )


def _totals(summary: Figures) -> Table:
    goals = summary["goals"]
    header = ("asked of", "ranges", "verdicts", "wrong", "inconclusive", "goal", "worst")
    rows = [
        (
            row["laws"],
            row["ranges"],
            units.count(row["asked"]),
            units.percent(row["wrong"] / row["asked"]),
            units.percent(row["inconclusive"] / row["asked"]),
            "met" if row["met"] else "MISSED",
            row["worst"] or units.UNKNOWN,
        )
        for row in summary["totals"]
    ]
    note = (
        f"Goals: at most {units.percent(goals['wrong'])} wrong; at most"
        f" {units.percent(goals['inconclusive'])} inconclusive over {goals['octaves']:g} octaves or"
        " more. What logarithms leave open counts as neither."
    )
    return Table(title="Totals", header=header, rows=tuple(rows), note=note)


def facts(summary: Figures) -> list[str]:
    """What was drawn, and how noisy it was."""
    return [
        f"attnbench {summary['attnbench']}, {units.moment(summary['created'])}; {summary['draws']}"
        f" draws of each kernel and range, seed {summary['seed']}.",
        "Imagined kernels of known law, judged by the code that judges runs; nothing is timed.",
        "Noise: observations of a cell scatter lognormally (1.2 % in the middle, 0.3 to 5 % for"
        " nine cells in ten), one in twelve is late by a quarter on average; each process runs each"
        " size 1 to 2 % off. Half of the draws are 7 observations from one process, half the"
        " medians of 3 processes. The floor is measured at n = 1, with the same noise.",
    ]
