"""The summary table: the columns that matter, as text, best first in each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.analysis.axes import label, telling
from attnbench.base import units
from attnbench.base.registry import Registry

Row = Mapping[Any, Any]


@dataclass(frozen=True, kw_only=True)
class SummaryColumn:
    """One column for people: its header, how to read it, and the text of a row."""

    header: str
    meaning: str
    text: Callable[[Row], str]


SUMMARY: Registry[SummaryColumn] = Registry("summary column")


def _column(name: str, header: str, meaning: str, text: Callable[[Row], str]) -> None:
    SUMMARY.add(name, SummaryColumn(header=header, meaning=meaning, text=text))


_column("impl", "implementation", "sorted fastest first within a case", lambda row: row["impl"])
_column(
    "time",
    "time",
    "median per call (decode: per token); host time on a CPU, of the fastest block of each turn;"
    " stream time on a GPU",
    lambda row: units.time(row["time_us_median"]),
)
_column(
    "interval",
    "95 % interval",
    "of that time: over fresh processes where there are several (--processes), else within one"
    " process, from order statistics; – below 6 samples",
    lambda row: units.time_interval(row["time_us_ci_low"], row["time_us_ci_high"]),
)
_column(
    "speed",
    "speed vs naive",
    "naive's time / this time on the same case; above 1 is faster",
    lambda row: units.ratio(row["speed"]),
)
_column(
    "speed_interval",
    "its interval",
    "at least 95 %, from the intervals of both medians",
    lambda row: units.ratio_interval(row["speed_low"], row["speed_high"]),
)
_column(
    "rate",
    "useful rate",
    "useful FLOPs (admitted pairs only, flash-attention's convention) / median time",
    lambda row: units.flop_rate(row["tflops"]),
)
_column(
    "workspace",
    "workspace",
    "highest allocation during the call, without inputs, prepared memory and outputs",
    lambda row: units.size(row["memory_workspace_bytes"]),
)
_column(
    "error",
    "error / allowed",
    "error against float64 over the allowed error; right at 1 or below",
    lambda row: units.digits(row["error_ratio"], 2),
)
_column(
    "status",
    "status",
    "ok, or what became of the cell; suspect: the time cannot be right; unsteady: see notes",
    lambda row: _status(row),
)


def _status(row: Row) -> str:
    if not units.is_unknown(row["suspect"]):
        return "suspect"
    return str(row["status"]) if units.is_unknown(row["unsteady"]) else "unsteady"


def summary_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return one dict of texts a row, in `frame`'s order: `case` and then the SUMMARY columns.

    `frame` is that of `compare.compared`. `case` names only the axes that vary
    among the cases of its workload.
    """
    names = telling(frame)
    return [
        {"case": label(row, names[row["workload"]])}
        | {name: column.text(row) for name, column in SUMMARY.items()}
        for row in frame.to_dict("records")
    ]
