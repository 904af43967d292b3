"""Charts as drawn: lines against n in small multiples, and rows of dots where there is one n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnbench.analysis.crossovers import Crossover
from attnbench.base import units
from attnbench.report import axes, charts, figures, growth
from attnbench.report.axes import End
from attnbench.report.charts import CHARTS, Chart, ChartPage, Scale, Tables
from attnbench.report.figures import INK, Margins, Row, Size, Sketch
from attnbench.report.looks import DASHES, Look, looks_of

PANEL_INCHES = 3.3
SYMBOLS = {"seq_len": "n", "d": "d", "new_tokens": "T"}  # of what charts are drawn along
CROSSINGS = "upright bars mark where one overtakes another, with the interval"


def sketches(tables: Tables, crossovers: Sequence[Crossover] = ()) -> Iterator[Sketch]:
    """Every chart that has data, for every slice of the run.

    `tables` maps `cells` to `table.load` (with the rate's interval) and `costs` to
    `table.rope_cost`; `crossovers` are marked in the charts that show them.
    """
    looks = looks_of(tables["cells"]["impl"].unique())
    variants = dict.fromkeys(["", *charts.with_variants(tables["cells"])["variant"]])
    dashes = {name: DASHES[i % len(DASHES)] for i, name in enumerate(variants)}
    for chart in map(CHARTS.get, CHARTS.names()):
        for page in charts.pages(chart.rows(tables), chart) if chart.along_n else ():
            shown = crossovers if chart.crossings and page.along_n else ()
            marked = [crossings(panel.rows, shown) for panel in page.panels]
            frame = Frame(chart, looks, dashes, *value_axis(chart, page.rows))
            note = CROSSINGS if any(marked) else ""
            yield sketch(chart, page, partial(draw, page, frame, marked), note)


def sketch(chart: Chart, page: ChartPage, drawn: Any, note: str = "") -> Sketch:
    """The figure of one page; `drawn` draws it."""
    alt = [", ".join(page.rows["line"].unique()), *(p.title for p in page.panels if p.title)]
    return Sketch(
        kind=chart, draw=drawn, alt=alt,
        caption="; ".join(filter(None, (page.caption, note))), slug=page.slug,
        first=page.first, left_out=page.left_out,
    )  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """What all panels of a figure share: a value axis, and what stands for implementations."""

    chart: Chart
    looks: Mapping[str, Look]
    dashes: Mapping[str, Any]  # of caches, projections or parameters
    scale: Scale
    limits: tuple[float, float]

    @property
    def unit(self) -> tuple[float, str]:
        """The value axis' unit, where the chart leaves it to the values: its size and name."""
        return units.rate_unit(self.limits[1]) if self.chart.rate else (1.0, "")

    def put(self, ax: Axes, which: str, rows: pd.DataFrame) -> None:
        """Scale, ticks and label of the axis `which` (x or y)."""
        axis = ax.yaxis if which == "y" else ax.xaxis
        if self.scale == "linear":
            ax.set(**{f"{which}lim": self.limits})
            axis.set_major_locator(MaxNLocator(6 if which == "y" else 5))
            axis.set_major_formatter(lambda value, _: self.chart.text(value / self.unit[0]))
        else:
            base = 2 if self.scale == "log2" else 10
            text = self.chart.text
            axes.log_axis(ax, which, self.limits, base, lambda value: text(value / self.unit[0]))
        column = (self.chart.reference or (1.0, ""))[1]
        baseline = str(rows[column].iloc[0]) if column else ""
        name = self.chart.axis.format(unit=self.unit[1], baseline=baseline)
        if which == "x" and (note := self.note(rows)):  # bars for lines, and none for `least`
            name += ": " + ", ".join(note.replace("—", "|").split(", ")[:2])
        axis.set_label_text(name)

    def note(self, rows: pd.DataFrame) -> str:
        """What markers and lines are, where both are drawn."""
        predicted = self.chart.predicted
        return self.chart.marks if predicted and rows[predicted].notna().any() else ""

    def inside(self, value: float) -> float:
        """A logarithmic axis has no zero: it stands on the lower edge."""
        return max(float(value), self.limits[0])


def draw(
    page: ChartPage, frame: Frame, marked: Sequence[Sequence[tuple[float, ...]]], size: Size
) -> Figure:
    """Draw one figure: the chart's panels, with common scales; `marked` are their crossings."""
    chart = frame.chart
    if not page.along_n:
        return _draw_dots(page, frame, size)
    names = [figures.short(_ended(chart, own)) for _, own in _lines(page.rows)]
    names += [str(page.rows[name].iloc[0]) for name in (chart.reference or ())[1:] if name]
    names += ["∝ n"] * len(chart.guides)
    figure, found = line_panels(page, names, size, frame.note(page.rows))
    for ax, panel, bars in zip(found, page.panels, marked, strict=True):
        ends = _draw_lines(ax, panel.rows, frame)
        for n, low, high, y in bars:
            ax.plot([low, high], [y, y], color=INK, linewidth=0.8, zorder=3.5)
            ax.plot(n, y, color=INK, marker="|", markersize=9, markeredgewidth=1.2, zorder=3.5)
        axes.label_ends(ax, ends)
    return figure


def line_panels(
    page: ChartPage, names: Sequence[str], size: Size, note: str = ""
) -> tuple[Figure, list[Axes]]:
    """Panels with room for these names beside each, and below their titles a note."""
    own = size.width or figures.NARROW
    titles = ["\n".join(filter(None, (panel.title, note))) for panel in page.panels]
    top = 0.12 + 0.2 * bool(titles[0]) + 0.14 * max(title.count("\n") for title in titles)
    least = axes.LINE * figures.SMALL / 72 * len(names) + top + 0.5  # one name below the other
    height = max(min(PANEL_INCHES, max(2.1, 0.7 * own)), least)
    around = Margins(left=0.72, right=max(map(figures.width_of, names)) + 0.37, top=top)
    figure, found = figures.panels([height] * len(page.panels), around, size)
    for ax, title in zip(found, titles, strict=True):
        ax.set_title(title, loc="left", pad=5, color=INK)
    return figure, found


def value_axis(chart: Chart, rows: pd.DataFrame) -> tuple[Scale, tuple[float, float]]:
    """Scale and limits of the value axis over all panels, with intervals and predictions."""
    names = [
        name for name in (chart.value, chart.low, chart.high, chart.predicted, chart.least) if name
    ]
    values = [float(v) for name in names for v in rows[name].dropna() if v > 0]
    values += [chart.reference[0]] if chart.reference else []
    if not values:
        return chart.scale, (1.0, 2.0)
    if chart.scale == "linear":
        least = min(values) if chart.reference else 0.0
        room = 0.08 * max(max(values) - least, 0.05)
        return "linear", (least - room * (least > 0), max(values) + room)
    low, high = axes.bounds(values)
    return chart.scale, ((low / 1.7 if chart.guides else low), high)


def _lines(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(n), own.sort_values("x")) for n, own in rows.groupby("line", sort=False)]


def _ended(chart: Chart, rows: pd.DataFrame) -> str:
    """The name of a line, with what became of sizes that have no value."""
    name = str(rows["line"].iloc[0])
    if "status" not in rows or (rows["status"] == "ok").all():
        return name
    failed = rows[rows["status"] != "ok"]
    last, first = rows[rows[chart.value].notna()]["x"].max(), failed["x"].min()
    where = "from" if first > last and len(failed) > 1 else "at"
    return f"{name}: {failed['status'].iloc[0]} {where} {units.length(first)}"


def _draw_lines(ax: Axes, rows: pd.DataFrame, frame: Frame) -> list[End]:
    """Draw the lines of one panel, and return where their names belong."""
    chart = frame.chart
    axes.length_axis(ax, [int(n) for n in rows["x"].unique()])
    frame.put(ax, "y", rows)
    ax.set_xlabel(growth.axis_name(SYMBOLS[chart.along], str(rows["workload"].iloc[0])))
    ends = _draw_references(ax, rows, chart)
    for _, own in _lines(rows):
        known = own[own[chart.value].notna()]
        look = frame.looks[str(own["impl"].iloc[0])]
        dash = frame.dashes[own["variant"].iloc[0]] if rows["variant"].nunique() > 1 else "-"
        xs, ys = known["x"].astype(float), known[chart.value].map(frame.inside)
        stroke: dict[str, Any] = {"linestyle": dash, **figures.FILLED}
        if chart.predicted and (predicted := own.dropna(subset=[chart.predicted])).size:
            values = [frame.inside(value) for value in predicted[chart.predicted]]
            sizes = predicted["x"].astype(float)
            ax.plot(sizes, values, color=look.colour, linewidth=1.0, linestyle=dash)
            if chart.least:
                ax.plot(sizes, predicted[chart.least], color=look.colour, linestyle=(0, (1, 2)))
            stroke["linestyle"] = "none"
        bars = None
        if chart.low and chart.high:
            around = ys - known[chart.low], known[chart.high] - ys
            bars = [part.fillna(0.0).clip(lower=0.0) for part in around]
        ax.errorbar(
            xs, ys, yerr=bars, color=look.colour, marker=look.marker,
            elinewidth=1.0, clip_on=False, **stroke,
        )  # fmt: skip
        ends.append(End(xs.iloc[-1], ys.iloc[-1], _ended(chart, own), look))
    return ends


def _draw_references(ax: Axes, rows: pd.DataFrame, chart: Chart) -> list[End]:
    """Draw the guides below all points, and the line to compare with."""
    ends = []
    known, last = rows[rows[chart.value] > 0], float(rows["x"].max())
    for power in chart.guides if known["x"].nunique() > 2 else ():
        along = _alike(known, chart.value, power)
        share = along["x"].astype(float) / last
        least = float((along[chart.value].astype(float) / share**power).min())
        ends.append(axes.guide(ax, (last, 0.72 * least), power, SYMBOLS[chart.along]))
    if chart.reference:
        value, column = chart.reference
        ax.axhline(value, **axes.DASHED)
        if column:
            ends.append(End(ax.get_xlim()[1], value, str(rows[column].iloc[0])))
    return ends


def _alike(rows: pd.DataFrame, value: str, power: int) -> pd.DataFrame:
    """The rows of the lines that end about as steep as this power of x; all if none does."""
    found = []
    for _, own in _lines(rows):
        logs = np.log(own[["x", value]].astype(float).to_numpy())
        if len(own) > 1 and abs(np.divide(*(logs[-1] - logs[-2])[::-1]) - power) < 0.5:
            found.append(own)
    return pd.concat(found) if found else rows


def _draw_dots(page: ChartPage, frame: Frame, size: Size) -> Figure:
    """A row for each line, the best first, with its interval and its value."""
    chart = frame.chart
    upwards = not (chart.rate or chart.reference)
    parts = [panel.rows.sort_values(chart.value, ascending=upwards) for panel in page.panels]
    own = [
        [
            Row(figures.short(row["line"]), chart.text(row[chart.value] / frame.unit[0]),
                frame.looks[row["impl"]].colour) for row in rows.to_dict("records")
        ] for rows in parts
    ]  # fmt: skip
    figure, found = figures.row_panels(own, size, figures.WIDE)
    for ax, panel, rows in zip(found, page.panels, parts, strict=True):
        frame.put(ax, "x", rows)
        ax.set_title(panel.title, loc="left", pad=5, color=INK)
        if chart.reference:
            ax.axvline(chart.reference[0], **axes.DASHED)
        colours = [frame.looks[impl].colour for impl in rows["impl"]]
        for y, row in enumerate(rows.to_dict("records")):
            ax.plot(
                frame.inside(row[chart.value]), y, color=colours[y], markersize=6, clip_on=False,
                marker=frame.looks[row["impl"]].marker, **figures.FILLED,
            )  # fmt: skip
        if chart.low and chart.high:
            ax.hlines(range(len(rows)), rows[chart.low], rows[chart.high], colours, linewidth=1.2)
        if chart.predicted:
            at = rows[chart.predicted].clip(lower=frame.limits[0])
            ys = np.arange(len(rows))
            ax.vlines(at, ys - 0.35, ys + 0.35, colours, linewidth=1.2)
    return figure


def crossings(rows: pd.DataFrame, found: Sequence[Crossover]) -> list[tuple[float, ...]]:
    """Where one line of a panel overtakes another: n, the ends of its interval, height.

    The height is on the line of the baseline, where it is one of the two; else on the first's.
    """
    marks: list[tuple[float, ...]] = []
    found = [each for each in found if each.by == "impl" and each.crossings]
    if not found:
        return marks
    of_case = {(row["case_id"], row["impl"]): row["line"] for row in rows.to_dict("records")}
    baseline = str(rows["baseline"].iloc[0])
    for each in found:
        pair = each.first, each.second
        lines = [of_case.get((each.case.case_id, name)) for name in pair if name != baseline]
        if None in lines:
            continue
        line = rows[(rows["line"] == lines[0]) & rows["speedup"].notna()].sort_values("seq_len")
        xs, ys = (np.log(line[name].astype(float)) for name in ("seq_len", "speedup"))
        for at in each.crossings:
            y = 1.0 if baseline in pair else math.exp(np.interp(math.log(at.n), xs, ys))
            marks.append((at.n, at.low, at.high, y))
    return marks
