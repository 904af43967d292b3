"""report.html: one page that needs nothing but itself."""

from __future__ import annotations

import base64
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.highlights import SUMMARY
from attnbench.base import units
from attnbench.report import scaling
from attnbench.report.content import Content
from attnbench.report.plots import Plot

LIMITS = ("ceilings", "matmul_tflops")  # of an environment: they have a section of their own
TEMPLATES = Path(__file__).parent  # page.html.jinja, and page.css which it includes


def render(content: Content, plots: list[Plot], grown: list[Plot]) -> str:
    """Return the page; `grown` are the figures of growth. Texts are escaped, images data: URIs."""
    parts, left_out = content.parts()
    values = {
        "run_id": content.run.run_id,
        "device_name": content.environment.get("device_name") or "an unknown device",
        "facts": content.facts(),
        "sentences": content.sentences(),
        "plots": plot_groups(plots),
        "growth": growth(content, grown),
        "tables": parts,
        "left_out": left_out,
        "limits": content.limits(),
        "failures": content.failures(),
        "suspects": content.suspects(),
        "spent": content.spent(),
        "environment": {k: text(k, v) for k, v in content.environment.items() if k not in LIMITS},
        "options": {k: text("", v) for k, v in (content.run.info.get("options") or {}).items()},
        "columns": [column for _, column in SUMMARY.items()],
        "all_columns": [column for _, column in COLUMNS.items()],
    }
    return template("page.html.jinja").render(sections=_sections(values), **values)


def template(name: str) -> Template:
    """A template of a page; what it is given is escaped, and must all be there."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(name)


def _sections(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Anchors and names of the sections that the page has."""
    every = [
        ("findings", "In short", True),
        ("plots", "Plots", values["plots"]),
        ("growth", "How cost grows", values["growth"]),
        ("results", "Results", True),
        ("limits", "Limits", values["limits"]),
        ("failures", "Without a result", values["failures"]),
        ("suspects", "Suspect", values["suspects"]),
        ("time", "Wall time", values["spent"]),
        ("environment", "Environment", True),
        ("columns", "Columns", True),
    ]
    return [(anchor, name) for anchor, name, there in every if there]


def growth(content: Content, plots: list[Plot]) -> dict[str, Any] | None:
    """The section on growth; None where the run has no series and no pair to ask about."""
    if not scaling.anything(content.scaling, content.crossovers):
        return None
    verdicts = scaling.verdicts(content.scaling)
    tables, left_out = scaling.crossover_tables(content.crossovers)
    return {
        "counts": scaling.counts(content.scaling),
        "headers": scaling.HEADERS,
        "verdicts": verdicts[: scaling.MOST_FINDINGS],
        "verdicts_left_out": len(verdicts[scaling.MOST_FINDINGS :]),
        "plots": plot_groups(plots),
        "crossovers": tables,
        "crossovers_left_out": left_out,
    }


def plot_groups(plots: list[Plot]) -> list[dict[str, Any]]:
    """Gather the figures of one chart, each with its SVG as a data: URI."""
    return [
        {"title": title, "plots": [vars(plot) | {"data": data_uri(plot.svg)} for plot in group]}
        for title, group in groupby(plots, key=lambda plot: plot.title)
    ]


def data_uri(svg: Path) -> str:
    """Return an SVG file as a data: URI, isolated from the page's ids and styles."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode("ascii")


def text(name: str, value: Any) -> str:
    """Write a value of run.json for people; bytes where the name says so."""
    if isinstance(value, dict):
        # The one table in an environment is that of the caches, whose values are bytes.
        return ", ".join(f"{key} {text('_bytes', part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text("", part) for part in value)
    if value is None:
        return units.UNKNOWN
    return units.size(value) if name.endswith("_bytes") and type(value) is int else str(value)
