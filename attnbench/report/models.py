"""Models of several terms: the sum that was fitted, and the share of each term."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attnbench.analysis.scaling.model import OVERHEAD
from attnbench.analysis.scaling.results import ModelFit, Uncertain
from attnbench.base import units
from attnbench.report import axes, figures, growth
from attnbench.report.axes import End
from attnbench.report.figures import FigureKind, Margins, Size, Sketch
from attnbench.report.looks import Look
from attnbench.theory import costs

MODEL = FigureKind(
    name="model",
    title="Models of several terms",
    reading="Above: markers are measured, lines the fitted sum of terms, named at their ends;"
    " pale ones are the other sizes that it was fitted to. Below: each term's share of the fitted"
    " time against n, with its 95 % interval at the largest n; of a layer, upright lines are where"
    " n² d overtakes n d², by useful FLOPs (dashed) and as fitted, on its interval.",
)
SHADES = ("#f4f4f4", "#f2c879", "#08519c", "#74a9cf", "#9e9ac8", "#bdd7c5")  # overhead, then terms


def sketches(models: Sequence[ModelFit], looks: Mapping[str, Look]) -> Iterator[Sketch]:
    """Each model along n, in small multiples for each workload."""
    ordered = sorted(models, key=lambda m: growth.by_name(m.impl))
    for page in figures.pages(ordered, lambda m: (m.workload, "n"), 4, most=2):
        shared, rest = units.split_common([m.same.replace(",", " ") for m in page.items])
        yield Sketch(
            kind=MODEL, draw=partial(_draw, page.items, rest, looks), slug=page.slug,
            caption=f"{page.subject}: {shared}", left_out=page.left_out,
            alt=[
                f"{m.impl}, {m.same}: shares at n = {units.length(max(m.along_n))}: "
                + ", ".join(f"{term} {_percent(share)}" for term, share in m.shares.items())
                for m in page.items
            ],
        )  # fmt: skip


def _draw(
    models: Sequence[ModelFit], rest: Sequence[str], looks: Mapping[str, Look], size: Size
) -> Figure:
    terms = [text for model in models for text in _terms(model)]
    right = max(figures.width_of(line) for text in terms for line in text.split("\n")) + 0.45
    narrow = size.width is not None and size.width < figures.NARROW
    around = Margins(right=right, top=2.85 + 0.3 * narrow)
    figure, panels = figures.panels([5.2] * len(models), around, size)
    for lower, model, differs in zip(panels, models, rest, strict=True):
        box = lower.get_position()
        total = figure.get_figheight()
        upper = figure.add_axes((box.x0, box.y1 + 0.2 / total, box.width, 1.95 / total))
        for ax in (upper, lower):
            axes.length_axis(ax, [round(n) for n in model.along_n])
            ax.set_xlim(min(model.along_n), max(model.along_n))
        _draw_times(upper, model, looks[model.impl])
        _draw_shares(lower, model)
        found = model.finding
        verdict = f"{growth.raised(found.law)}: {growth.mark(found.verdict)}" if found else ""
        parts = [verdict, f"held-out n: {units.percent(model.held_out)} off"]
        crossings = _crossings(model)
        for ax in (upper, lower) if crossings else ():
            low, high = ax.get_xlim()
            for _, at, dashes in crossings:
                if low <= at.value <= high:
                    ax.axvline(at.value, color=figures.INK, linestyle=dashes, zorder=2)
                ends = np.clip(at.ends, low, high)
                ax.axvspan(*ends, color=figures.INK, alpha=0.12, linewidth=0, zorder=1.5)
        join = "\n" if narrow else " · "
        lines = [f"{model.impl} {differs}".strip(), join.join(filter(None, parts))]
        lines += [join.join(text for text, *_ in crossings)] * bool(crossings)
        upper.set_title("\n".join(lines), loc="left", pad=5, color=figures.INK)
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
    names = []
    for key, rows in lines.items():
        rows.sort(key=lambda row: row[0])
        ns, times, fitted_us = zip(*rows, strict=True)
        names.append(End(ns[-1], fitted_us[-1], _size(key, lines), Look(look.colour, "")))
        alpha = 1.0 if key == largest else 0.4
        ax.plot(ns, fitted_us, color=look.colour, linewidth=1.0, alpha=alpha)
        style = figures.FILLED | {"alpha": alpha}
        growth.points(ax, list(zip(ns, times, strict=True)), look, style)
    axes.label_ends(ax, names)


def _all_else(point: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(point[name] for name in ("batch", "heads", "d"))


def _size(key: tuple[float, ...], keys: Iterable[tuple[float, ...]]) -> str:
    """`d=256`, and what else differs from line to line."""
    parts = zip("BHd", key, zip(*keys, strict=True), strict=True)
    return " ".join(f"{name}={x:g}" for name, x, all_ in parts if name == "d" or len({*all_}) > 1)


def _draw_shares(ax: Axes, model: ModelFit) -> None:
    ax.set_ylim(0, 1)
    shares = [[row[term] for row in model.shares_along] for term in model.shares]
    ax.stackplot(
        model.along_n, shares, labels=_terms(model), colors=SHADES, edgecolor="#666666",
        linewidth=0.4, zorder=1.2,
    )  # fmt: skip
    ax.legend(  # in the order of the areas
        loc="center left", bbox_to_anchor=(1.02, 0.5), reverse=True, frameon=False, fontsize=7.5,
        handlelength=1.4, handleheight=1.6, labelspacing=0.8,
        title=f"at n = {max(model.along_n):.0f}", title_fontsize=7.5, alignment="left",
    )  # fmt: skip
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    ax.set_ylabel("share of the time")
    point = model.points[model.at_largest]
    ax.set_xlabel(f"{growth.axis_name('n', model.workload)}, d = {point['d']:g}")
    ax.grid(visible=False)


def _crossings(model: ModelFit) -> list[tuple[str, Uncertain, Any]]:
    """Where n² d overtakes n d² in a layer, by useful FLOPs and by time: text, n, dashes."""
    if model.workload != "layer" or model.crossing is None:
        return []
    low, high = model.crossing.ends
    of_time = f"at n = {model.crossing.value:.0f} ({low:.0f} … {high:.0f}) by time"
    found: list[tuple[str, Uncertain, Any]]
    found = [(of_time.replace("inf", "∞"), model.crossing, "-")]
    if by_flops := costs.flops_crossing(model.cells[model.at_largest].case):
        text = f"n² d overtakes at n = {by_flops:.0f} by FLOPs"
        found.insert(0, (text, Uncertain(value=by_flops), (0, (4, 3))))
    return found


def _terms(model: ModelFit) -> list[str]:
    names = ("overhead" if term == OVERHEAD else growth.raised(term) for term in model.shares)
    return list(map("{}\n{}".format, names, map(_percent, model.shares.values())))


def _percent(share: Uncertain) -> str:
    low, high = share.ends
    if high < 0.005:
        return "< 1 %"
    return f"{100 * share.value:.0f} % ({100 * low:.0f} … {100 * high:.0f})"
