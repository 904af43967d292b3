"""The charts of a report, one row each: what is drawn against n, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from attnbench.analysis.table import BASELINE
from attnbench.base import units
from attnbench.base.registry import Registry
from attnbench.report import scales
from attnbench.report.beside import with_guests

Scale = Literal["log10", "log2", "linear"]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One quantity against n. `value`, `low`, `high` and `predicted` are columns.

    `axis` names it; `{unit}` in there stands for the name that `unit` gives.
    `source` says which table the rows come from: `cells` or `costs` (of RoPE). `lines` is the
    column that tells lines apart, `guides` the powers of n to hold slopes against, `reference`
    a value with its name, drawn as a line across.
    """

    title: str
    reading: str
    value: str
    axis: str
    text: Callable[[float], str]
    scale: Scale
    low: str | None = None
    high: str | None = None
    predicted: str | None = None
    source: Literal["cells", "costs"] = "cells"
    workloads: tuple[str, ...] = ("attention", "layer", "recurrent")
    lines: Literal["impl", "cache", "projection"] = "impl"
    several: bool = False  # drawn only where there is more than one line to tell apart
    beside: bool = False  # recurrent networks stand in the panels of layers of their width
    crossings: bool = False  # mark where the lead changes
    guides: tuple[int, ...] = ()
    guide_under: Literal["all", "slowest"] = "all"  # which lines the guides are drawn just below
    dodge: bool = False  # move lines apart sideways, where intervals would cover each other
    reference: tuple[float, str] | None = None
    unit: Callable[[float], tuple[float, str]] | None = None  # by the axis' upper end; see `axis`
    peak: bool = False  # draw the datasheet's peak, where it is known and near

    def title_of(self, single: bool) -> str:
        """The title, which speaks of n only where n varies."""
        return self.title.split(" against ")[0] if single else self.title

    def reading_of(self, single: bool) -> str:
        """How to read it; what is said of slopes is left out where n does not vary."""
        return self.reading.split(". ")[0].rstrip(".") + "." if single else self.reading

    def rows(self, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
        """The rows this chart is about, the failed ones included; empty if none has a value."""
        table = tables[self.source]
        rows = table[table["workload"].isin(self.workloads)]
        if self.reference and self.reference[1] == BASELINE:
            rows = rows[rows["impl"] != BASELINE]
        if self.several and rows[rows[self.value].notna()][self.lines].nunique() < 2:
            return rows.iloc[:0]
        rows = with_guests(rows) if self.beside else rows
        return rows if rows[self.value].notna().any() else rows.iloc[:0]


CHARTS: Registry[Chart] = Registry("chart")

CHARTS.add(
    "time",
    Chart(
        title="Time against n",
        reading="Median time per call, bars are 95 % intervals. A straight line is a power law:"
        " compare its slope with the dashed guides.",
        value="time_us_median", low="time_us_ci_low", high="time_us_ci_high",
        axis="time per call", text=scales.round_time, scale="log10", guides=(1, 2), beside=True,
    ),
)  # fmt: skip
CHARTS.add(
    "projections",
    Chart(
        title="Time of a layer by its projections",
        reading="Median time per call of the same layer with its weights stored in different ways,"
        " bars are 95 % intervals. A straight line is a power law.",
        value="time_us_median", low="time_us_ci_low", high="time_us_ci_high",
        axis="time per call", text=scales.round_time, scale="log10", guides=(1, 2),
        workloads=("layer",), lines="projection", several=True, guide_under="slowest",
    ),
)  # fmt: skip
CHARTS.add(
    "speed",
    Chart(
        title="Speed relative to naive",
        reading="naive's time / this time on the same case, bars are intervals of at least 95 %."
        " Above the line is faster than naive, twice as fast at 2×. A ring marks where one"
        " overtakes another, with its interval; an arrow at an end says that it reaches further.",
        value="speed", low="speed_low", high="speed_high",
        axis="times as fast as naive", text=scales.round_ratio, scale="log2",
        reference=(1.0, BASELINE), workloads=("attention", "layer"), crossings=True,
    ),
)  # fmt: skip
CHARTS.add(
    "tflops",
    Chart(
        title="Useful FLOP rate against n",
        reading="FLOPs of the admitted pairs (flash-attention's convention) / median time: higher"
        " is better, and a plateau is the limit of the machine or of the algorithm.",
        value="tflops", low="tflops_low", high="tflops_high",
        axis="useful {unit}", text=scales.plain, unit=units.rate_unit, scale="linear", peak=True,
    ),
)  # fmt: skip
CHARTS.add(
    "workspace",
    Chart(
        title="Workspace against n",
        reading="Markers are measured, lines are predicted from the sizes alone before the run; a"
        " marker off its line refutes the prediction. A marker on the lower edge means none.",
        value="memory_workspace_bytes", predicted="memory_predicted_bytes",
        axis="workspace: ○ measured, — predicted", text=scales.round_size, scale="log2",
    ),
)  # fmt: skip
CHARTS.add(
    "rope",
    Chart(
        title="Cost of the position encoding",
        reading="Time with the encoding / time without it, minus 1, on the same case and"
        " implementation; an interval that crosses 0 % shows no cost.",
        value="cost", low="cost_low", high="cost_high", source="costs",
        axis="time added", text=scales.round_added, scale="linear",
        workloads=("attention", "layer", "decode"), reference=(1.0, ""), dodge=True,
    ),
)  # fmt: skip
CHARTS.add(
    "decode",
    Chart(
        title="Time per token against context",
        reading="Median time per generated token, bars are 95 % intervals. Flat: the context costs"
        " nothing; along ∝ n: every token pays for the whole context.",
        value="time_us_median", low="time_us_ci_low", high="time_us_ci_high",
        axis="time per token", text=scales.round_time, scale="log10", guides=(1,),
        workloads=("decode",), lines="cache", guide_under="slowest",
    ),
)  # fmt: skip
CHARTS.add(
    "decode-workspace",
    Chart(
        title="Workspace of decoding against context",
        reading="Highest allocation while all new tokens are generated, without inputs, prepared"
        " memory and outputs. Markers are measured, lines are predicted.",
        value="memory_workspace_bytes", predicted="memory_predicted_bytes",
        axis="workspace: ○ measured, — predicted", text=scales.round_size, scale="log2",
        workloads=("decode",), lines="cache",
    ),
)  # fmt: skip


def with_rate_interval(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `tflops_low` and `tflops_high`: the rate at the ends of the time's interval."""
    work = frame["tflops"] * frame["time_us_median"]
    return frame.assign(
        tflops_low=work / frame["time_us_ci_high"], tflops_high=work / frame["time_us_ci_low"]
    )
