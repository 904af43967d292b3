"""Axes that a person can read: round ticks, guide lines, and names at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from attnbench.base import units
from attnbench.report.figures import QUIET, SMALL, dark, short, width_of
from attnbench.report.looks import Look

Text = Callable[[float], str]
MOST_TICKS = 9
LINE = 1.22  # of a name at the end of a line: its height, by the size of its letters
DASHED: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1.5}
# Steps of ticks by the base of an axis, the first that gives enough ticks is taken.
_STEPS: dict[int, tuple[tuple[float, ...], ...]] = {
    2: ((1.0,), (1.0, 1.25, 1.5, 1.75)),
    10: ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(x / 2 for x in range(2, 20))),
}


class End(NamedTuple):
    """Where a line ends, in data, and the name that is written beside it."""

    x: float
    y: float
    name: str
    look: Look = Look(QUIET, "")


def length_axis(ax: Axes, lengths: Sequence[int]) -> None:
    """Make x logarithmic in base 2, with ticks at measured lengths: 128, 256, 512, 1k, 2k."""
    shown = sorted(set(lengths))
    most = max(2, min(MOST_TICKS, int(ax.bbox.width / ax.figure.dpi / 0.38)))
    step = math.ceil(len(shown) / most)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(shown[::-1][::step]))
    ax.xaxis.set_major_formatter(lambda n, _: units.length(n))
    ax.xaxis.set_minor_locator(NullLocator())
    margin = (max(shown) / min(shown)) ** 0.04 if len(shown) > 1 else 1.5
    ax.set_xlim(min(shown) / margin, max(shown) * margin)


def log_axis(ax: Axes, which: str, limits: tuple[float, float], base: int, text: Text) -> None:
    """Make the axis `which` (x or y) logarithmic, with ticks at round values."""
    axis = ax.yaxis if which == "y" else ax.xaxis
    ax.set(**{f"{which}scale": "log", f"{which}lim": limits})
    found = round_ticks(*limits, base, 3 if which == "y" else 2)
    if which == "x":  # texts side by side, those of 800 M and 900 M closer than those of 100 M
        inches = ax.bbox.width / ax.figure.dpi / math.log(limits[1] / limits[0])
        room = math.exp((max(map(width_of, map(text, found)), default=0.0) + 0.1) / inches)
        apart: list[float] = []
        for value in reversed(found):
            apart += [value] * (not apart or apart[-1] >= room * value)
        found = apart
    axis.set_major_locator(FixedLocator(found))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float, base: int, least: int = 3) -> list[float]:
    """Powers of `base` within [low, high], or finer steps where there are fewer than `least`."""
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks: list[float] = []
    for steps in _STEPS[base]:
        values = [step * float(base) ** e for e in exponents for step in steps]
        ticks = [value for value in values if low <= value <= high]
        if len(ticks) >= least:
            break
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)] if ticks else []


def bounds(values: Sequence[float], room: float = 0.06) -> tuple[float, float]:
    """Limits for a logarithmic axis: the values' range and some room, at least a factor of two."""
    low, high = min(values), max(values)
    pad = max((high / low) ** room, math.sqrt(2 * low / high), 1.05)
    return low / pad, high * pad


def round_size(bytes_: float) -> str:
    """Bytes on an axis, whose ticks are whole: `64 MiB`."""
    return units.size(bytes_).replace(".0 ", " ")


def round_flops(flops: float) -> str:
    """FLOPs on an axis: `1 M`, `20 G`."""
    size, name = units.rate_unit(flops / 1e12)
    return f"{plain(flops / 1e12 / size)} {name[0]}"


def round_time(time_us: float) -> str:
    """Time on an axis: `10 µs`, `1 ms`, `0.5 s`."""
    number, unit = units.time(time_us).split(" ")
    return f"{float(number):g} {unit}"


def plain(value: float) -> str:
    """A number on an axis whose label names the unit."""
    return f"{float(units.digits(value)):g}"


def round_ratio(value: float) -> str:
    """A ratio on an axis: `0.5×`, `2×`."""
    return f"{plain(value)}×"


def round_added(value: float) -> str:
    """What a ratio adds, on an axis: `+10 %`, `0 %`."""
    added = round(100 * (value - 1), 1)
    return f"{added:+g} %".replace("-", "−") if added else "0 %"


def guide(ax: Axes, anchor: tuple[float, float], power: int, of: str = "n") -> End:
    """Draw n^`power` through `anchor` (n, value); return where it leaves the axes."""
    n0, y0 = anchor
    left, right = ax.get_xlim()
    xs = left, min(right, n0 * (ax.get_ylim()[1] / y0) ** (1 / power))
    ys = [y0 * (x / n0) ** power for x in xs]
    ax.plot(xs, ys, **DASHED)
    return End(xs[1], ys[1], f"∝ {of}" + {1: "", 2: "²"}.get(power, f"^{power}"))


def across(ax: Axes, value: float, name: str, above: float = 2) -> None:
    """A dashed line at `value`, and its name so many points above it."""
    ax.axhline(value, **DASHED)
    ax.annotate(
        name, (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, above),
        textcoords="offset points", color=QUIET, fontsize=SMALL,
    )  # fmt: skip


def label_ends(ax: Axes, ends: Sequence[End]) -> None:
    """Name lines right of the axes, each in its colour, moved apart where they would overlap.

    Scales, limits and place of the axes must be final.
    """
    if not ends:
        return
    figure, box, point = ax.figure, ax.bbox, ax.figure.dpi / 72
    at = ax.transData.transform([(end.x, end.y) for end in ends])
    heights = spread(at[:, 1].tolist(), LINE * SMALL * point, box.y0, box.y1)
    to_figure = figure.transFigure.inverted().transform
    for end, (x, y), height in zip(ends, at, heights, strict=True):
        colour, marker = dark(end.look.colour), end.look.marker
        left, bottom = to_figure((box.x1 + (18 if marker else 9) * point, height))
        ax.text(
            left, bottom, short(end.name), transform=figure.transFigure, color=colour,
            fontsize=SMALL, va="center_baseline",
        )  # fmt: skip
        if marker:  # colours repeat where there are many
            place = [[part] for part in to_figure((box.x1 + 12 * point, height))]
            mark = Line2D(*place, transform=figure.transFigure, color=colour, marker=marker)
            mark.set(markersize=4.5, markeredgewidth=0)
            figure.add_artist(mark)
        if abs(height - y) > 2 * point or x < box.x1 - 20 * point:
            first, last = to_figure([(x + 4 * point, y), (box.x1 + 7 * point, height)])
            leader = Line2D(*zip(first, last, strict=True), transform=figure.transFigure)
            leader.set(color=colour, linewidth=0.5, alpha=0.6)
            figure.add_artist(leader)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights near the wanted ones, in their order, at least `gap` apart, from `low` on."""
    order = np.argsort(wanted, kind="stable").tolist()
    groups: list[list[float]] = []  # of heights less their rank's gap, whose mean is taken
    for rank, index in enumerate(order):
        groups.append([wanted[index] - gap * rank])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    level = [float(np.mean(group)) for group in groups for _ in group]
    level = np.clip(level, low, max(low, high - gap * (len(order) - 1))).tolist()
    return [level[rank] + gap * rank for rank in map(order.index, range(len(order)))]
