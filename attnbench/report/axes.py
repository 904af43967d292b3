"""Axes that a person can read: round ticks, names at the ends of lines, marks of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from attnbench.base import units
from attnbench.report.style import QUIET, Look

Text = Callable[[float], str]
MOST_TICKS = 9
LINE_POINTS = 9.7  # the height of a line of 8 pt text
STRIP_ROWS = 4  # of failures above a panel
LONGEST = 20  # letters of a name beside a panel
DASHED: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1.5}
# Steps of ticks by the base of an axis, the first that gives three ticks or more is taken.
_STEPS: dict[int, tuple[tuple[float, ...], ...]] = {
    2: ((1.0,), (1.0, 1.25, 1.5, 1.75)),
    10: ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(x / 2 for x in range(2, 20))),
}


def length_axis(ax: Axes, lengths: Sequence[int], room: float = 0.0) -> None:
    """Make x logarithmic in base 2, with ticks at measured lengths: 128, 256, 512, 1k, 2k.

    `room` is left at both ends, in octaves, beside a small margin.
    """
    shown = sorted(set(lengths))
    step = math.ceil(len(shown) / MOST_TICKS)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(shown[::-1][::step]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: units.length(n)))
    ax.xaxis.set_minor_locator(NullLocator())
    margin = (max(shown) / min(shown)) ** 0.04 * 2**room if len(shown) > 1 else 1.5
    ax.set_xlim(min(shown) / margin, max(shown) * margin)


def log_axis(ax: Axes, which: str, limits: tuple[float, float], base: int, text: Text) -> None:
    """Make the axis `which` (x or y) logarithmic, with ticks at round values."""
    axis = ax.yaxis if which == "y" else ax.xaxis
    ax.set(**{f"{which}scale": "log", f"{which}lim": limits})
    found = round_ticks(*limits, base)
    # Texts side by side need more room than texts one above the other.
    axis.set_major_locator(FixedLocator(found[:: 1 if which == "y" else math.ceil(len(found) / 5)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of `base` within [low, high], or finer steps where there are fewer than three."""
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks: list[float] = []
    for steps in _STEPS[base]:
        values = [step * float(base) ** e for e in exponents for step in steps]
        ticks = [value for value in values if low <= value <= high]
        if len(ticks) >= 3:
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


def guide(ax: Axes, anchor: tuple[float, float], power: int) -> None:
    """Draw n^`power` through `anchor` (n, value) inside the axes, and name it."""
    (x_low, x_high), (_, y_high) = ax.get_xlim(), ax.get_ylim()
    n0, y0 = anchor
    ax.plot([x_low, x_high], [y0 * (x / n0) ** power for x in (x_low, x_high)], **DASHED)
    # The name stands below the line, where that is inside the axes, towards the right. Steeper
    # guides are named further left: where they all meet, the names do not.
    n = min(x_high, n0 * (y_high / y0) ** (1 / power)) / (x_high / x_low) ** (0.12 * power)
    ax.annotate(
        {1: "∝ n", 2: "∝ n²"}.get(power, f"∝ n^{power}"), (n, y0 * (n / n0) ** power),
        xytext=(3, -3), textcoords="offset points", color=QUIET, fontsize=7.5, va="top",
    )  # fmt: skip


def across(ax: Axes, value: float, name: str) -> None:
    """A dashed line at `value` with its name."""
    ax.axhline(value, **DASHED)
    ax.annotate(
        name, (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, 2),
        textcoords="offset points", color=QUIET, fontsize=7.5,
    )  # fmt: skip


def beside(ax: Axes, y: float, text: str, offset: float, **style: Any) -> None:
    """Write right of the axes, `offset` points from them, at the height `y` of a row."""
    ax.annotate(
        text, (1, y), xycoords=("axes fraction", "data"), xytext=(offset, 0),
        textcoords="offset points", fontsize=7.9, va="center", **style,
    )  # fmt: skip


@dataclass(frozen=True)
class End:
    """Where a line ends, in data coordinates."""

    name: str
    x: float
    y: float


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move positions within [0, 1] as little as needed to be `gap` apart.

    Neighbours that are too close form a block around their mean; blocks merge until all fit. If
    there are too many for the room, they are spaced evenly over it.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, 1 / max(1, len(wanted) - 1))
    blocks: list[tuple[float, int]] = []  # (centre, members), bottom to top
    for index in order:
        centre, size = min(max(wanted[index], 0.0), 1.0), 1
        while blocks and centre - blocks[-1][0] < gap * (blocks[-1][1] + size) / 2 - 1e-9:
            below, members = blocks.pop()
            centre = (below * members + centre * size) / (members + size)
            size += members
            reach = (size - 1) / 2 * gap
            centre = min(max(centre, reach), 1 - reach)
        blocks.append((centre, size))
    places = [centre + (i - (size - 1) / 2) * gap for centre, size in blocks for i in range(size)]
    return [place for _, place in sorted(zip(order, places, strict=True))]


def short(name: str) -> str:
    """Cut a name that would not fit beside a panel."""
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def label_ends(ax: Axes, ends: Sequence[End], looks: Mapping[str, Look]) -> None:
    """Write each line's name right of the axes, with a hairline from its last point.

    The figure must be laid out (`figures.lay_out`): the height of the axes tells which names are
    too close.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [to_axes.transform((end.x, end.y)) for end in ends]
    gap = LINE_POINTS * ax.figure.dpi / 72 / ax.bbox.height  # in fractions of the axes
    for end, (x, y), place in zip(ends, points, spread([p[1] for p in points], gap), strict=True):
        colour, early = looks[end.name].colour, x < 0.9  # the line stops before the right edge
        (line,) = ax.plot(
            [x, 1.03], [y, place], transform=ax.transAxes, color=colour, linewidth=0.6,
            linestyle=":" if early else "-", alpha=0.6, clip_on=False, zorder=1.6,
        )  # fmt: skip
        line.set_in_layout(False)
        ax.text(
            1.04, place, short(end.name), transform=ax.transAxes, color=colour, fontsize=8,
            va="center",
        )  # fmt: skip


@dataclass(frozen=True)
class Failed:
    """One line's cells without a result: its name, their status, and where they would be."""

    name: str
    status: str
    xs: tuple[float, ...]


def mark_failed(ax: Axes, failed: Sequence[Failed], looks: Mapping[str, Look]) -> float:
    """Put a row of × above the axes for each line that failed somewhere, with its status.

    Returns how many points above the axes are taken.
    """
    more = [f"and {len(failed) - STRIP_ROWS} more"] if len(failed) > STRIP_ROWS else []
    names = [f"{short(item.name)}: {item.status}" for item in failed[:STRIP_ROWS]] + more
    colours = [looks[item.name].colour for item in failed[:STRIP_ROWS]] + [QUIET]
    for row, (name, colour) in enumerate(zip(names, colours, strict=False)):
        height = LINE_POINTS * (row + 1)
        ax.annotate(
            name, (1.04, 1), xycoords="axes fraction", xytext=(0, height),
            textcoords="offset points", color=colour, fontsize=7, va="center",
        )  # fmt: skip
        xs = failed[row].xs if row < STRIP_ROWS else ()
        above = ScaledTranslation(0, height / 72, ax.figure.dpi_scale_trans)
        ax.plot(
            xs, [1.0] * len(xs), transform=ax.get_xaxis_transform() + above, color=colour,
            marker="x", markersize=4.5, linestyle="none", markeredgewidth=1.3, clip_on=False,
        )  # fmt: skip
    return LINE_POINTS * (len(names) + 0.6) if names else 0.0
