"""The figures of a run's page, and those for papers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from attnbench.analysis import table
from attnbench.analysis.crossovers import Crossover, crossovers
from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.results import Scaling
from attnbench.analysis.table import Ratio
from attnbench.base.parameters import base_name
from attnbench.base.registry import require
from attnbench.errors import StoreError, UsageError
from attnbench.report import axes, exponents, figures, lines, models, roofline, tradeoff
from attnbench.report.charts import CHARTS
from attnbench.report.document import Picture, Value
from attnbench.report.figures import FigureKind, Row, Size, Sketch
from attnbench.report.looks import looks_of
from attnbench.report.render import written
from attnbench.store.runs import Run

GROWTH = (exponents.FIT.name, models.MODEL.name)
NAMES = (*CHARTS.names(), tradeoff.TRADEOFF.name, *GROWTH)
PAPER: Any = {"font.size": 7.5, "axes.titlesize": 7.5, "axes.labelsize": 7.5}
Call = tuple[str, Mapping[str, Ratio]]
UNDATED: Any = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def sketches(
    cells: pd.DataFrame, costs: pd.DataFrame, crossing: Sequence[Crossover]
) -> Iterator[Sketch]:
    """Every chart that has data, trade-offs and rooflines."""
    work = cells["tflops"] * cells["time_us"]
    low, high = work / cells["time_us_high"], work / cells["time_us_low"]
    cells = cells.assign(
        tflops_low=low,
        tflops_high=high,
        d=cells["width"].fillna(cells["head_dim"]),
        generation_flops=(cells["flops_counted"] * cells["new_tokens"]).astype(float),
    )
    tables = {"cells": cells, "costs": costs, "steps": steps(cells)}
    yield from lines.sketches(tables, crossing)
    yield from tradeoff.sketches(cells)
    yield from roofline.sketches(cells)


def steps(cells: pd.DataFrame) -> pd.DataFrame:
    """Layers, and the recurrent networks that are like them but for heads and a mask.

    With `steps`, what one call does one after another.
    """
    same = ["device", "dtype", "pass", "batch", "width", "layers", "threads", "seq_len"]
    layers = cells[cells["workload"] == "layer"]
    networks = cells[cells["workload"] == "recurrent"]
    shape = layers[[*same, "workload", *_SHAPE]].drop_duplicates()
    both = networks.drop(columns=["workload", *_SHAPE]).merge(shape, on=same)
    layers = layers[layers["width"].isin(both["width"])]
    return pd.concat([layers.assign(steps="1 step"), both.assign(steps="n steps")])


def draw_charts(
    cells: pd.DataFrame, costs: pd.DataFrame, crossing: Sequence[Crossover], folder: Path
) -> list[Picture]:
    """Draw every chart that has data, and the rooflines, into `folder`."""
    with figures.styled():
        return [sketch.save(folder) for sketch in sketches(cells, costs, crossing)]


def of_growth(scaling: Scaling) -> Iterator[Sketch]:
    """Every figure of growth that has data."""
    looks = looks_of(
        {fit.series.impl for fit in scaling.exponents} | {fit.impl for fit in scaling.models}
    )
    yield from exponents.sketches(scaling.exponents, looks)
    yield from models.sketches(scaling.models, looks)


def draw_growth(scaling: Scaling, folder: Path) -> list[Picture]:
    """Draw every figure of growth that has data, into `folder`."""
    with figures.styled():
        return [sketch.save(folder) for sketch in of_growth(scaling)]


_SHAPE = ["heads", "kv_heads", "head_dim", "value_dim", "mask"]
CANDIDATES = FigureKind(
    name="candidates", title="Candidates",
    reading="How many times as fast as the default each candidate is, in rounds that both were"
    " timed in; whiskers are 95 % intervals. Right of the dashed line it is faster.",
)  # fmt: skip
PARTS = FigureKind(
    name="parts", title="Parts of a step",
    reading="What attention, projections, MLP and head take of a step, with sdpa.",
)  # fmt: skip
MOST_CALLS = 12  # panels


def draw_candidates(default: str, calls: Sequence[Call], folder: Path) -> list[Picture]:
    """Draw a bar with whiskers for each candidate of each call.

    A call is its name and, by implementation, the default's time / that, with its interval.
    """
    looks = looks_of({default} | {name for _, ratios in calls for name in ratios})
    ordered = [
        (
            title,
            sorted({**ratios, default: (1.0, None, None)}.items(), key=lambda x: -(x[1][0] or 0)),
        )
        for title, ratios in calls[:MOST_CALLS]
    ]
    texts = [
        f"{name}: {written.value(Value(of[0], 'ratio'))}"
        for _, rows in ordered
        for name, of in rows
    ]

    def draw(size: Size) -> Figure:
        rows = [
            [
                Row(figures.short(name), written.value(Value(of[0], "ratio")), looks[name].colour)
                for name, of in each
            ]
            for _, each in ordered
        ]
        figure, found = figures.row_panels(rows, size, figures.WIDE)
        most = max(end or 0.0 for _, each in ordered for _, of in each for end in of)
        for ax, (title, each) in zip(found, ordered, strict=True):
            ax.set_title(title, loc="left", pad=5, color=figures.INK)
            ax.set_xlim(0, 1.05 * most)
            ax.set_xlabel(f"times as fast as {default}")
            ax.axvline(1.0, **axes.DASHED)
            for y, (name, (value, low, high)) in enumerate(each):
                ax.barh(y, value or 0.0, height=0.6, color=looks[name].colour, alpha=0.55)
                if low is not None and high is not None:
                    ax.hlines(y, low, high, figures.INK, linewidth=1.2)
        return figure

    left_out = max(0, len(calls) - MOST_CALLS)
    sketch = Sketch(kind=CANDIDATES, draw=draw, alt=texts, left_out=left_out)
    with figures.styled():
        return [sketch.save(folder)]


def draw_parts(steps: Sequence[tuple[str, Mapping[str, float]]], folder: Path) -> list[Picture]:
    """Draw a bar for each step: its parts, attention first, by name and time in µs."""

    def draw(size: Size) -> Figure:
        figure, [ax] = figures.row_panels([[Row(x, "", figures.INK) for x, _ in steps]], size)
        for y, (_, parts) in enumerate(steps):
            left = 0.0
            for shade, (name, us) in zip((1.0, 0.6, 0.35, 0.15), parts.items(), strict=True):
                share, label = us / sum(parts.values()), None if y else name
                ax.barh(y, share, left=left, height=0.6, color="C0", alpha=shade, label=label)
                left += share
        ax.set(xlim=(0, 1), xlabel="share of the step")
        ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
        return figure

    alt = [f"{step}: {name} {us:.4g} µs" for step, of in steps for name, us in of.items()]
    with figures.styled():
        return [Sketch(kind=PARTS, draw=draw, alt=alt).save(folder)]


def draw_for_paper(
    run: Run, names: Sequence[str], *, baseline: str | None, impls: Sequence[str],
    where: str | None, kind: str, width: float, titled: bool,
) -> list[Path]:  # fmt: skip
    """Write the figures of these names into the folder of the run, so many inches wide.

    Of `impls` alone, where any are given; one without its parameters means all of that name. Of
    the rows for which the condition `where` holds, as in an export.

    Raises:
        UsageError: there is no such figure or implementation, or the run has no data for it.
        StoreError: the folder cannot be written.
    """
    require("figure", names, NAMES, "--figure")
    cells, costs = table.load(run, baseline), table.rope_cost(run)
    known = {impl: {impl, base_name(impl)} for impl in cells["impl"].unique()}
    require("implementation", impls, list(chain(*known.values())), "--impls")
    wanted = [impl for impl, own in known.items() if own & set(impls) or not impls]
    cells, costs = (
        table.selected(of[of["impl"].isin(wanted)], where, None) for of in (cells, costs)
    )
    if cells.empty:
        export = f"attnbench export {shlex.quote(str(run.path))}"
        raise UsageError(f"no cell fits --where {where!r:.80}; columns: {export}")
    found = [*sketches(cells, costs, crossovers(run, baseline))]
    if {*names} - {sketch.kind.name for sketch in found}:
        ids = {*zip(cells["case_id"], cells["impl"], strict=True)}
        kept = [r for r in run.records if (r.cell.case.case_id, r.cell.impl) in ids]
        found += of_growth(scaling(replace(run, records=kept)))
    had = dict.fromkeys(sketch.kind.name for sketch in found)
    if missing := [name for name in dict.fromkeys(names) if name not in had]:
        there_are = ", ".join(had) or "none: no cell has a time"
        asked = ", ".join(missing)
        raise UsageError(f"no data for {asked} (--figure): nothing written; there are: {there_are}")
    folder, paths = run.path / "figures", []
    try:
        folder.mkdir(exist_ok=True)
        with figures.styled(), mpl.rc_context(PAPER):
            for sketch in (each for name in names for each in found if each.kind.name == name):
                figure = sketch.draw(Size(width, sketch.kind.title if titled else ""))
                paths.append(folder / f"{sketch.stem}.{kind}")
                figure.savefig(paths[-1], dpi=300, metadata=UNDATED.get(kind))
    except OSError as err:
        raise StoreError(f"cannot write {folder} ({err.strerror})") from err
    return paths
