"""Axes that a person can read: round ticks, guide lines, marks of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from attnbench.base import units
from attnbench.report.figures import QUIET, short
from attnbench.report.looks import Look

Text = Callable[[float], str]
MOST_TICKS = 9
STRIP_ROWS, STRIP_POINTS = 4, 9.7  # rows of failures above a panel, and the height of one
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
    ax.xaxis.set_major_formatter(lambda n, _: units.length(n))
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
    axis.set_major_formatter(lambda value, _: text(value))
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


def across(ax: Axes, value: float, name: str, above: float = 2) -> None:
    """A dashed line at `value`, and its name so many points above it."""
    ax.axhline(value, **DASHED)
    ax.annotate(
        name, (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, above),
        textcoords="offset points", color=QUIET, fontsize=7.5,
    )  # fmt: skip


def beside(ax: Axes, y: float, text: str, offset: float, **style: Any) -> None:
    """Write right of the axes, `offset` points from them, at the height `y` of a row."""
    ax.annotate(
        text, (1, y), xycoords=("axes fraction", "data"), xytext=(offset, 0),
        textcoords="offset points", fontsize=7.9, va="center", **style,
    )  # fmt: skip


def mark_failed(
    ax: Axes, failed: Sequence[tuple[str, str, Sequence[float]]], looks: Mapping[str, Look]
) -> float:
    """Put a row of × above the axes for each line that failed somewhere: its name, status and xs.

    Returns how many points above the axes are taken.
    """
    shown = failed[:STRIP_ROWS]
    for row, (name, status, xs) in enumerate(shown, start=1):
        height, colour = STRIP_POINTS * row, looks[name].colour
        above = ScaledTranslation(0, height / 72, ax.figure.dpi_scale_trans)
        ax.plot(
            xs, [1.0] * len(xs), transform=ax.get_xaxis_transform() + above, color=colour,
            marker="x", markersize=4.5, linestyle="none", markeredgewidth=1.3, clip_on=False,
        )  # fmt: skip
        last = len(failed) - len(shown) if row == len(shown) else 0
        more = f", and {last} more" if last else ""
        ax.annotate(
            f"{short(name)}: {status}{more}", (1.02, 1), xycoords="axes fraction",
            xytext=(0, height), textcoords="offset points", color=colour, fontsize=7, va="center",
        )  # fmt: skip
    return STRIP_POINTS * len(shown)
