"""Axes with ticks that a person can read, and guide lines to hold slopes against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from attnbench.base import units
from attnbench.report.style import QUIET

Text = Callable[[float], str]
MOST_TICKS = 9


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
    """Make the axis `which` (x or y) logarithmic, with labelled ticks at round values."""
    low, high = limits
    axis = ax.yaxis if which == "y" else ax.xaxis
    (ax.set_yscale if which == "y" else ax.set_xscale)("log", base=base)
    (ax.set_ylim if which == "y" else ax.set_xlim)(low, high)
    ticks = binary_ticks(low, high) if base == 2 else decimal_ticks(low, high)
    # Side by side, texts need more room than one above the other.
    thin = 1 if which == "y" else math.ceil(len(ticks) / 5)
    axis.set_major_locator(FixedLocator(ticks[::thin]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def decimal_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], or 1-2-5 steps where those would be fewer than three."""
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(x / 2 for x in range(2, 20))):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]
    return ticks


def binary_ticks(low: float, high: float) -> list[float]:
    """Powers of two within [low, high], at most seven; quarters between where there are few."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / 7))
    if last - first >= 2:
        return [2.0**e for e in range(first, last + 1, step)]
    between = [part * 2.0**e for e in (first - 1, *range(first, last + 1)) for part in _PARTS]
    return [tick for tick in between if low <= tick <= high]


_PARTS = (1.0, 1.25, 1.5, 1.75)


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


def bounds(values: Sequence[float], room: float = 0.06) -> tuple[float, float]:
    """Limits for a logarithmic axis: the values' range and some room, at least a factor of two."""
    low, high = min(values), max(values)
    pad = max((high / low) ** room, math.sqrt(2 * low / high), 1.05)
    return low / pad, high * pad


def guide(ax: Axes, lengths: Sequence[int], anchor: tuple[float, float], power: int) -> None:
    """Draw n^`power` through `anchor` (n, value) inside the axes, and write what it is."""
    (x_low, x_high), (y_low, y_high) = ax.get_xlim(), ax.get_ylim()
    n0, y0 = anchor

    def value(n: float) -> float:
        return y0 * (n / n0) ** power

    ax.plot([x_low, x_high], [value(x_low), value(x_high)], **_GUIDE)
    # The label stands below the line, where that is inside the axes, towards the right.
    # Steeper guides are named further left: where they all meet, the names do not.
    n = min(x_high, n0 * (y_high / y0) ** (1 / power)) / (x_high / x_low) ** (0.12 * power)
    if not y_low < value(n) < y_high or n <= min(lengths):
        return
    ax.annotate(
        {1: "∝ n", 2: "∝ n²"}.get(power, f"∝ n^{power}"), (n, value(n)), xytext=(3, -3),
        textcoords="offset points", color=QUIET, fontsize=7.5, ha="left", va="top",
    )  # fmt: skip


_GUIDE: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1.5}
