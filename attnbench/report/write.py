"""The one entry: from a run's folder to its pages and plots."""

from __future__ import annotations

import shutil
from pathlib import Path

from attnbench.errors import StoreError
from attnbench.execution.store import load_run
from attnbench.report import html, markdown, roofline, scaling
from attnbench.report.content import Content
from attnbench.report.plots import draw_all

PAGE = "report.html"
MARKDOWN = "report.md"
PLOTS = "plots"


def write_report(run_path: Path) -> Path:
    """Write plots/*.png and *.svg, report.md and report.html into a run's folder.

    An older report there is replaced. Returns the path of report.html.

    Raises:
        StoreError: the folder is no run, is damaged or cannot be written.
    """
    content = Content.of(load_run(run_path))
    try:
        shutil.rmtree(run_path / PLOTS, ignore_errors=True)
        tables = {"cells": content.cells, "costs": content.costs}
        plots = draw_all(tables, content.environment, run_path / PLOTS, content.crossovers)
        plots += roofline.draw_all(content.cells, run_path / PLOTS)
        grown = scaling.draw_all(content.scaling, run_path / PLOTS)
        (run_path / MARKDOWN).write_text(
            markdown.render(content), encoding="utf-8", errors="replace"
        )
        page = run_path / PAGE
        page.write_text(html.render(content, plots, grown), encoding="utf-8", errors="replace")
    except OSError as err:
        raise StoreError(f"cannot write a report into {run_path} ({err.strerror})") from err
    return page
