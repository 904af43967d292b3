"""The fitted models of several terms as drawn: the time, and each term's share of it against n."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from attnbench.analysis.axes import overhead_size
from attnbench.analysis.crossovers import size_text
from attnbench.analysis.scaling.results import Estimate, ModelFit
from attnbench.base import units
from attnbench.report import growth, plots, scales
from attnbench.report.growth import Kind
from attnbench.report.labels import LINE_INCHES, spread
from attnbench.report.plots import Plot
from attnbench.report.style import QUIET, Look

MODEL = Kind(
    name="model",
    title="Models of several terms",
    reading="Above: markers are measured, the line is the fitted sum of terms with its 95 % band,"
    " small markers and thin lines the other sizes that it was fitted to."
    " Below: each term's share of the fitted time against n, with its interval at the largest n."
    " For a layer, vertical lines mark where the quadratic terms overtake the projections: in time"
    " (solid, its interval pale) and by counting FLOPs (dashed). A size far below the others, which"
    " is measured for the floor, is not drawn.",
)
HEIGHT_INCHES = 4.3
TOP_PART, GAP_PART = 0.42, 0.1  # of the height: the times, and the room below them


@dataclass(frozen=True)
class Shade:
    """How the area of a term is filled; lightness and hatching survive a grey printer."""

    colour: str
    hatch: str


_FLOOR, _LINEAR = Shade("#f4f4f4", "...."), Shade("#c6dbef", "")
_WEIGHTS, _SOFTMAX = Shade("#f2c879", "////"), Shade("#74a9cf", "\\\\\\\\")
_PRODUCTS = Shade("#08519c", "")
SHADES = {  # terms of one meaning look alike, whatever the workload calls them
    "floor": _FLOOR,
    "n": _FLOOR,
    "n d": _LINEAR,
    "d^2": _WEIGHTS,
    "n d^2": _WEIGHTS,
    "H n": _SOFTMAX,
    "H n w": _SOFTMAX,
    "H n^2": _SOFTMAX,
    "w d": _PRODUCTS,
    "n w d": _PRODUCTS,
    "n^2 d": _PRODUCTS,
}
_OTHERS = (Shade("#d9d9d9", "xx"), Shade("#bdbdbd", "--"), Shade("#969696", "++"))


def draw_all(models: Sequence[ModelFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw each model that can be shown along n, in small multiples for each workload."""
    usable = sorted(
        (_without_floor(m) for m in models if len(m.along_n) > 1 and m.shares_along),
        key=lambda m: growth.by_name(m.impl),
    )
    drawn = []
    for page, here in growth.paged(usable, lambda m: (m.workload, "n"), 4, most=2):
        places = growth.layout(len(here), height=HEIGHT_INCHES, right=1.55, width=3.0, titles=2)
        figure = growth.figure_of(places.size)
        shared, rest = growth.apart([model.same for model in here])
        for index, model in enumerate(here):
            left, bottom, width, height = places.place(index)
            below = height * (1 - TOP_PART - GAP_PART)
            lower = figure.add_axes((left, bottom, width, below))
            upper = figure.add_axes((
                left, bottom + below + GAP_PART * height, width, TOP_PART * height,
            ))  # fmt: skip
            _draw_times(upper, model, looks[model.impl])
            _draw_shares(lower, model, below * places.size[1])
            _title(upper, model, rest[index])
        plots.head(figure, MODEL.title, f"{page.title}: {shared}")
        drawn.append(growth.save(figure, MODEL, page, map(_alt, here), folder))
    return drawn


def _without_floor(model: ModelFit) -> ModelFit:
    """The model without the one size along n that was measured for the floor, as in the charts."""
    floor = overhead_size([round(n) for n in model.along_n])
    if floor is None:
        return model
    along = [i for i, n in enumerate(model.along_n) if n > floor]
    points = [i for i, point in enumerate(model.points) if point["n"] > floor]
    return replace(
        model,
        along_n=tuple(model.along_n[i] for i in along),
        shares_along=tuple(model.shares_along[i] for i in along),
        along_predicted_us=tuple(model.along_predicted_us[i] for i in along),
        points=tuple(model.points[i] for i in points),
        time_us=tuple(model.time_us[i] for i in points),
        predicted_us=tuple(model.predicted_us[i] for i in points),
    )


def _title(ax: Axes, model: ModelFit, rest: str) -> None:
    verdict = growth.mark(model.finding.verdict if model.finding else None)
    law = growth.raised(model.finding.law) if model.finding else ""
    held_out = ""
    if model.held_out is not None:
        held_out = f"largest n held out: {100 * model.held_out:+.1f} %".replace("-", "−")
    second = " · ".join(text for text in (f"{law}: {verdict}" if verdict else "", held_out) if text)
    ax.set_title(f"{model.impl} {rest}".strip() + f"\n{second}", loc="left", pad=5, color="#222222")


def _draw_times(ax: Axes, model: ModelFit, look: Look) -> None:
    lengths = sorted({round(n) for n in model.along_n})
    measured = _measured(model)
    drawn = (*model.along_predicted_us, *model.time_us)
    values = [v for estimate in drawn for v in _ends(estimate)]
    scales.length_axis(ax, lengths)
    ax.set_xlim(lengths[0], lengths[-1])  # as the shares below
    if not values:
        return
    scales.log_axis(ax, "y", scales.bounds(values), 10, scales.round_time)
    if model.along_predicted_us:
        predicted = model.along_predicted_us
        ax.plot(model.along_n, [e.value for e in predicted], color=look.colour, linewidth=1.2)
        band = [_ends(e) for e in predicted]
        ax.fill_between(
            model.along_n, [b[0] for b in band], [b[-1] for b in band], color=look.colour,
            alpha=0.25, linewidth=0,
        )  # fmt: skip
    _draw_others(ax, model, look)
    solid = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
    growth.points(ax, measured, look, solid)
    ax.set_xticklabels([])
    ax.set_ylabel("time per token" if model.workload == "decode" else "time per call")


def _ends(estimate: Estimate) -> list[float]:
    """Lower end, value and upper end, as far as they can stand on a logarithmic axis."""
    ends = (estimate.low, estimate.value, estimate.high)
    return [float(v) for v in ends if v is not None and v > 0]


def _measured(model: ModelFit) -> list[tuple[float, Estimate]]:
    """The points along n with all else as at the largest, of which the shares are."""
    chosen = _largest(model)
    return [
        (float(point["n"]), time)
        for point, time in zip(model.points, model.time_us, strict=True)
        if _all_else(point) == chosen and time.value > 0
    ]


def _largest(model: ModelFit) -> tuple[float, ...]:
    """All but n of the point that the shares are of: where most n were measured, and most work."""
    keys = [_all_else(point) for point in model.points]
    largest = max(point["n"] for point in model.points)
    last = [key for key, point in zip(keys, model.points, strict=True) if point["n"] == largest]
    return max(last, key=lambda key: (keys.count(key), key))


def _draw_others(ax: Axes, model: ModelFit, look: Look) -> None:
    """The other points that the model was fitted to, small, with the time it says as a line."""
    chosen = _largest(model)
    others: dict[tuple[float, ...], list[tuple[float, float, float]]] = {}
    for point, time, predicted in zip(model.points, model.time_us, model.predicted_us, strict=True):
        key = _all_else(point)
        if key != chosen and time.value > 0 and predicted.value > 0:
            others.setdefault(key, []).append((point["n"], time.value, predicted.value))
    for rows in others.values():
        xs, times, said = zip(*sorted(rows), strict=True)
        ax.plot(xs, said, color=look.colour, linewidth=0.7, alpha=0.5, zorder=2)
        ax.plot(
            xs, times, color=look.colour, marker=look.marker, markersize=2.6, linestyle="none",
            markerfacecolor="white", markeredgewidth=0.6, alpha=0.8, zorder=2.2,
        )  # fmt: skip


def _all_else(point: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(point.get(name, 0.0) for name in ("batch", "heads", "d"))


def _draw_shares(ax: Axes, model: ModelFit, height_inches: float) -> None:
    scales.length_axis(ax, sorted({round(n) for n in model.along_n}))
    low, high = min(model.along_n), max(model.along_n)
    ax.set_xlim(low, high)
    ax.set_ylim(0, 1)
    terms = [t for t in model.terms if any(row.get(t, 0.0) > 0.0005 for row in model.shares_along)]
    stacked = [[row.get(term, 0.0) for row in model.shares_along] for term in terms]
    shades = shades_of(model.terms)
    base, middles = [0.0] * len(model.along_n), []
    for term, share in zip(terms, stacked, strict=True):
        top = [b + s for b, s in zip(base, share, strict=True)]
        style: dict[str, Any] = {"facecolor": shades[term].colour, "hatch": shades[term].hatch}
        ax.fill_between(
            model.along_n, base, top, edgecolor="#666666", linewidth=0.4, zorder=1.2, **style
        )
        middles.append((base[-1] + top[-1]) / 2)
        base = top
    _name_terms(ax, model, terms, middles, height_inches)
    _draw_overtaking(ax, model)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
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


def _name_terms(
    ax: Axes, model: ModelFit, terms: Sequence[str], middles: Sequence[float], height: float
) -> None:
    """Write each term beside its area's right end, with its share there and the interval."""
    shades = shades_of(model.terms)
    places = spread(middles, 2.0 * LINE_INCHES / height, 0.06, 0.94)
    for term, middle, place in zip(terms, middles, places, strict=True):
        ax.plot(
            [1.0, 1.04], [middle, place], transform=ax.transAxes, color=QUIET, linewidth=0.6,
            clip_on=False,
        )  # fmt: skip
        ax.plot(
            [1.065], [place], transform=ax.transAxes, marker="s", markersize=6.5, clip_on=False,
            markerfacecolor=shades[term].colour, markeredgecolor="#666666", markeredgewidth=0.6,
        )  # fmt: skip
        share = model.shares.get(term)
        text = growth.raised(term) + (f"\n{_percent(share)}" if share else "")
        ax.text(1.10, place, text, transform=ax.transAxes, fontsize=7.5, va="center")


def _percent(share: Estimate) -> str:
    if share.value < 0.005 and (share.high or 0.0) < 0.005:
        return "< 1 %"
    if share.low is None or share.high is None:
        return f"{100 * share.value:.0f} %"
    return f"{100 * share.value:.0f} % ({100 * share.low:.0f} … {100 * share.high:.0f})"


def _draw_overtaking(ax: Axes, model: ModelFit) -> None:
    marks = []
    low, high = ax.get_xlim()
    if model.overtakes_n is not None:
        found = model.overtakes_n
        if found.low is not None and found.high is not None:
            left, right = max(low, found.low), min(high, found.high)
            if left < right:
                ax.axvspan(left, right, facecolor="white", alpha=0.55, linewidth=0, zorder=2)
        marks.append((found.value, "in time", "-"))
    if model.overtakes_theory is not None:
        marks.append((model.overtakes_theory, "in FLOPs", "--"))
    for index, (n, name, stroke) in enumerate(sorted(marks)):
        text = f"{name}: n = {size_text(n)}"
        inside = low <= n <= high
        place = math.log(max(n, low) / low) / math.log(high / low)
        right = place < (0.4 if index == 0 and len(marks) > 1 else 0.6)
        if inside:
            ax.axvline(n, color="black", linewidth=1.2, linestyle=stroke, zorder=2.5)
        ax.annotate(
            text if inside else f"{text}, beyond",
            (min(max(n, low), high), 0.97 - 0.11 * index), xycoords=("data", "axes fraction"),
            xytext=(3 if right else -3, 0), textcoords="offset points",
            ha="left" if right else "right", va="top", fontsize=7, zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9},
        )  # fmt: skip


def _alt(model: ModelFit) -> str:
    shares = ", ".join(f"{term} {_percent(share)}" for term, share in model.shares.items())
    n = max(model.along_n)
    text = f"{model.impl}, {model.same}: shares at n = {units.length(n)}: {shares}"
    if model.overtakes_n is not None:
        text += f", the quadratic terms overtake at n = {growth.interval(model.overtakes_n, 0)}"
    return text
