"""Models of several terms, and what needs no statistics: counts and bytes over the predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attnbench.analysis.scaling.model import OVERHEAD
from attnbench.analysis.scaling.results import ExactFit, ModelFit, Uncertain
from attnbench.base import units
from attnbench.report import axes, figures, growth
from attnbench.report.document import Picture
from attnbench.report.figures import FigureKind, Page
from attnbench.report.looks import Look

MODEL = FigureKind(
    name="model",
    title="Models of several terms",
    reading="Above: markers are measured, lines the fitted sum of terms; pale ones are the other"
    " sizes that it was fitted to. Below: each term's share of the fitted time against n, with its"
    " 95 % interval at the largest n.",
)
EXACT = FigureKind(
    name="exact",
    title="Counted and allocated over predicted",
    reading="FLOPs counted / FLOPs of the formula, and bytes of workspace / bytes predicted from"
    " the sizes alone, for every series: 1 means that the prediction is right. The band is ±2 %."
    " A line that ends early was not counted beyond.",
)
BAND = 0.02
NARROWEST = 0.05  # an axis shows at least this much on both sides of 1
QUANTITIES = {
    "flops": "FLOPs: counted / predicted", "workspace": "workspace: measured / predicted",
}  # fmt: skip
SHADES = ("#f4f4f4", "#f2c879", "#08519c", "#74a9cf", "#9e9ac8", "#bdd7c5")  # overhead, then terms


def draw_all(models: Sequence[ModelFit], looks: Mapping[str, Look], folder: Path) -> list[Picture]:
    """Draw each model along n, in small multiples for each workload."""
    ordered = sorted(models, key=lambda m: growth.by_name(m.impl))
    return [
        MODEL.save(_draw_models(page, looks), page, map(_alt, page.items), folder)
        for page in figures.pages(ordered, lambda m: (m.workload, "n"), 4, most=2)
    ]


def _draw_models(page: Page[ModelFit], looks: Mapping[str, Look]) -> Figure:
    models, rows = page.items, -(-len(page.items) // 2)
    shared, rest = units.split_common([model.same.replace(",", " ") for model in models])
    size = (10.8, 5.2 * rows + 0.5)
    figure = figures.figure_of(size, MODEL.title, f"{page.subject}: {shared}")
    grid = figure.subplots(2 * rows, 2, height_ratios=[0.45, 0.55] * rows, squeeze=False)
    pairs = list(zip(grid[::2].flat, grid[1::2].flat, strict=True))
    for ax in chain(*pairs[len(models) :]):
        ax.remove()
    for (upper, lower), model, differs in zip(pairs, models, rest, strict=False):
        for ax in (upper, lower):
            axes.length_axis(ax, [round(n) for n in model.along_n])
            ax.set_xlim(min(model.along_n), max(model.along_n))
        _draw_times(upper, model, looks[model.impl])
        _draw_shares(lower, model)
        found = model.finding
        verdict = f"{growth.raised(found.law)}: {growth.mark(found.verdict)} · " if found else ""
        held_out = f"held-out n: {units.percent(model.held_out)} off"
        title = f"{model.impl} {differs}".strip()
        upper.set_title(f"{title}\n{verdict}{held_out}", loc="left", pad=5, color=figures.INK)
    return figure


def _draw_times(ax: Axes, model: ModelFit, look: Look) -> None:
    """What was measured and fitted, one line for all that differs in n alone."""
    ax.xaxis.set_ticklabels([])
    ax.set_ylabel("time per token" if model.workload == "decode" else "time per call")
    ends = [end for e in model.time_us for end in (*e.ends, e.value)]
    shown = [v for v in (*ends, *model.predicted_us) if 0 < v < math.inf]
    axes.log_axis(ax, "y", axes.bounds(shown), 10, axes.round_time)
    lines: dict[tuple[float, ...], list[tuple[float, Uncertain, float]]] = {}
    for point, time, fitted in zip(model.points, model.time_us, model.predicted_us, strict=True):
        lines.setdefault(_all_else(point), []).append((point["n"], time, fitted))
    largest = _all_else(model.points[model.at_largest])
    for key, rows in lines.items():
        rows.sort(key=lambda row: row[0])
        ns, times, fitted_us = zip(*rows, strict=True)
        alpha = 1.0 if key == largest else 0.4
        ax.plot(ns, fitted_us, color=look.colour, linewidth=1.0, alpha=alpha)
        style = figures.FILLED | {"alpha": alpha}
        growth.points(ax, list(zip(ns, times, strict=True)), look, style)


def _all_else(point: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(point[name] for name in ("batch", "heads", "d"))


def _draw_shares(ax: Axes, model: ModelFit) -> None:
    ax.set_ylim(0, 1)
    shares = [[row[term] for row in model.shares_along] for term in model.shares]
    names = ("overhead" if term == OVERHEAD else growth.raised(term) for term in model.shares)
    labels = map("{}\n{}".format, names, map(_percent, model.shares.values()))
    ax.stackplot(
        model.along_n, shares, labels=labels, colors=SHADES, edgecolor="#666666", linewidth=0.4,
        zorder=1.2,
    )  # fmt: skip
    ax.legend(  # in the order of the areas
        loc="center left", bbox_to_anchor=(1.02, 0.5), reverse=True, frameon=False, fontsize=7.5,
        handlelength=1.4, handleheight=1.6, labelspacing=0.8,
    )  # fmt: skip
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    ax.set_ylabel("share of the time")
    ax.set_xlabel(growth.axis_name("n", model.workload))
    ax.grid(visible=False)


def _percent(share: Uncertain) -> str:
    low, high = share.ends
    if high < 0.005:
        return "< 1 %"
    return f"{100 * share.value:.0f} % ({100 * low:.0f} … {100 * high:.0f})"


def _alt(model: ModelFit) -> str:
    shares = ", ".join(f"{term} {_percent(share)}" for term, share in model.shares.items())
    return f"{model.impl}, {model.same}: shares at n = {units.length(max(model.along_n))}: {shares}"


Points = tuple[tuple[float, float], ...]
Panel = tuple[tuple[str, str, str], list[tuple[str, Points]]]  # workload, axis, quantity; lines


def draw_exact(exact: Sequence[ExactFit], looks: Mapping[str, Look], folder: Path) -> list[Picture]:
    """Draw the ratios, FLOPs and workspace beside each other, for each workload and axis."""
    groups: dict[tuple[str, str, str], list[tuple[str, Points]]] = {}
    for fit in sorted(exact, key=lambda fit: growth.by_name(fit.impl)):
        if points := growth.ratios(fit):
            key = (fit.workload, fit.axis, fit.quantity)
            groups.setdefault(key, []).append((fit.impl, points))
    drawn = []
    for page in figures.pages(groups.items(), lambda panel: panel[0][:2], *growth.PAGES):
        figure, found = figures.panels(len(page.items), 2.8, EXACT.title, page.subject)
        for ax, panel in zip(found, page.items, strict=True):
            _draw_ratios(ax, panel, looks)
        names = dict.fromkeys(impl for _, lines in page.items for impl, _ in lines)
        figures.legend(figure, names, looks)
        drawn.append(EXACT.save(figure, page, map(_alt_exact, page.items), folder))
    return drawn


def _draw_ratios(ax: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    (workload, axis, quantity), lines = panel
    axes.length_axis(ax, sorted({round(x) for _, points in lines for x, _ in points}))
    values = [y for _, points in lines for _, y in points if y > 0]
    low, high = min([*values, 1 - NARROWEST]), max([*values, 1 + NARROWEST])
    if high > 2 or low < 0.5:  # off by more than a factor of two
        axes.log_axis(ax, "y", axes.bounds([low, high]), 2, axes.round_ratio)
    else:
        ax.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    ax.axhspan(1 - BAND, 1 + BAND, color="#e6e6e6", linewidth=0, zorder=0.5)
    ax.axhline(1.0, **axes.DASHED)
    for impl, points in lines:
        ax.plot(
            [x for x, _ in points], [max(y, ax.get_ylim()[0]) for _, y in points],
            color=looks[impl].colour, marker=looks[impl].marker, linewidth=1.0, markersize=6,
            markerfacecolor="none", markeredgewidth=1.0, clip_on=False, zorder=3,
        )  # fmt: skip
    ax.set_title(QUANTITIES[quantity], loc="left", pad=5, color=figures.INK)
    ax.set_xlabel(growth.axis_name(axis, workload))


def _alt_exact(panel: Panel) -> str:
    (*_, quantity), lines = panel
    spans = [(impl, [y for _, y in points]) for impl, points in lines]
    texts = [f"{impl} {min(ys):.3g} to {max(ys):.3g}" for impl, ys in spans]
    return f"{QUANTITIES[quantity]}: {', '.join(dict.fromkeys(texts))}"
