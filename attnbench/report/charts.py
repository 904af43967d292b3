"""The charts of a report, the rows of `charts.toml`: what is drawn against n, how to read it.

A page is one figure of a chart: the rows that share workload, device, dtype and pass, in panels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.axes import AXES, fixed, heading, label, overhead_size, slices, varying
from attnbench.analysis.highlights import SLICE
from attnbench.analysis.ratios import PREFERRED
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

    `axis` names it; `{unit}` in it stands for that of a rate. `source` says which
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
    rate: bool = False  # the unit of `axis` is that of the upper end, a rate
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
_ROWS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_SHARED = _ROWS.pop("shared")
for _name, _row in _ROWS.items():
    _fields = _SHARED.get(_row.pop("shared", ""), {}) | _row
    _fields = {k: tuple(v) if isinstance(v, list) else v for k, v in _fields.items()}
    CHARTS.add(_name, Chart(**_fields | {"text": getattr(axes, _fields["text"])}))
ROOFLINE = CHARTS.get("roofline")
CHARTS.remove("roofline")  # it is not against n, and drawn by roofline.py


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
