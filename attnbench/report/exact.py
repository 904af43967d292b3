"""What needs no statistics as drawn: counted FLOPs and measured workspace over the predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from attnbench.analysis.scaling.results import ExactFit
from attnbench.report import growth, plots, scales
from attnbench.report.growth import Kind
from attnbench.report.labels import LINE_INCHES, End, label_ends
from attnbench.report.plots import Plot
from attnbench.report.style import QUIET, Look

EXACT = Kind(
    name="exact",
    title="Counted and allocated over predicted",
    reading="FLOPs counted / FLOPs of the formula, and bytes of workspace / bytes predicted from"
    " the sizes alone, for every series: 1 means that the prediction is right. The band is ±2 %."
    " A line that ends early was not counted beyond.",
)
BAND = 0.02
NARROWEST = 0.05  # an axis shows at least this much on both sides of 1
NAMES = {"flops": "FLOPs: counted / predicted", "workspace": "workspace: measured / predicted"}


@dataclass(frozen=True)
class Panel:
    """The series of one quantity, workload and axis, with their ratios."""

    workload: str
    axis: str
    quantity: str
    lines: tuple[tuple[ExactFit, tuple[tuple[float, float], ...]], ...]


def draw_all(exact: Sequence[ExactFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw the ratios, FLOPs and workspace beside each other, for each workload and axis."""
    drawn = []
    for page, here in growth.paged(_panels(exact), lambda p: (p.workload, p.axis)):
        names = max(len({fit.impl for fit, _ in panel.lines}) for panel in here)
        longest = max(len(fit.impl[:20]) for panel in here for fit, _ in panel.lines)
        height = max(1.9, LINE_INCHES * names + 0.3)
        places = growth.layout(len(here), height=height, right=0.3 + 0.073 * longest, width=3.2)
        figure = growth.figure_of(places.size)
        for index, panel in enumerate(here):
            ax = figure.add_axes(places.place(index))
            _draw(ax, panel, looks)
        plots.head(figure, EXACT.title, page.title)
        drawn.append(growth.save(figure, EXACT, page, map(_alt, here), folder))
    return drawn


def ratios(fit: ExactFit) -> tuple[tuple[float, float], ...]:
    """(size, measured / predicted) where both are known; nothing over nothing is 1."""
    found = []
    for size, measured, predicted in zip(fit.sizes, fit.measured, fit.predicted, strict=True):
        if measured is None or predicted is None or (measured and not predicted):
            continue
        found.append((float(size), measured / predicted if predicted else 1.0))
    return tuple(found)


def _panels(exact: Sequence[ExactFit]) -> list[Panel]:
    groups: dict[tuple[str, str, str], list[ExactFit]] = {}
    for fit in exact:
        groups.setdefault((fit.workload, fit.axis, fit.quantity), []).append(fit)
    found = []
    for (workload, axis, quantity), fits in groups.items():
        lines = tuple(
            (fit, ratios(fit)) for fit in sorted(fits, key=lambda f: growth.by_name(f.impl))
        )
        lines = tuple((fit, points) for fit, points in lines if points)
        if lines:
            found.append(Panel(workload, axis, quantity, lines))
    return found


def _draw(ax: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    sizes = sorted({round(x) for _, points in panel.lines for x, _ in points})
    values = [y for _, points in panel.lines for _, y in points]
    scales.length_axis(ax, sizes)
    _value_axis(ax, values)
    ax.axhspan(1 - BAND, 1 + BAND, color="#e6e6e6", linewidth=0, zorder=0.5)
    ax.axhline(1.0, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    ends: dict[str, End] = {}
    low = ax.get_ylim()[0]
    for fit, points in panel.lines:
        look = looks[fit.impl]
        xs, ys = [x for x, _ in points], [max(y, low) for _, y in points]
        ax.plot(
            xs, ys, color=look.colour, marker=look.marker, linewidth=1.0, markersize=6,
            markerfacecolor="none", markeredgewidth=1.0, clip_on=False, zorder=3,
        )  # fmt: skip
        # Of several series of one implementation, the one that is furthest off is named.
        if fit.impl not in ends or abs(ys[-1] - 1) > abs(ends[fit.impl].y - 1):
            ends[fit.impl] = End(fit.impl, xs[-1], ys[-1])
    label_ends(ax, list(ends.values()), looks)
    ax.set_title(NAMES[panel.quantity], loc="left", pad=5, color="#222222")
    ax.set_xlabel(growth.axis_name(panel.axis, panel.workload))


def _value_axis(ax: Axes, values: Sequence[float]) -> None:
    """Linear around 1; logarithmic where something is off by more than a factor of two."""
    positive = [v for v in values if v > 0]
    low, high = min([*positive, 1 - NARROWEST]), max([*positive, 1 + NARROWEST])
    if high > 2 or low < 0.5:
        scales.log_axis(ax, "y", scales.bounds([low, high]), 2, scales.round_ratio)
        return
    room = 0.1 * (high - low)
    ax.set_ylim(low - room, high + room)


def _alt(panel: Panel) -> str:
    texts = []
    for fit, points in panel.lines:
        ys = [y for _, y in points]
        texts.append(f"{fit.impl} {min(ys):.3g} to {max(ys):.3g}")
    return f"{NAMES[panel.quantity]}: {', '.join(dict.fromkeys(texts))}"
