"""The comparison as tables: `timer.md`, and the same rows for the terminal."""

from __future__ import annotations

from typing import Any

from attnbench.base import units
from tests.validation.page import Table

Figures = dict[str, Any]


def tables(summary: Figures) -> list[Table]:
    """All tables that have rows."""
    found = [_comparison(summary), _by_cell(summary), _needed_by_cell(summary)]
    return [*(table for table in [*found, _estimators(summary)] if table.rows)]


def sentences(summary: Figures) -> list[str]:
    """What the tables come to, and what is missing from them."""
    said = [sentence for entry in summary["factors"] for sentence in _factor(entry)]
    for row in summary["rows"]:
        said += [f"{row['label']}: {problem}." for problem in row["problems"]]
    if summary["interrupted"]:
        said.append("Interrupted: these are the runs made until then.")
    return said


def _factor(entry: Figures) -> list[str]:
    found = entry["spread_median"]
    if found["factor"] is None:
        return []
    worst, p95 = entry["spread_worst"], entry["p95_median"]
    text = (
        f"{entry['label']}: run-to-run spread {units.ratio(found['factor'])} that of the best peer,"
        f" {found['peer']} (median over cells)"
    )
    if worst["factor"] is not None:
        text += f"; worst cell {units.ratio(worst['factor'])} ({worst['peer']})"
    if p95["factor"] is not None:
        text += f"; p95 {units.ratio(p95['factor'])} ({p95['peer']})"
    return [text + "."]


def _comparison(summary: Figures) -> Table:
    header = (
        "tool", "runs", "seconds used", "start-up", "spread", "worst cell", "p95", "worst cell",
        "seconds to ± 2 %", "worst cell", "spin bias",
    )  # fmt: skip
    rows = [
        (
            row["label"],
            f"{row['runs']} of {summary['runs']}",
            units.seconds(row["seconds"]),
            units.seconds(row["startup_s"]),
            *_pair(row["spread"]),
            *_pair(row["p95"]),
            needed(row["needed"]["median"], row["needed"]["limit_s"]),
            needed(row["needed"]["worst"], row["needed"]["limit_s"]),
            _bias(row["bias"]),
        )
        for row in summary["rows"]
    ]
    note = (
        "Spread: 1.4826 × MAD / median of the reported time over runs; p95: the 95th percentile of"
        " its deviation from the median. Both for the median cell and the worst. Seconds to ± 2 %:"
        " start-up and time on the cell alone, from which on 90 % of the runs stay within ± 2 % of"
        " the tool's own median over all runs. Spin bias: reported / known length − 1."
    )
    return Table(
        title="Repeatability at an equal budget", header=header, rows=tuple(rows), note=note
    )


def _measured(summary: Figures) -> list[Figures]:
    return [row for row in summary["rows"] if row["spread"]["median"] is not None]


def _by_cell(summary: Figures) -> Table:
    rows = _measured(summary)
    lines = [
        (cell, *(percent(row["cells"][cell]["cv"]) for row in rows), units.time(_time(rows, cell)))
        for cell in summary["cells"]
        if rows
    ]
    header = ("cell", *(row["label"] for row in rows), "time (first tool)")
    return Table(title="Spread by cell", header=header, rows=tuple(lines))


def _time(rows: list[Figures], cell: str) -> float | None:
    time_us: float | None = rows[0]["cells"][cell]["median_us"]
    return time_us


def _needed_by_cell(summary: Figures) -> Table:
    rows = _measured(summary)
    lines = [
        (cell, *(_needed_of(row["cells"][cell]) for row in rows))
        for cell in summary["cells"]
        if rows
    ]
    header = ("cell", *(row["label"] for row in rows))
    return Table(title="Seconds to come within ± 2 %, by cell", header=header, rows=tuple(lines))


def _needed_of(found: Figures) -> str:
    return needed(found["needed_s"], found["seconds"])


def _estimators(summary: Figures) -> Table:
    header = (
        "taken as the time", "processes", "spread", "worst cell", "p95", "worst cell", "spin bias"
    )  # fmt: skip
    rows = [
        (
            row["label"],
            str(row["processes"]),
            *_pair(row["spread"]),
            *_pair(row["p95"]),
            _bias(row["bias"]),
        )
        for row in summary["estimators"]
    ]
    note = "Over several processes the median of what is taken from each."
    return Table(
        title="Estimators on attnbench's own samples", header=header, rows=tuple(rows), note=note
    )


def percent(share: float | None) -> str:
    """A share with three significant digits: 0.0123 -> `1.23 %`; unknown is `–`."""
    return units.UNKNOWN if share is None else f"{units.digits(100 * share)} %"


def needed(value_s: float | None, limit_s: float | None) -> str:
    """Seconds; or that they were not enough; or unknown."""
    if limit_s is None:
        return units.UNKNOWN
    return f"not within {units.seconds(limit_s)}" if value_s is None else units.seconds(value_s)


def _pair(found: Figures) -> tuple[str, str]:
    return percent(found["median"]), percent(found["worst"])


def _bias(found: Figures | None) -> str:
    if found is None:
        return units.UNKNOWN
    return f"{100 * found['median']:+.3f} %".replace("-", "−")


def facts(summary: Figures) -> list[str]:
    """The machine, the versions, and how it was done."""
    env = summary["environment"]
    versions = [
        f"attnbench {summary['attnbench']}",
        f"torch {env['torch']}",
        f"Python {env['python']}",
    ]
    for name in summary["tools"]:
        version = summary["tools"][name].get("version")
        if version and not str(env["torch"]).startswith(str(version)):
            versions.append(f"{name} {version}")
    lines = [
        f"{env['device_name']}, {env['cores']} cores, {summary['threads']} threads,"
        f" {env['platform']}; {units.moment(summary['created'])}.",
        ", ".join(versions) + ".",
        f"{summary['runs']} runs of {summary['budget_s']:g} s each for every tool, start-up and"
        " warm-up counted; each run in fresh processes, the tools in random order within a run.",
        "attnbench without its checks and probes; its processes have the settings of its workers."
        " The others run in the environment as it is; threads, tensors and callables are the same.",
    ]
    stretch = summary["stretch"].get("pytest-benchmark")
    if stretch is not None:
        lines.append(
            "pytest-benchmark has no budget: its --benchmark-max-time is what is left for each"
            f" cell × {stretch:.2f}, so that a run uses its time; it gets one warm call before each"
            " cell, as it derives the number of rounds from one."
        )
    if summary["spin"] is None:
        lines.append("No spin of known length: it waits on the host, which says nothing of a GPU.")
    return lines
