"""The charts of a report, one row each: what is drawn against n, from which rows, how to read it.

A page is one figure of a chart: the rows that share workload, device, dtype and pass, in panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.axes import AXES, fixed, heading, label, overhead_size, slices, varying
from attnbench.analysis.highlights import SLICE
from attnbench.analysis.ratios import PREFERRED
from attnbench.base import units
from attnbench.base.registry import Registry
from attnbench.report import axes, figures

Scale = Literal["log10", "log2", "linear"]
Tables = Mapping[str, pd.DataFrame]

PANELS_A_PAGE = 6
MOST_LINES = 9  # in a panel, where there are several families to tell apart
MOST_PAGES = 4  # of a chart and a workload; more make a page of tens of megabytes


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One quantity against n. `value`, `low`, `high` and `predicted` are columns.

    `axis` names it; `{unit}` in it stands for the name that `unit` gives. `source` says which
    table the rows come from: `cells` or `costs` (of RoPE). `lines` is the column that tells lines
    apart, `guides` the powers of n to hold slopes against, `reference` a value that is drawn as a
    line across, and the column that has its name.
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
    several: bool = False  # panels only where there is more than one line to tell apart
    beside: bool = False  # recurrent networks stand in the panels of layers of their width
    crossings: bool = False  # mark where the lead changes
    guides: tuple[int, ...] = ()
    dodge: bool = False  # move lines apart sideways, where intervals would cover each other
    reference: tuple[float, str] | None = None
    unit: Callable[[float], tuple[float, str]] | None = None  # by the axis' upper end; see `axis`
    peak: bool = False  # draw the datasheet's peak, where it is known and near

    def rows(self, tables: Tables) -> pd.DataFrame:
        """The rows this chart is about, the failed ones included."""
        table = tables[self.source]
        rows = table[table["workload"].isin(self.workloads)]
        if self.reference and self.reference[1]:
            rows = rows[rows["impl"] != rows[self.reference[1]]]
        if self.several and rows[rows[self.value].notna()][self.lines].nunique() < 2:
            return rows.iloc[:0]
        return with_recurrent(rows) if self.beside else rows

    def pages(self, tables: Tables) -> list[ChartPage]:
        """The figures to draw: those in which anything has a value."""
        found = pages(self.rows(tables), self)
        return [page for page in found if page.rows[self.value].notna().any()]


CHARTS: Registry[Chart] = Registry("chart")

_TIME: dict[str, Any] = {
    "value": "time_us", "low": "time_us_low", "high": "time_us_high",
    "text": axes.round_time, "scale": "log10",
}  # fmt: skip
_WORKSPACE: dict[str, Any] = {
    "value": "memory_workspace_bytes", "predicted": "memory_predicted_bytes",
    "text": axes.round_size, "scale": "log2", "axis": "workspace: ○ measured, — predicted",
}  # fmt: skip
for _name, _chart in {
    "time": Chart(
        title="Time per call",
        reading="Time per call; bars are 95 % intervals. A straight line is a power law:"
        " compare its slope with the dashed guides.",
        axis="time per call", guides=(1, 2), beside=True, **_TIME,
    ),
    "projections": Chart(
        title="Time of a layer by its projections",
        reading="Time per call of the same layer with its weights stored in different ways;"
        " bars are 95 % intervals. A straight line is a power law.",
        axis="time per call", guides=(1, 2), workloads=("layer",),
        lines="projection", several=True, **_TIME,
    ),
    "speed": Chart(
        title="Speed vs the baseline",
        reading="The baseline's time / this time in rounds that both were timed in; bars are 95 %"
        " intervals. Above the line is faster than the baseline; a bar that crosses it is level. An"
        " upright bar on the line marks where one overtakes another, with its interval.",
        value="speedup", low="speedup_low", high="speedup_high",
        axis="times as fast as the baseline",
        text=axes.round_ratio, scale="log2", reference=(1.0, "baseline"),
        workloads=("attention", "layer"), crossings=True,
    ),
    "tflops": Chart(
        title="Useful FLOP rate",
        reading="FLOPs of the admitted pairs (flash-attention's convention) / time: higher"
        " is better, and a plateau is the limit of the machine or of the algorithm.",
        value="tflops", low="tflops_low", high="tflops_high", axis="useful {unit}",
        text=axes.plain, unit=units.rate_unit, scale="linear", peak=True,
    ),
    "workspace": Chart(
        title="Workspace",
        reading="Markers are measured, lines are predicted from the sizes alone before the run; a"
        " marker off its line refutes the prediction. A marker on the lower edge means none.",
        **_WORKSPACE,
    ),
    "rope": Chart(
        title="Cost of the position encoding",
        reading="Time with the encoding / time without it, minus 1, on the same case and"
        " implementation; an interval that crosses 0 % shows no cost.",
        value="cost", low="cost_low", high="cost_high", source="costs", axis="time added",
        text=axes.round_added, scale="linear", reference=(1.0, ""), dodge=True,
        workloads=("attention", "layer", "decode"),
    ),
    "decode": Chart(
        title="Time per token",
        reading="Time per generated token; bars are 95 % intervals. Flat: the context costs"
        " nothing; along ∝ n: every token pays for the whole context.",
        axis="time per token", guides=(1,), workloads=("decode",),
        lines="cache", **_TIME,
    ),
    "decode-workspace": Chart(
        title="Workspace of decoding",
        reading="Highest allocation while all new tokens are generated, without inputs, prepared"
        " memory and outputs. Markers are measured, lines are predicted.",
        workloads=("decode",), lines="cache", **_WORKSPACE,
    ),
}.items():  # fmt: skip
    CHARTS.add(_name, _chart)


def with_rate_interval(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `tflops_low` and `tflops_high`: the rate at the ends of the time's interval."""
    work = frame["tflops"] * frame["time_us"]
    return frame.assign(
        tflops_low=work / frame["time_us_high"], tflops_high=work / frame["time_us_low"]
    )


def with_recurrent(rows: pd.DataFrame) -> pd.DataFrame:
    """Repeat the rows of recurrent networks in every slice of layers of the same width.

    They take on the axes that only layers have (heads, mask, projection …), so that they share a
    panel. Those without such layers stay what they are.
    """
    layers, recurrent = (
        found.assign(_width=found["width"].fillna(found["heads"] * found["head_dim"]))
        for found in (rows[rows["workload"] == name] for name in ("layer", "recurrent"))
    )
    if layers.empty or recurrent.empty:
        return rows
    alike = ["device", "dtype", "pass", "batch", "threads", "_width"]
    own = [name for name in AXES if name not in ("seq_len", "kv_len")]
    panels = layers[[*own, "_width"]].drop_duplicates()
    beside = recurrent.drop(columns=[name for name in own if name not in alike])
    copies = beside.reset_index().merge(panels, on=alike)
    kept = rows[~rows.index.isin(copies["index"])]
    return pd.concat([kept, copies[rows.columns].astype(rows.dtypes.to_dict())], ignore_index=True)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title that names only what differs from panel to panel."""

    title: str
    rows: pd.DataFrame


@dataclass(frozen=True, eq=False)
class ChartPage:
    """One figure: `slug` for its file name, `title` for what all its panels share."""

    workload: str
    slug: str
    title: str
    panels: tuple[Panel, ...]

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all panels."""
        return pd.concat([panel.rows for panel in self.panels])


def pages(frame: pd.DataFrame, chart: Chart) -> list[ChartPage]:
    """Split into figures by workload, device, dtype and pass, and these into small multiples.

    A panel holds one combination of the other axes that vary, except n (its x axis) and what tells
    its lines apart. Position encodings are left to the plot of their costs, unless there is no row
    without one.
    """
    found = []
    for values, rows in slices(frame, SLICE):
        plain = rows[rows["position"] == "none"]
        rows = plain if chart.source == "cells" and not plain.empty else rows
        # A size for the overhead would take most of an axis on which nothing else stands.
        least = overhead_size([int(n) for n in rows["seq_len"].unique()])
        small = f" (n={least}, for the overhead, is not drawn)" if least else ""
        rows, single = _along_n(rows[rows["seq_len"] > (least or 0)], chart)
        names = _panel_axes(rows, chart.lines)
        panels = [
            Panel(" ".join(filter(None, (family, _title(part, names)))), own)
            for _, part in slices(rows, names)
            for family, own in _by_family(part)
        ]
        slug, title = "-".join(map(str, values.values())), fixed(rows) + small + single
        found += [
            ChartPage(
                str(values["workload"]), f"{slug}-{page.slug}".strip("-"), title + page.place,
                page.items,
            )
            for page in figures.pages(panels, lambda _: (), PANELS_A_PAGE, len(panels))
        ]  # fmt: skip
    return found


def _by_family(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of one panel, or where they are many, of a panel for each family.

    The two that everything is compared with stand in all of these.
    """
    families = list(rows["family"].dropna().unique())
    if len(families) < 2 or rows["impl"].nunique() <= MOST_LINES:
        yield "", rows
        return
    for family in families:
        yield family, rows[(rows["family"] == family) | rows["impl"].isin(PREFERRED)]


def first_of_each(found: list[ChartPage]) -> list[ChartPage]:
    """At most `MOST_PAGES` figures of each workload, so that none crowds out another."""
    groups = groupby(found, key=lambda page: page.workload)  # by which slices are in order
    return [page for _, group in groups for page in islice(group, MOST_PAGES)]


def _panel_axes(rows: pd.DataFrame, lines: str) -> list[str]:
    names = [name for name in varying(rows) if name not in ("seq_len", lines)]
    return ["impl", *names] if lines != "impl" and rows["impl"].nunique() > 1 else names


def _along_n(rows: pd.DataFrame, chart: Chart) -> tuple[pd.DataFrame, str]:
    """The rows of panels that show something along n, and a text that counts the others.

    Panels of a single n are drawn where there is nothing else.
    """
    parts = [part for _, part in slices(rows, _panel_axes(rows, chart.lines))]
    parts = [part for part in parts if not chart.several or part[chart.lines].nunique() > 1]
    curves = [part for part in parts if part["seq_len"].nunique() > 1] or parts
    points = len(parts) - len(curves)
    text = f" ({points} more with a single n {'is' if points == 1 else 'are'} in the table)"
    return pd.concat(curves) if curves else rows.iloc[:0], text if points else ""


def _title(rows: pd.DataFrame, names: list[str]) -> str:
    row = rows.iloc[0]
    texts = [str(row["impl"])] if "impl" in names else []
    named = (label if texts else heading)(row, [name for name in names if name != "impl"])
    return " ".join([*texts, named]).strip()
