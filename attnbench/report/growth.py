"""What the figures of growth share: how they are grouped, laid out, written and worded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attnbench.analysis.scaling.results import Estimate
from attnbench.analysis.table import BASELINE
from attnbench.base import units
from attnbench.report import plots
from attnbench.report.plots import Layout, Plot
from attnbench.report.style import Look
from attnbench.schema.finding import SIGNS, Verdict
from attnbench.theory.traits import TRAITS, n_name

MOST_PAGES = 1  # of one kind of figure for one workload and axis; the table has every verdict
PANELS_A_PAGE = 6
AXIS_NAMES = {"d": "head dim D", "heads": "heads H", "batch": "batch B"}

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of figure: its name in file names, its title, and how to read it."""

    name: str
    title: str
    reading: str


@dataclass(frozen=True)
class Page:
    """What one figure is called; `left_out` counts the panels for which there is no figure."""

    slug: str
    title: str
    left_out: int = 0


def mark(verdict: Verdict | None) -> str:
    """A verdict with its sign, readable without colour; nothing where there is none."""
    return f"{SIGNS[verdict]} {verdict}" if verdict else ""


def raised(text: str) -> str:
    """A law with whole powers raised: `n^2 d` as `n² d`; others stay, as `n^1.5`."""
    digits = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return re.sub(r"\^(\d+)(?![\d./])", lambda found: found[1].translate(digits), text)


def interval(estimate: Estimate | None, count: int = 2) -> str:
    """An exponent with its interval: `1.98 (1.95 … 2.01)`, or `–`."""
    if estimate is None:
        return units.UNKNOWN
    value = f"{estimate.value:.{count}f}"
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval)"
    return f"{value} ({estimate.low:.{count}f} … {estimate.high:.{count}f})"


def axis_name(axis: str, workload: str) -> str:
    """What stands below an axis along which a series runs."""
    if axis == "n":
        return n_name(workload) if workload in TRAITS.names() else "sequence length n"
    if axis == "heads at fixed width":
        return "heads H at fixed width"
    return "model width E" if axis == "d" and workload != "attention" else AXIS_NAMES[axis]


def apart(texts: Sequence[str]) -> tuple[str, list[str]]:
    """What all texts have in common, word by word, and what is left of each."""
    words = [text.replace(",", " ").split() for text in texts]
    common = [word for word in dict.fromkeys(words[0]) if all(word in row for row in words)]
    return " ".join(common), [" ".join(w for w in row if w not in common) for row in words]


def by_name(impl: str) -> tuple[bool, str]:
    """A key for sorting implementations: the baseline first."""
    return impl != BASELINE, impl


def slug(*parts: str) -> str:
    """A file name from texts."""
    return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(parts)).strip("-").lower()


def paged(
    items: Sequence[Item],
    key: Callable[[Item], tuple[str, str]],
    size: int = PANELS_A_PAGE,
    most: int = MOST_PAGES,
) -> list[tuple[Page, tuple[Item, ...]]]:
    """Group items by workload and axis, in the order of their first, and cut groups into pages."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    found = []
    for names, group in groups.items():
        pages = [tuple(group[i : i + size]) for i in range(0, len(group), size)]
        left_out = sum(map(len, pages[most:]))
        for number, page in enumerate(pages[:most], start=1):
            several = len(pages) > 1
            stem = slug(*names, *([str(number)] if several else []))
            title = f"{names[0]}, along {names[1]}" + (
                f" ({number} of {len(pages)})" if several else ""
            )
            here = Page(stem, title, left_out if number == 1 else 0)
            found.append((here, page))
    return found


def layout(
    count: int, *, height: float, right: float, width: float = 3.5, titles: int = 1
) -> Layout:
    """Room for `count` panels with titles of so many lines, two beside each other."""
    columns = min(count, 2)
    return Layout(
        columns=columns, rows=-(-count // columns), width=5.4 if columns == 1 else width,
        height=height, left=0.85, right=right, strip=0.16 * (titles - 1),
    )  # fmt: skip


def points(
    ax: Axes, found: Sequence[tuple[float, Estimate]], look: Look, style: Mapping[str, Any]
) -> None:
    """Draw (size, time) with intervals, those that a logarithmic axis can show."""
    known = [(x, e) for x, e in found if math.isfinite(e.value) and e.value > 0]
    if not known:
        return
    bars = [
        [max(0.0, e.value - (e.value if e.low is None else e.low)) for _, e in known],
        [max(0.0, (e.value if e.high is None else e.high) - e.value) for _, e in known],
    ]
    ax.errorbar(
        [x for x, _ in known], [e.value for _, e in known], yerr=bars, color=look.colour,
        marker=look.marker, linestyle="none", elinewidth=1.0, capsize=1.8, clip_on=False, **style,
    )  # fmt: skip


def figure_of(size: tuple[float, float]) -> Figure:
    """An empty figure of this size in inches, which needs no display."""
    figure = Figure(figsize=size, dpi=160)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, kind: Kind, page: Page, alt: Iterable[str], folder: Path) -> Plot:
    """Write a figure and the texts that go with it."""
    svg, png = plots.write(figure, f"{kind.name}-{page.slug}", folder)
    drawn = Plot(
        chart=kind.name, title=kind.title, subject=page.title, reading=kind.reading,
        alt=f"{kind.title}, {page.title}: {'; '.join(alt)}.", svg=svg, png=png,
    )  # fmt: skip
    if not page.left_out:
        return drawn
    note = f"{page.left_out} more such panels are left out; the table has their verdicts."
    return replace(drawn, reading=f"{drawn.reading} {note}")
