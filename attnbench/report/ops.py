"""Figures of profiles: a waterfall from one time to another, where time goes, memory over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from attnbench.analysis.profiles import TOGETHER, Change, Difference
from attnbench.base import units
from attnbench.report import axes, figures
from attnbench.report.document import Picture
from attnbench.report.documents import profile
from attnbench.report.figures import INK, QUIET, FigureKind, Margins, Row, Sketch
from attnbench.schema.profile import Live, Profile

MOST_BARS = 8  # of single ops
LONGEST = 38  # letters of the name of an op
MOST_POINTS = 1500  # of a timeline: an SVG of more opens slowly
CUT = 0.2
TOTAL, GREW, SHRANK, REST = "#555b61", "#d55e00", "#0072b2", "#a9afb5"
WATERFALL = FigureKind(
    name="waterfall", title="From one time to the other",
    reading="From the time of a call of the first, at the top, to that of the second, below, both"
    " without a profiler: each bar is what one op adds (orange) or saves (blue). Ops that are"
    " alike but for noise are one grey bar. In no op are Python, dispatch and gaps between"
    " kernels, less what the profiler itself costs.",
)  # fmt: skip
OPS = FigureKind(
    name="ops", title="Where the time goes",
    reading="Self time of a call by op, without the ops called inside, the longest first; the share"
    " is of the time without a profiler.",
)  # fmt: skip
MEMORY = FigureKind(
    name="memory", title="Memory over one call",
    reading="Bytes that the call has allocated and not yet freed; the dot marks the peak and the op"
    " that reached it, the dashed line the peak predicted from sizes alone. The time is that"
    " of a call whose allocations are recorded, which is slower.",
)  # fmt: skip


def draw_waterfall(found: Difference, folder: Path) -> list[Picture]:
    """Bars from the one time to the other."""
    alt = [f"{of.name} {_words(of)}" for of in profile.entries(found, MOST_BARS)]
    caption = f"{' → '.join(profile.labels(found))}; {profile.case_words(found.a)}"
    return _drawn(WATERFALL, waterfall, found, caption, alt, folder)


def draw_ops(profiles: Sequence[Profile], folder: Path) -> list[Picture]:
    """The longest ops of each profile."""
    alt = [f"{p.label}: {p.ops[0].name} {units.time(p.ops[0].self_us)}" for p in profiles if p.ops]
    return _drawn(OPS, top_ops, profiles, profile.case_words(profiles[0]), alt, folder)


def draw_memory(profiles: Sequence[Profile], folder: Path) -> list[Picture]:
    """Memory over a call of each profile."""
    alt = [
        f"{p.label}: peak {units.size(p.memory.peak_bytes)} in {p.memory.peak_op}" for p in profiles
    ]
    return _drawn(MEMORY, memory, profiles, profile.case_words(profiles[0]), alt, folder)


def _drawn(
    kind: FigureKind, draw: Callable[[Any], Figure], of: Any, caption: str, alt: list[str],
    folder: Path,
) -> list[Picture]:  # fmt: skip
    with figures.styled():
        drawn = Sketch(kind=kind, draw=lambda _: draw(of), alt=alt, caption=caption)
        return [drawn.save(folder)]


def waterfall(found: Difference) -> Figure:
    """Bars from A's time to B's, one for each of the ops that changed most, and what remains."""
    changes = profile.entries(found, MOST_BARS, profile.LEAST)
    both = (found.a, found.b)
    rows = [
        Row(profile.brief(of.label, LONGEST + 10), units.time(of.time.median_us), bold=True)
        for of in both
    ]
    rows[1:1] = [Row(profile.brief(change.name, LONGEST), _words(change)) for change in changes]
    figure, (ax,) = figures.row_panels([rows])
    edges = [*accumulate((of.delta_us for of in changes), initial=found.a.time.median_us)]
    for y, (change, at_us) in enumerate(zip(changes, edges, strict=False), start=1):
        signed = GREW if change.delta_us > 0 else SHRANK
        colour = REST if change.what in (*TOGETHER, "other work") else signed
        ax.barh(y, change.delta_us, left=at_us, height=0.66, color=colour, zorder=2)
    for y, at_us in enumerate(edges):
        ax.vlines(at_us, y + 0.33, y + 0.67, color=QUIET, linewidth=0.7, zorder=1.5)
    for y, of in zip((0, len(edges)), both, strict=True):
        ax.barh(y, of.time.median_us, height=0.66, color=TOTAL, zorder=2)
    high, span = max(edges), max(edges) - min(edges)
    cut = 0 < span < CUT * high  # changes of a few percent are not seen on an axis from 0
    low = min(edges) - span if cut else min(0.0, *edges)
    room = 0.02 * (high - low)
    ax.set_xlim(low - room * (low < 0), high + room)
    _time_axis(ax)
    ax.set_xlabel("time per call (the axis does not begin at 0)" if cut else "time per call")
    return figure


def _words(of: Change) -> str:
    differs = of.what not in TOGETHER and of.a_count != of.b_count
    return units.delta(units.time)(of.delta_us) + f"   {profile.calls(of)} calls" * differs


def _time_axis(ax: Axes) -> None:
    ax.xaxis.set_major_formatter(
        lambda x, _: axes.round_time(x).replace("-", "−") if abs(x) > 1e-9 else "0"
    )
    ax.locator_params(axis="x", nbins=7)


def top_ops(profiles: Sequence[Profile]) -> Figure:
    """The ops with the longest self times of each profile, a panel each, on one axis of time."""
    groups, bars = [], []
    for of in profiles:
        call_us, ops = of.time.median_us, of.ops[:MOST_BARS]
        own = [op for op in ops if op.self_us >= profile.LEAST * call_us]
        shown = [(profile.brief(op.name, LONGEST), op.self_us, SHRANK) for op in own]
        if rest := len(of.ops) - len(own):
            left_us = of.self_us - sum(op.self_us for op in own)
            shown.append((f"{rest} more ops", left_us, REST))
        bars.append(shown)
        groups.append(
            [
                Row(name, f"{units.time(us)}   {units.percent(us / call_us)}")
                for name, us, _ in shown
            ]
        )
    figure, panels = figures.row_panels(groups)
    longest = max((us for shown in bars for _, us, _ in shown), default=1.0)
    for ax, of, shown in zip(panels, profiles, bars, strict=True):
        for y, (_, us, colour) in enumerate(shown):
            ax.barh(y, us, height=0.66, color=colour, zorder=2)
        title = f"{of.label}, {units.time(of.time.median_us)} a call"
        ax.set_title(title, loc="left", pad=5, color=INK)
        ax.set_xlim(0, 1.04 * longest)
        _time_axis(ax)
    panels[-1].set_xlabel("self time per call")
    return figure


def memory(profiles: Sequence[Profile]) -> Figure:
    """Live bytes over one call, a panel for each profile, on one axis of bytes."""
    figure, found = figures.panels([2.9] * len(profiles), Margins())
    peaks = [(p.memory.peak_bytes, profile.predicted_peak(p.memory)) for p in profiles]
    top = float(max(1, *(value for pair in peaks for value in pair if value is not None)))
    for ax, each in zip(found, profiles, strict=True):
        points = thinned(each.memory.timeline)
        times, live = [0.0, *(p.t_us for p in points)], [0, *(p.live_bytes for p in points)]
        ax.step(times, live, where="post", color=SHRANK, zorder=2.5)
        ax.fill_between(times, live, step="post", color=SHRANK, alpha=0.15, linewidth=0)
        if points:
            peak = max(points, key=lambda p: p.live_bytes)
            ax.plot(peak.t_us, peak.live_bytes, "o", color=GREW, zorder=3)
            left = peak.t_us < max(times) / 2
            ax.annotate(
                f"{units.size(peak.live_bytes)}\n{profile.brief(peak.op or 'outside ops', 30)}",
                (peak.t_us, peak.live_bytes), xytext=(7 if left else -7, 6),
                textcoords="offset points", ha="left" if left else "right", fontsize=7.5, color=INK,
            )  # fmt: skip
        if (predicted := profile.predicted_peak(each.memory)) is not None:
            low = predicted < 0.15 * top  # no room for its name below the line
            axes.across(ax, predicted, f"predicted {units.size(predicted)}", 24 if low else -9)
        ax.set_title(each.label, loc="left", pad=5, color=INK)
        ax.set(ylim=(0, 1.28 * top), xlim=(0, None), xlabel="time in the call")
        ax.yaxis.set_major_formatter(lambda y, _: axes.round_size(y) if y else "0")
        ax.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(top / 5))))
        _time_axis(ax)
    return figure


def thinned(points: Sequence[Live], most: int = MOST_POINTS) -> list[Live]:
    """At most `most` points that keep the shape: the least, the most and the last of a stretch."""
    if len(points) <= most:
        return list(points)
    size, kept = -(-3 * len(points) // most), []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        chosen = {id(part[-1]), *(id(f(part, key=lambda p: p.live_bytes)) for f in (min, max))}
        kept += [point for point in part if id(point) in chosen]
    return kept
