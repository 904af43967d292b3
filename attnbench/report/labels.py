"""Labels at the ends of lines, moved apart so that none covers another; and marks of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from attnbench.report.style import QUIET, Look

LINE_INCHES = 0.135  # of one line of 8 pt text
STRIP_ROWS = 4
STRIP_GAP = 1.1  # lines between a panel's top, where a label may stand, and the first failure
LONGEST = 20


@dataclass(frozen=True)
class End:
    """Where a line ends, in data coordinates."""

    name: str
    x: float
    y: float


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as needed to be `gap` apart and within [low, high].

    Neighbours that are too close form a block around their mean; blocks merge until all fit. If
    there are too many for the room, they are spaced evenly over it.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    blocks: list[tuple[float, int]] = []  # (centre, members), bottom to top
    for index in order:
        blocks.append((min(max(wanted[index], low), high), 1))
        while len(blocks) > 1 and _overlap(blocks[-2], blocks[-1], gap):
            blocks[-2:] = [_merged(blocks[-2], blocks[-1], gap, low, high)]
    places = [centre + (i - (size - 1) / 2) * gap for centre, size in blocks for i in range(size)]
    result = [0.0] * len(wanted)
    for index, place in zip(order, places, strict=True):
        result[index] = place
    return result


def _overlap(below: tuple[float, int], above: tuple[float, int], gap: float) -> bool:
    return above[0] - below[0] < gap * (below[1] + above[1]) / 2 - 1e-9


def _merged(
    below: tuple[float, int], above: tuple[float, int], gap: float, low: float, high: float
) -> tuple[float, int]:
    size = below[1] + above[1]
    centre = (below[0] * below[1] + above[0] * above[1]) / size
    reach = (size - 1) / 2 * gap
    return min(max(centre, low + reach), high - reach), size


def short(name: str) -> str:
    """Cut a name that would not fit beside a panel."""
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def label_ends(ax: Axes, ends: Sequence[End], looks: Mapping[str, Look]) -> None:
    """Write each line's name right of the axes, with a hairline from its last point.

    Limits and scales must be final. The axes' place in the figure must be too.
    """
    height = _height_inches(ax)
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [to_axes.transform((end.x, end.y)) for end in ends]
    places = spread([float(p[1]) for p in points], LINE_INCHES / height, 0.0, 1.0)
    for end, (x, y), place in zip(ends, points, places, strict=True):
        colour = looks[end.name].colour
        early = x < 0.9  # the line stops before the right edge: lead across without a slope
        ax.plot(
            [x, 1.0, 1.035], [y, y if early else place, place], transform=ax.transAxes,
            color=colour, linewidth=0.6, linestyle=":" if early else "-", alpha=0.6,
            clip_on=False, zorder=1.6,
        )  # fmt: skip
        _beside(ax, place, short(end.name), colour, 8)


@dataclass(frozen=True)
class Failed:
    """One line's cells without a result: its name, their status, and where they would be."""

    name: str
    status: str
    xs: tuple[float, ...]


def strip_inches(failed: Sequence[Failed]) -> float:
    """How much room `mark_failed` needs above a panel."""
    rows = min(len(failed), STRIP_ROWS + 1)
    return (rows + STRIP_GAP - 0.5) * LINE_INCHES if rows else 0.0


def mark_failed(ax: Axes, failed: Sequence[Failed], looks: Mapping[str, Look]) -> None:
    """Put a row of × above the axes for each line that failed somewhere, with its status."""
    height = _height_inches(ax)
    mixed = blended_transform_factory(ax.transData, ax.transAxes)
    for row, item in enumerate(failed[:STRIP_ROWS]):
        y = 1 + (STRIP_GAP + row) * LINE_INCHES / height
        colour = looks[item.name].colour
        ax.plot(
            item.xs, [y] * len(item.xs), transform=mixed, color=colour, marker="x", markersize=4.5,
            linestyle="none", markeredgewidth=1.3, clip_on=False,
        )  # fmt: skip
        _beside(ax, y, f"{short(item.name)}: {item.status}", colour, 7)
    if len(failed) > STRIP_ROWS:
        y = 1 + (STRIP_GAP + STRIP_ROWS) * LINE_INCHES / height
        _beside(ax, y, f"and {len(failed) - STRIP_ROWS} more", QUIET, 7)


def _beside(ax: Axes, y: float, text: str, colour: str, size: float) -> None:
    """Write right of the axes at height `y`, in fractions of the axes."""
    ax.text(1.045, y, text, transform=ax.transAxes, color=colour, fontsize=size, va="center")


def _height_inches(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return float(ax.get_position().height * figure.get_size_inches()[1])
