"""From the runs to shares: how often times, intervals and rankings are those of the quiet runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnbench.base import units
from attnbench.base.stats import median
from tests.validation.page import Table

Figures = dict[str, Any]
CLEAR = 1.10  # quiet ratios from here on are to be ranked
NEAR, FAR = 0.05, 0.25


def summarise(rows: list[Figures]) -> Figures:
    """Shares by number of neighbours; the truth is the median over the quiet runs, cell by cell.

    A quiet run is held against the median of the others.
    """
    quiet = [row for row in rows if row["neighbours"] == 0]
    found = []
    for count in sorted({row["neighbours"] for row in rows}):
        mine = [row for row in rows if row["neighbours"] == count]
        cells, pairs, twins = [], [], []
        for row in mine:
            others = [one for one in quiet if one is not row]
            if others:
                cells += _cells(row, others)
                pairs += _pairs(row, others)
                twins += [_lead(i) == 0 for _, a, b, _, i in row["pairs"] if _twins(a, b)]
        found.append(
            {
                "neighbours": count,
                "runs": len(mine),
                "wall_s": median(row["wall_s"] for row in mine),
                "cells": len(cells),
                "within_5": _share(abs(cell["off"]) <= NEAR for cell in cells),
                "within_25": _share(abs(cell["off"]) <= FAR for cell in cells),
                "worst": max((cell["off"] for cell in cells), key=abs, default=None),
                "contained": _share(cell["contained"] for cell in cells),
                "width": median(c["width"] for c in cells) if cells else None,
                "unsteady": _share(cell["unsteady"] for cell in cells),
                "taken": median(1 - c["cpu_share"] for c in cells) if cells else None,
                "full_speed": median(c["full_speed"] for c in cells) if cells else None,
                "pairs": len(pairs),
                "ranked": _share(pair == "right" for pair in pairs),
                "wrong": _share(pair == "wrong" for pair in pairs),
                "ties": _share(twins),
                "by_size": [
                    {
                        "seq_len": n,
                        "within_5": _share(abs(c["off"]) <= NEAR for c in cells if c["n"] == n),
                        "contained": _share(c["contained"] for c in cells if c["n"] == n),
                    }
                    for n in sorted({cell["n"] for cell in cells})
                ],
            }
        )
    return {"conditions": found}


def _cells(row: Figures, quiet: list[Figures]) -> list[Figures]:
    truth: dict[tuple[int, str], list[float]] = {}
    for one in quiet:
        for n, impl, time_us, *_ in one["cells"]:
            truth.setdefault((n, impl), []).append(time_us)
    found = []
    for n, impl, time_us, interval, unsteady, cpu_share, full_speed in row["cells"]:
        true_us = median(truth[n, impl])
        low, high = interval or (time_us, time_us)
        found.append(
            {
                "n": n, "off": time_us / true_us - 1, "contained": low <= true_us <= high,
                "width": (high - low) / time_us, "unsteady": unsteady is not None,
                "cpu_share": cpu_share, "full_speed": full_speed,
            }
        )  # fmt: skip
    return found


def _pairs(row: Figures, quiet: list[Figures]) -> list[str]:
    """Of each pair that quiet runs set apart: ranked right, wrong, or not at all."""
    truth: dict[tuple[int, str, str], list[float]] = {}
    for one in quiet:
        for n, above, below, value, _ in one["pairs"]:
            truth.setdefault((n, above, below), []).append(value)
    found = []
    for n, above, below, _, interval in row["pairs"]:
        true = median(truth[n, above, below])
        if max(true, 1 / true) >= CLEAR:
            lead = _lead(interval) * (1 if true > 1 else -1)
            found.append({1: "right", -1: "wrong", 0: "open"}[lead])
    return found


def _lead(interval: list[float] | None) -> int:
    """1 where the ratio is surely above 1, −1 where below, 0 where its interval holds 1."""
    return 0 if interval is None else (interval[0] > 1) - (interval[1] < 1)


def _twins(above: str, below: str) -> bool:
    return below == f"{above}-twin"


def _share(values: Iterable[bool]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def tables(summary: Figures) -> list[Table]:
    """One row for each number of neighbours, and one for each size."""
    percent = lambda x: units.UNKNOWN if x is None else f"{100 * x:.0f} %"  # noqa: E731
    conditions = summary["conditions"]
    rows = tuple(
        (
            str(row["neighbours"]), str(row["runs"]), f"{row['wall_s']:.0f} s",
            *(percent(row[name]) for name in (
                "taken", "full_speed", "within_5", "within_25", "worst", "contained", "width",
                "unsteady", "ranked", "wrong", "ties",
            )),
        )
        for row in conditions
    )  # fmt: skip
    header = (
        "neighbours", "runs", "wall", "CPU taken", "at full speed", "within 5 %", "within 25 %",
        "worst", "interval holds it", "its width", "unsteady", "ranked", "wrongly", "twins level",
    )  # fmt: skip
    note = (
        "Within, worst, holds: against the median of the (other) quiet runs, cell by cell. Ranked:"
        f" pairs whose quiet ratio is at least {CLEAR:.2f}. CPU taken and full speed: medians over"
        " cells."
    )
    by_size = tuple(
        (
            str(size["seq_len"]),
            *(percent(of["by_size"][i][k]) for of in conditions for k in ("within_5", "contained")),
        )
        for i, size in enumerate(conditions[0]["by_size"])
    )
    heads = tuple(
        f"{what}, {row['neighbours']} beside"
        for row in conditions
        for what in ("within 5 %", "interval holds it")
    )
    return [
        Table(title="Alone and beside neighbours", header=header, rows=rows, note=note),
        Table(title="By size", header=("n", *heads), rows=by_size),
    ]
