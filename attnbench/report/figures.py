"""Figures: how implementations look in all of them, how they are laid out, paged and written."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from attnbench.report.document import Picture
from attnbench.report.looks import Look

WIDE, NARROW = 6.9, 5.1  # inches of a panel that stands alone, and of one of two in a row
DPI = 160
LONGEST = 24  # letters of a name beside a panel
INK, QUIET = "#222222", "#777777"  # of texts; of guide lines, references and notes
FILLED: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}

Item = TypeVar("Item")
STYLE = Path(__file__).with_suffix(".mplstyle")


def figure_of(size: tuple[float, float], title: str, subject: str) -> Figure:
    """An empty figure of `size` inches, with its title and below it what all panels share."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    pads = {"w_pad": 0.08, "h_pad": 0.08, "wspace": 0.03, "hspace": 0.05}
    figure.get_layout_engine().set(**pads)  # type: ignore[union-attr]
    heading = figure.suptitle(
        f"{title}\n", x=0.1 / size[0], ha="left", fontsize=11, fontweight="bold"
    )
    # The title's second line is left empty for the subject.
    below = Annotation(subject, (0, 0.1), xycoords=heading, fontsize=8, color=QUIET)
    figure.add_artist(below)
    return figure


def panels(count: int, height: float, title: str, subject: str) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, each `height` inches high, two in a row."""
    columns = min(count, 2)
    rows = -(-count // columns)
    size = (WIDE if columns == 1 else NARROW * columns, rows * height + 0.5)
    figure = figure_of(size, title, subject)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def name_rows(
    ax: Axes, rows: Sequence[tuple[str, str]], colours: Sequence[str], bold: Sequence[int]
) -> None:
    """Name rows 0, 1 … from top to bottom: left what they are, right their figures."""
    right = ax.secondary_yaxis("right")
    right.spines["right"].set_visible(False)
    for axis, side in ((ax, 0), (right, 1)):
        # A dollar would begin a formula.
        axis.set_yticks(range(len(rows)), [row[side].replace("$", r"\$") for row in rows])
        axis.tick_params(axis="y", length=0)
        for y, text in enumerate(axis.get_yticklabels()):
            text.set_color(colours[y % len(colours)])
            text.set_fontweight("bold" if y in bold else "normal")
    ax.grid(visible=False, axis="y")


def short(name: str) -> str:
    """Cut a name that would not fit beside a panel."""
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def legend(
    figure: Figure, names: Iterable[str], looks: Mapping[str, Look], notes: Iterable[Artist] = ()
) -> None:
    """Say once, below all panels, which colour and marker stands for what; `notes` follow."""
    handles = [
        Line2D([], [], color=looks[name].colour, marker=looks[name].marker, label=short(name))
        for name in names
    ]
    entries = [*handles, *notes]
    columns = 5 if max(len(str(entry.get_label())) for entry in entries) <= LONGEST else 3
    figure.legend(handles=entries, loc="outside lower left", ncols=columns, frameon=False)


def write(figure: Figure, stem: str, folder: Path) -> Path:
    """Write `stem`.png and `stem`.svg, the same bytes for the same data; return the latter."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")  # once is enough: it costs more than the writing
    folder.mkdir(parents=True, exist_ok=True)
    svg = folder / f"{stem}.svg"
    # Not by `savefig`, which draws every figure twice; the SVG, which changes the dpi, comes last.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(svg.with_suffix(".png"), metadata={"Software": "attnbench"})
    svg.write_bytes(svg_of(figure))
    return svg


def svg_of(figure: Figure) -> bytes:
    """The SVG of a figure without a layout engine."""
    canvas: Any = FigureCanvasSVG(figure)
    drawn = io.BytesIO()
    canvas.print_svg(drawn, metadata={"Date": None, "Creator": "attnbench"})
    return drawn.getvalue()


@dataclass(frozen=True)
class Page(Generic[Item]):
    """The panels of one figure: page `number` of `count` of those that share `group`.

    `left_out` counts, on the first page, the panels that are drawn on none.
    """

    group: tuple[str, ...]
    number: int
    count: int
    items: tuple[Item, ...]
    left_out: int = 0

    @property
    def slug(self) -> str:
        """For the name of a file."""
        names = [*self.group, *([str(self.number)] if self.count > 1 else [])]
        return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(names)).strip("-").lower()

    @property
    def place(self) -> str:
        """` (2 of 3)` where there are several pages."""
        return f" ({self.number} of {self.count})" if self.count > 1 else ""

    @property
    def subject(self) -> str:
        """What all panels share: `attention, along n (2 of 3)`."""
        return ", along ".join(self.group) + self.place


def pages(
    items: Iterable[Item], group: Callable[[Item], tuple[str, ...]], size: int, most: int
) -> list[Page[Item]]:
    """Group items, in the order of their first, and cut each group into at most `most` pages."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    found = []
    for names, own in groups.items():
        parts = [tuple(own[i : i + size]) for i in range(0, len(own), size)]
        left_out = sum(map(len, parts[most:]))
        for number, part in enumerate(parts[:most], start=1):
            found.append(Page(names, number, len(parts), part, left_out if number == 1 else 0))
    return found


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """One kind of figure: its name in file names, its title, and how to read it."""

    name: str
    title: str
    reading: str

    def save(self, figure: Figure, page: Page[Any], alt: Iterable[str], folder: Path) -> Picture:
        """Write the figure of one page and the texts that go with it."""
        return self.save_one(figure, page.subject, alt, folder, page.slug, page.left_out)

    def save_one(
        self, figure: Figure, subject: str, alt: Iterable[str], folder: Path, slug: str = "",
        left_out: int = 0,
    ) -> Picture:  # fmt: skip
        """As `save`, of a figure that is no page: `slug` tells it from others of its kind."""
        svg = write(figure, f"{self.name}-{slug}".rstrip("-"), folder)
        more = f" {left_out} more such panels are left out; the tables have their numbers."
        return Picture(
            svg=svg.read_bytes(), title=self.title, reading=self.reading + more * bool(left_out),
            alt=f"{', '.join(filter(None, (self.title, subject)))}: {'; '.join(alt)}.",
        )  # fmt: skip
