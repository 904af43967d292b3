"""The validation of the gate as tables: for the terminal, and `gate.md`."""

from __future__ import annotations

from typing import Any

from attnbench.base import units
from tests.validation.page import Table

Figures = dict[str, Any]
_HEADER = (
    "runs", "false alarms", "planted found", "blind or untrusted", "inconclusive",
    "interval holds truth", "bias, others", "bias, planted", "time", "longest",
)  # fmt: skip


def tables(summary: Figures) -> list[Table]:
    """All tables that have rows."""
    found = [
        _goals(summary["goals"]),
        _runs("Live gate runs", summary["live"], _LIVE_NOTE),
        _times(summary["live"]),
        _cells(summary["by_cell"]),
        _runs("Resampled gate runs", summary["resampled"], _resampled_note(summary)),
        _peers(summary),
        _cases(summary.get("cases") or []),
    ]
    return [table for table in found if table.rows]


def _goals(rows: list[Figures]) -> Table:
    lines = [(row["goal"], row["runs"], _reached(row["reached"]), _MET[row["met"]]) for row in rows]
    return Table(title="Goals", header=("goal", "runs", "reached", ""), rows=tuple(lines))


_MET = {True: "met", False: "MISSED", None: "too few runs"}


def _reached(found: Figures) -> str:
    if "seconds" in found:
        return units.seconds(found["seconds"])
    return f"exit {found['exit_code']}" if "exit_code" in found else rate(found)


_LIVE_NOTE = (
    "The threshold is 10 %, or the planted slowdown where that is less. In brackets: the exact"
    " 95 % interval (Clopper-Pearson). A false alarm: a gate run that calls"
    " a cell slower, or wrong, that is not. Interval: of how many the truth lies in the 95 %"
    " interval of the ratio, for the planted cells and, after the stroke, for the others. Bias:"
    " reported ratio / true one − 1, in the middle."
)


def _runs(title: str, rows: list[Figures], note: str) -> Table:
    lines = [
        (
            row["label"],
            rate(row["false_alarms"]),
            rate(row["found"]),
            rate(row["unfit"]),
            rate(row["inconclusive"]),
            _coverage(row),
            signed(row["alike"]["bias"]),
            signed(row["slowed"] and row["slowed"]["bias"]),
            units.seconds(row["seconds"]["median"]),
            units.seconds(row["seconds"]["most"]),
        )
        for row in rows
    ]
    return Table(title=title, header=_HEADER, rows=tuple(lines), note=note)


def _coverage(row: Figures) -> str:
    alike = f"/ {_plain(row['alike']['covered'])}"
    return f"{_plain(row['slowed']['covered'])} {alike}" if row["slowed"] else alike


def _resampled_note(summary: Figures) -> str:
    stock = summary["stock"]
    if stock is None:
        return ""
    slowed = ", ".join(f"{count} slowed by {share} %" for share, count in stock["slowed"].items())
    return (
        f"Resampled, not live: each round is one of {stock['rounds']} whole live rounds of"
        f" identical sides, drawn with replacement; the planted cells are drawn from {slowed}."
        " Truth: the medians of what is drawn from, which lie within"
        f" {units.percent(abs(stock['off_most']))} of the ratios known. The intervals count runs"
        " and know nothing of how alike the hours were in which the rounds were measured. Times:"
        " of the rounds used, at their usual length."
    )


def _times(rows: list[Figures]) -> Table:
    header = ("runs", "screen alone", "time", "longest", "with suspects", "time", "longest",
              "rounds", "most")  # fmt: skip
    lines = [
        (
            row["label"],
            *_seconds(row["seconds_clean"]),
            *_seconds(row["seconds_suspects"]),
            f"{row['rounds']['median']:g}",
            f"{row['rounds']['most']:g}",
        )
        for row in rows
    ]
    return Table(title="Time of live runs", header=header, rows=tuple(lines))


def _seconds(found: Figures) -> tuple[str, str, str]:
    return (
        units.count(found["of"]),
        units.seconds(found["median"]),
        units.seconds(found["most"]),
    )


def _cells(rows: list[Figures]) -> Table:
    header = (
        "cell", "wrongly named", "suspected", "bias", "furthest off", "interval", "planted found",
    )  # fmt: skip
    lines = [
        (
            row["cell"],
            _plain(row["wrongly"]),
            units.count(row["suspected"]),
            signed(row["alike"]["bias"]),
            signed(row["alike"]["off_most"]),
            f"{units.percent(row['alike']['width'])} wide",
            _plain(row["found"]),
        )
        for row in rows
    ]
    note = (
        "Over all live runs in which the cell is alike on both sides; the last column over those"
        " in which it was slowed. Bias: the median over runs of the ratio − 1."
    )
    return Table(title="Live runs by cell", header=header, rows=tuple(lines), note=note)


def _peers(summary: Figures) -> Table:
    shares = [row["planted"] for row in summary["live"] if row["planted"]]
    planted = [f"{100 * share:g}" for share in shares]
    header = ("rule", "sides", "false alarms", *(f"+{p} % found" for p in planted))
    own = [_own(summary["live"], planted)] if summary["peers"] else []
    lines = own + [
        (
            row["tool"],
            row["pairing"],
            rate(row["false_alarms"]),
            *(rate(row["found"].get(p)) for p in planted),
        )
        for row in summary["peers"]
    ]
    note = (
        "The rules of other tools on the raw times of the same live runs, one fresh process a"
        " side: false alarms in how many gate runs over all cells, a planted slowdown found in how"
        " many cells. In the same round both sides take turns within tenths of a second, which"
        " none of these tools does for them; minutes apart is how they are used. A sample is one"
        " block. Their own harnesses measure otherwise; google/benchmark, pyperf and asv are"
        " counted where the candidate is the slower one."
    )
    title = "Other tools' rules on the same times"
    return Table(title=title, header=header, rows=tuple(lines), note=note)


def _own(live: list[Figures], planted: list[str]) -> tuple[str, ...]:
    alike = next((row for row in live if not row["planted"]), None)
    found = {f"{100 * row['planted']:g}": row["found"] for row in live if row["planted"]}
    return (
        "attnbench gate (live)",
        "paired rounds",
        rate(alike and alike["false_alarms"]),
        *(rate(found.get(p)) for p in planted),
    )


def _cases(rows: list[Figures]) -> Table:
    header = ("change", "expected", "exit", "named", "by", "cells", "time", "as expected")
    lines = [
        (
            row["title"],
            row["expected"],
            str(row["exit_code"]),
            ", ".join(row["named"]) or "nothing",
            ", ".join(row["metrics"]) or units.UNKNOWN,
            f"{row['cells']} of {row['of']}" if row["of"] else str(row["cells"]),
            units.seconds(row["seconds"]),
            "yes" if row["met"] else "NO",
        )
        for row in rows
    ]
    note = (
        "Each a commit in a repository made for it, with three implementations in 12 cells; the"
        " gate compares it with the commit before. Cells: of that implementation, how many failed."
    )
    return Table(title="Real changes", header=header, rows=tuple(lines), note=note)


def rate(found: Figures | None) -> str:
    """`0 of 40: 0 % [0, 8.81]`; unknown where nothing was tried."""
    if found is None or not found["of"]:
        return units.UNKNOWN
    low, high = (units.digits(100 * found[end]) for end in ("low", "high"))
    return f"{_plain(found)}: {units.digits(100 * found['share'])} % [{low}, {high}]"


def _plain(found: Figures) -> str:
    if not found["of"]:
        return units.UNKNOWN
    return f"{units.count(found['hits'])} of {units.count(found['of'])}"


def signed(share: float | None) -> str:
    """`+0.42 %`; unknown is `–`."""
    return units.UNKNOWN if share is None else f"{100 * share:+.2f} %".replace("-", "−")


def facts(summary: Figures) -> list[str]:
    """The machine, what was run, and what is missing."""
    env, counts = summary["environment"], summary["wanted"]
    have = {row["label"]: row["runs"] for row in summary["live"]}
    lines = [
        f"{env['device_name']}, {env['cores']} cores, one thread, {env['platform']}; runs from"
        f" {units.moment(summary['first'])} to {units.moment(summary['last'])}.",
        f"attnbench {summary['attnbench']}, torch {env['torch']}, Python {env['python']}.",
        f"{len(summary['cells'])} cells: {', '.join(summary['cells'])}; B 1, H 4, D 64, float32.",
        "A/A: both sides are the same files. +p %: the candidate is slowed by p % in one cell, by"
        " idle turning for that share of each call's own time; the cell rotates.",
    ]
    missing = [
        f"{count - have.get(label, 0)} of {label}"
        for label, count in counts.items()
        if count > have.get(label, 0)
    ]
    if env.get("neighbours"):
        lines.append(
            f"Beside {env['neighbours']} processes that spin and sleep for random 0.2 to 4 s."
        )
    if missing:
        lines.append(f"Runs still to be made: {', '.join(missing)}.")
    if summary["changed"]:
        lines.append(
            f"{summary['changed']} runs end otherwise than they did live: the rules have changed"
            " since; the figures are by the rules of now."
        )
    return lines
