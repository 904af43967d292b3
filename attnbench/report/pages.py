"""report.html, one page that needs nothing but itself, and report.md, to paste elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl

from attnbench.analysis.axes import label, slices, varying
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.highlights import (
    SLICE,
    measured_on,
    summary_columns,
    summary_rows,
)
from attnbench.analysis.leads import hardest_case
from attnbench.analysis.scaling.results import Scaling
from attnbench.base.files import emptied, write_whole
from attnbench.base.units import bullets, escape, table
from attnbench.errors import StoreError
from attnbench.report import exponents, figures, growth, lines, models, roofline, tradeoff
from attnbench.report.content import FAILURE, LIMIT, Content
from attnbench.report.figures import Plot
from attnbench.report.render.html import template
from attnbench.report.render.tables import value_text, value_texts
from attnbench.store.runs import load_run

PAGE = "report.html"
MARKDOWN = "report.md"
PLOTS = "plots"
MOST_FAILURES, MOST_VERDICTS, MOST_CROSSINGS = 20, 60, 20  # in Markdown


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What is drawn into `folder` meanwhile; raises StoreError where it cannot be written."""
    try:
        yield
    except OSError as err:
        raise StoreError(f"cannot write a report into {folder} ({err.strerror})") from err


def write_report(run_path: Path, baseline: str | None = None) -> Path:
    """Write plots/*.png and *.svg, report.md and report.html into a run's folder.

    An older report there is replaced. Returns the path of report.html.

    Raises:
        StoreError: the folder is not a run, is damaged or cannot be written.
        UnknownNameError: the run has no implementation called `baseline`.
    """
    content = Content.of(load_run(run_path), baseline)
    with writing(run_path):
        folder = emptied(run_path / PLOTS)
        plots, grown = draw_charts(content, folder), draw_growth(content.scaling, folder)
        markdown, page = render_markdown(content), render_html(content, plots, grown)
        write_whole(run_path / MARKDOWN, markdown)
        write_whole(run_path / PAGE, page)
    return run_path / PAGE


def draw_charts(content: Content, folder: Path) -> list[Plot]:
    """Draw every chart that has data, and the rooflines, into `folder`."""
    tables = {"cells": content.cells, "costs": content.costs}
    with mpl.rc_context(fname=figures.STYLE):
        return [
            *lines.draw_all(tables, content.environment, folder, content.crossovers),
            *tradeoff.draw_all(content.cells, folder),
            *roofline.draw_all(content.cells, folder),
        ]


def draw_growth(scaling: Scaling, folder: Path) -> list[Plot]:
    """Draw every figure of growth that has data, into `folder`."""
    names = {fit.series.impl for fit in scaling.exponents}
    names |= {fit.impl for fit in scaling.exact} | {fit.impl for fit in scaling.models}
    looks = figures.looks(names)
    with mpl.rc_context(fname=figures.STYLE):
        return [
            *exponents.draw_forests(scaling.exponents, looks, folder),
            *exponents.draw_fits(scaling.exponents, looks, folder),
            *models.draw_all(scaling.models, looks, folder),
            *models.draw_exact(scaling.exact, looks, folder),
        ]


def render_html(content: Content, plots: list[Plot], grown: list[Plot]) -> str:
    """Return the page; `grown` are the figures of growth. Texts are escaped, images data: URIs."""
    return template("page.html.jinja", Path(__file__).parent).render(
        content=content,
        device_name=measured_on(content.run, content.cells)[0] or "an unknown device",
        plots=plot_groups(plots),
        grown=plot_groups(grown),
        growth=growth,
        headers={"limits": LIMIT, "failures": FAILURE, "crossovers": ("pair", "crossing")},
        environment=value_texts(content.environment),
        options=content.run.info.get("options") or {},
        value_text=value_text,
        columns=[*summary_columns(content.cells).values()],
        all_columns=[column for _, column in COLUMNS.items()],
    )


def plot_groups(plots: list[Plot]) -> list[dict[str, Any]]:
    """Gather the figures of one chart."""
    groups = groupby(plots, key=lambda plot: plot.title)
    return [{"title": title, "plots": list(group)} for title, group in groups]


def render_markdown(content: Content) -> str:
    """Return the run in short: sentences, the hardest case of each slice, what failed, the time."""
    blocks = [
        f"## attnbench: {escape(content.run.run_id)}",
        escape(" · ".join(content.facts())),
        bullets(content.sentences()),
        *_hardest(content),
        *_growth_blocks(content),
    ]
    if limits := content.limits():
        blocks += ["### Limits of the machine", table(LIMIT, limits)]
    if failures := content.failures():
        shown = table(FAILURE, failures[:MOST_FAILURES], len(FAILURE))
        blocks += ["### Cells without a result", shown]
        blocks += _more(len(failures) - MOST_FAILURES, "reasons")
    if rows := [[row["stage"], row["time"], row["share"]] for row in content.spent()]:
        blocks += ["### Wall time", table(["stage", "time", "share"], rows)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _hardest(content: Content) -> list[str]:
    blocks = []
    columns = summary_columns(content.cells)
    headers = [column.header for column in columns.values()]
    for values, rows in slices(content.cells, SLICE):
        case = hardest_case(rows)
        if case.empty:
            continue
        names = [name for name in varying(rows) if name not in SLICE]
        title = [*map(str, values.values()), label(case.iloc[0], names or ["seq_len"])]
        cells = [[row[name] for name in columns] for row in summary_rows(case)]
        blocks += [f"### {escape(' '.join(title))}", table(headers, cells)]
    return blocks


def _growth_blocks(content: Content) -> list[str]:
    """Verdicts, the refuted first, and where the lead changes."""
    if not growth.anything(content.scaling, content.crossovers):
        return []
    found, columns = growth.verdicts(content.scaling), len(growth.HEADERS)
    rows = [row.texts for row in found if not row.as_predicted]
    blocks = ["### How cost grows"]
    if found:
        blocks.append(f"Verdicts on declared laws: {growth.counts(content.scaling)}.")
    if len(rows) < len(found):
        blocks.append(
            f"Of these, {len(found) - len(rows)} are FLOPs and workspace that are as predicted and"
            " grow as declared (in report.html); the others are:"
        )
    if rows:
        blocks.append(table(growth.HEADERS, rows[:MOST_VERDICTS], text_columns=columns))
        blocks += _more(len(rows) - MOST_VERDICTS, "verdicts")
    tables, left_out = growth.crossover_tables(content.crossovers)
    pairs = [[same, *row] for same, rows in tables for row in rows]
    if pairs:
        crossing = sum(c.outcome == "crosses" for c in content.crossovers)
        columns = len(growth.CROSSOVER_HEADERS)
        blocks += [
            f"Crossovers: the lead changes in {crossing} of {len(content.crossovers)} pairs.",
            table(growth.CROSSOVER_HEADERS, pairs[:MOST_CROSSINGS], text_columns=columns),
            *_more(len(pairs) - MOST_CROSSINGS + left_out, "pairs"),
        ]
    return blocks


def _more(count: int, what: str) -> list[str]:
    return [f"… and {count} more {what} in report.html"] if count > 0 else []
