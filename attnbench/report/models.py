"""Models of several terms, and what needs no statistics: counts and bytes over the predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attnbench.analysis.axes import overhead_size
from attnbench.analysis.crossovers import size_text
from attnbench.analysis.scaling.results import Estimate, ExactFit, ModelFit
from attnbench.base import units
from attnbench.report import axes, figures, growth
from attnbench.report.axes import End
from attnbench.report.figures import FigureKind, Page, Plot
from attnbench.report.style import Look

MODEL = FigureKind(
    name="model",
    title="Models of several terms",
    reading="Above: markers are measured, the line is the fitted sum of terms with its 95 % band,"
    " small markers and thin lines the other sizes that it was fitted to."
    " Below: each term's share of the fitted time against n, with its interval at the largest n."
    " For a layer, vertical lines mark where the quadratic terms overtake the projections: in time"
    " (solid, its interval pale) and by counting FLOPs (dashed). A size far below the others, which"
    " is measured for the overhead, is not drawn.",
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


@dataclass(frozen=True)
class Shade:
    """How the area of a term is filled; lightness and hatching survive a grey printer."""

    colour: str
    hatch: str


_OVERHEAD, _LINEAR = Shade("#f4f4f4", "...."), Shade("#c6dbef", "")
_WEIGHTS, _SOFTMAX = Shade("#f2c879", "////"), Shade("#74a9cf", "\\\\\\\\")
_PRODUCTS = Shade("#08519c", "")
SHADES = {  # terms of one meaning look alike, whatever the workload calls them
    "floor": _OVERHEAD, "n": _OVERHEAD, "n d": _LINEAR, "d^2": _WEIGHTS, "n d^2": _WEIGHTS,
    "H n": _SOFTMAX, "H n w": _SOFTMAX, "H n^2": _SOFTMAX,
    "w d": _PRODUCTS, "n w d": _PRODUCTS, "n^2 d": _PRODUCTS,
}  # fmt: skip
_OTHERS = (Shade("#d9d9d9", "xx"), Shade("#bdbdbd", "--"), Shade("#969696", "++"))


def draw_all(models: Sequence[ModelFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw each model that can be shown along n, in small multiples for each workload."""
    usable = sorted(
        (_without_overhead_size(m) for m in models if len(m.along_n) > 1 and m.shares_along),
        key=lambda m: growth.by_name(m.impl),
    )
    return [
        MODEL.save(_draw_models(page, looks), page, map(_alt, page.items), folder)
        for page in figures.pages(usable, lambda m: (m.workload, "n"), 4, most=2)
    ]


def _draw_models(page: Page[ModelFit], looks: Mapping[str, Look]) -> Figure:
    """For each model its times, and below them the shares of its terms."""
    models, columns = page.items, 2
    rows = -(-len(models) // columns)
    shared, rest = growth.apart([model.same for model in models])
    subject = f"{', along '.join(page.group)}{page.place}: {shared}"
    figure = figures.figure_of((10.8, 5.2 * rows + 0.5), MODEL.title, subject)
    grid = figure.subplots(2 * rows, columns, height_ratios=[0.45, 0.55] * rows, squeeze=False)
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        upper, lower = grid[2 * row][column], grid[2 * row + 1][column]
        if index < len(models):
            _draw_times(upper, models[index], looks[models[index].impl])
            _draw_shares(lower, models[index])
            _title(upper, models[index], rest[index])
        else:
            upper.remove()
            lower.remove()
    return figure


def _without_overhead_size(model: ModelFit) -> ModelFit:
    """The model without the size along n that was measured for the overhead, as in the charts."""
    size = overhead_size([round(n) for n in model.along_n])
    if size is None:
        return model
    along = [i for i, n in enumerate(model.along_n) if n > size]
    points = [i for i, point in enumerate(model.points) if point["n"] > size]
    fields = {
        "along_n": along, "shares_along": along, "along_predicted_us": along,
        "points": points, "time_us": points, "predicted_us": points,
    }  # fmt: skip
    kept: dict[str, Any] = {
        name: tuple(getattr(model, name)[i] for i in wanted) for name, wanted in fields.items()
    }
    return replace(model, **kept)


def _title(ax: Axes, model: ModelFit, rest: str) -> None:
    texts = [f"{model.impl} {rest}".strip(), ""]
    if model.finding:
        texts[1] = f"{growth.raised(model.finding.law)}: {growth.mark(model.finding.verdict)}"
    if model.held_out is not None:
        held_out = f"largest n held out: {growth.signed_percent(model.held_out)}"
        texts[1] = f"{texts[1]} · {held_out}".removeprefix(" · ")
    ax.set_title("\n".join(texts), loc="left", pad=5, color="#222222")


def _draw_times(ax: Axes, model: ModelFit, look: Look) -> None:
    axes.length_axis(ax, sorted({round(n) for n in model.along_n}))
    ax.set_xlim(min(model.along_n), max(model.along_n))  # as the shares below
    ax.xaxis.set_ticklabels([])
    ax.set_ylabel("time per token" if model.workload == "decode" else "time per call")
    values = [v for e in (*model.along_predicted_us, *model.time_us) for v in _ends(e)]
    if not values:
        return
    axes.log_axis(ax, "y", axes.bounds(values), 10, axes.round_time)
    if model.along_predicted_us:
        predicted = model.along_predicted_us
        ax.plot(model.along_n, [e.value for e in predicted], color=look.colour, zorder=2.5)
        low = [e.value if e.low is None else e.low for e in predicted]
        high = [e.value if e.high is None else e.high for e in predicted]
        ax.fill_between(model.along_n, low, high, color=look.colour, alpha=0.25, linewidth=0)
    groups: dict[tuple[float, ...], list[tuple[float, Estimate, float]]] = {}
    for point, time, fitted in zip(model.points, model.time_us, model.predicted_us, strict=True):
        if time.value > 0:
            groups.setdefault(_all_else(point), []).append((point["n"], time, fitted.value))
    chosen = _largest(model)
    solid = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
    growth.points(ax, [(n, time) for n, time, _ in groups.pop(chosen, [])], look, solid)
    for rows in groups.values():  # the other points that the model was fitted to, small
        xs, times, fitted_us = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
        ax.plot(xs, fitted_us, color=look.colour, linewidth=0.7, alpha=0.5, zorder=2)
        ax.plot(
            xs, [time.value for time in times], color=look.colour, marker=look.marker,
            markersize=2.6, linestyle="none", markerfacecolor="white", markeredgewidth=0.6,
            alpha=0.8, zorder=2.2,
        )  # fmt: skip


def _ends(estimate: Estimate) -> list[float]:
    """Lower end, value and upper end, as far as they can stand on a logarithmic axis."""
    ends = (estimate.low, estimate.value, estimate.high)
    return [float(v) for v in ends if v is not None and v > 0]


def _largest(model: ModelFit) -> tuple[float, ...]:
    """All but n of the points that the shares are of: where most n were measured, and most work."""
    keys = [_all_else(point) for point in model.points]
    largest = max(point["n"] for point in model.points)
    last = [key for key, point in zip(keys, model.points, strict=True) if point["n"] == largest]
    return max(last, key=lambda key: (keys.count(key), key))


def _all_else(point: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(point.get(name, 0.0) for name in ("batch", "heads", "d"))


def _draw_shares(ax: Axes, model: ModelFit) -> None:
    axes.length_axis(ax, sorted({round(n) for n in model.along_n}))
    ax.set(xlim=(min(model.along_n), max(model.along_n)), ylim=(0, 1))
    shades, base = shades_of(model.terms), [0.0] * len(model.along_n)
    for term in model.terms:
        shares = [row.get(term, 0.0) for row in model.shares_along]
        if max(shares) <= 0.0005:
            continue
        top = [b + share for b, share in zip(base, shares, strict=True)]
        share = model.shares.get(term)
        ax.fill_between(
            model.along_n, base, top, edgecolor="#666666", linewidth=0.4, zorder=1.2,
            facecolor=shades[term].colour, hatch=shades[term].hatch,
            label=growth.raised(term) + (f"\n{_percent(share)}" if share else ""),
        )  # fmt: skip
        base = top
    ax.legend(  # in the order of the areas
        loc="center left", bbox_to_anchor=(1.02, 0.5), reverse=True, frameon=False, fontsize=7.5,
        handlelength=1.2, handleheight=1.6, labelspacing=0.9,
    )  # fmt: skip
    _draw_overtaking(ax, model)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    ax.set_ylabel("share of the time")
    ax.set_xlabel(growth.axis_name("n", model.workload))
    ax.grid(visible=False)


def shades_of(terms: Sequence[str]) -> dict[str, Shade]:
    """The fill of each term: its own, or one of a few greys if it is not known here or taken."""
    found: dict[str, Shade] = {}
    others = 0
    for term in terms[::-1]:  # the highest order, which comes last, keeps its own
        shade = SHADES.get(term)
        if shade is None or shade in found.values():
            shade, others = _OTHERS[others % len(_OTHERS)], others + 1
        found[term] = shade
    return found


def _percent(share: Estimate) -> str:
    if share.value < 0.005 and (share.high or 0.0) < 0.005:
        return "< 1 %"
    if share.low is None or share.high is None:
        return f"{100 * share.value:.0f} %"
    return f"{100 * share.value:.0f} % ({100 * share.low:.0f} … {100 * share.high:.0f})"


def _draw_overtaking(ax: Axes, model: ModelFit) -> None:
    """Where the quadratic terms overtake the projections, in time and by counting FLOPs."""
    low, high = ax.get_xlim()
    marks = []
    if model.overtakes_n is not None:
        left, right = model.overtakes_n.low, model.overtakes_n.high
        if left is not None and right is not None and max(low, left) < min(high, right):
            span = (max(low, left), min(high, right))
            ax.axvspan(*span, facecolor="white", alpha=0.55, linewidth=0, zorder=2)
        marks.append((model.overtakes_n.value, "in time", "-"))
    if model.overtakes_theory is not None:
        marks.append((model.overtakes_theory, "in FLOPs", "--"))
    for index, (n, name, stroke) in enumerate(sorted(marks)):
        inside = low <= n <= high
        if inside:
            ax.axvline(n, color="black", linewidth=1.2, linestyle=stroke, zorder=2.5)
        shown = min(max(n, low), high)
        place = math.log(shown / low) / math.log(high / low)
        right_of = place < (0.4 if index == 0 and len(marks) > 1 else 0.6)
        ax.annotate(
            f"{name}: n = {size_text(n)}" + ("" if inside else ", beyond"),
            (shown, 0.97 - 0.11 * index), xycoords=("data", "axes fraction"),
            xytext=(3 if right_of else -3, 0), textcoords="offset points",
            ha="left" if right_of else "right", va="top", fontsize=7, zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9},
        )  # fmt: skip


def _alt(model: ModelFit) -> str:
    shares = ", ".join(f"{term} {_percent(share)}" for term, share in model.shares.items())
    text = f"{model.impl}, {model.same}: shares at n = {units.length(max(model.along_n))}: {shares}"
    if model.overtakes_n is not None:
        text += f", the quadratic terms overtake at n = {growth.interval(model.overtakes_n, 0)}"
    return text


@dataclass(frozen=True)
class Panel:
    """The series of one quantity, workload and axis, each with its (size, ratio)s."""

    workload: str
    axis: str
    quantity: str
    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]  # by implementation


def draw_exact(exact: Sequence[ExactFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw the ratios, FLOPs and workspace beside each other, for each workload and axis."""
    groups: dict[tuple[str, str, str], list[tuple[str, tuple[tuple[float, float], ...]]]] = {}
    for fit in sorted(exact, key=lambda fit: growth.by_name(fit.impl)):
        if points := growth.ratios(fit):
            key = (fit.workload, fit.axis, fit.quantity)
            groups.setdefault(key, []).append((fit.impl, points))
    found = [Panel(*key, tuple(own)) for key, own in groups.items()]
    drawn = []
    for page in growth.pages(found, lambda p: (p.workload, p.axis)):
        subject = ", along ".join(page.group) + page.place
        figure, axes_ = figures.panels(len(page.items), 2.8, EXACT.title, subject)
        ends = [_draw_ratios(ax, panel, looks) for ax, panel in zip(axes_, page.items, strict=True)]
        figures.lay_out(figure)
        for ax, own in zip(axes_, ends, strict=True):
            axes.label_ends(ax, own, looks)
        drawn.append(EXACT.save(figure, page, map(_alt_exact, page.items), folder))
    return drawn


def _draw_ratios(ax: Axes, panel: Panel, looks: Mapping[str, Look]) -> list[End]:
    """Draw the lines; of several of one implementation, the end furthest off 1 is named."""
    axes.length_axis(ax, sorted({round(x) for _, points in panel.lines for x, _ in points}))
    values = [y for _, points in panel.lines for _, y in points if y > 0]
    low, high = min([*values, 1 - NARROWEST]), max([*values, 1 + NARROWEST])
    if high > 2 or low < 0.5:  # off by more than a factor of two
        axes.log_axis(ax, "y", axes.bounds([low, high]), 2, axes.round_ratio)
    else:
        ax.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    ax.axhspan(1 - BAND, 1 + BAND, color="#e6e6e6", linewidth=0, zorder=0.5)
    ax.axhline(1.0, **axes.DASHED)
    ends: dict[str, End] = {}
    for impl, points in panel.lines:
        look = looks[impl]
        xs, ys = [x for x, _ in points], [max(y, ax.get_ylim()[0]) for _, y in points]
        ax.plot(
            xs, ys, color=look.colour, marker=look.marker, linewidth=1.0, markersize=6,
            markerfacecolor="none", markeredgewidth=1.0, clip_on=False, zorder=3,
        )  # fmt: skip
        if impl not in ends or abs(ys[-1] - 1) > abs(ends[impl].y - 1):
            ends[impl] = End(impl, xs[-1], ys[-1])
    ax.set_title(QUANTITIES[panel.quantity], loc="left", pad=5, color="#222222")
    ax.set_xlabel(growth.axis_name(panel.axis, panel.workload))
    return list(ends.values())


def _alt_exact(panel: Panel) -> str:
    texts = []
    for impl, points in panel.lines:
        ys = [y for _, y in points]
        texts.append(f"{impl} {min(ys):.3g} to {max(ys):.3g}")
    return f"{QUANTITIES[panel.quantity]}: {', '.join(dict.fromkeys(texts))}"
