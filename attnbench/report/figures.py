"""Figures: how they are laid out, cut into pages, and written."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from attnbench.report.document import Picture

WIDE, NARROW = 6.9, 5.1  # inches of a panel that stands alone, and of one of two in a row
DPI = 130
WEIGHTS = 0.2126, 0.7152, 0.0722  # of red, green and blue in luminance (WCAG 2)
LONGEST = 34  # letters of a name beside a panel
SMALL = 7.5  # points of names and notes
ROW = 0.2  # inches of a row
INK, QUIET = "#222222", "#777777"  # of texts; of guide lines, references and notes
FILLED: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}

Item = TypeVar("Item")
STYLE = Path(__file__).with_suffix(".mplstyle")


def styled() -> AbstractContextManager[None]:
    """The looks of all figures, while they are drawn."""
    return mpl.rc_context(fname=STYLE)


class Size(NamedTuple):
    """What a figure is drawn for: a width in inches, else its own; with a title, else without."""

    width: float | None = None
    title: str = ""


class Margins(NamedTuple):
    """Inches around the axes of a panel, for ticks, labels and titles."""

    left: float = 0.85
    right: float = 0.15
    top: float = 0.32
    bottom: float = 0.5


OWN, AROUND = Size(), Margins()


def panels(
    heights: Sequence[float], around: Margins, size: Size = OWN, columns: int = 2,
    own: float | None = None,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure with a panel for each height (inches), so many in a row where there is room.

    `own` is the width of the figure where `size` has none.
    """
    columns = 1 if size.width and size.width < 2 * 3.2 else min(columns, len(heights))
    width = size.width or own or (WIDE if columns == 1 else NARROW * columns)
    rows = [max(heights[i : i + columns]) for i in range(0, len(heights), columns)]
    head = 0.22 if size.title else 0.0
    figure = Figure(figsize=(width, sum(rows) + head), dpi=DPI)
    FigureCanvasAgg(figure)
    if size.title:
        y = 1 - 0.06 / figure.get_figheight()
        figure.text(0.06 / width, y, size.title, va="top", fontweight="bold")
    found = []
    for index, height in enumerate(heights):
        row, column = divmod(index, columns)
        left, top = column * width / columns + around.left, head + sum(rows[:row]) + around.top
        box = (width / columns - around.left - around.right, height - around.top - around.bottom)
        total = figure.get_figheight()
        place = (left / width, 1 - (top + box[1]) / total, box[0] / width, box[1] / total)
        found.append(figure.add_axes(place))
    return figure, found


class Row(NamedTuple):
    """A row of a figure: left what it is, right its figures."""

    left: str
    right: str = ""
    colour: str = INK
    bold: bool = False


def row_panels(
    groups: Sequence[Sequence[Row]], size: Size = OWN, own: float = 9.2,
    around: Margins = AROUND, height: float = ROW,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """A figure of panels one below the other, in which rows 0, 1 … run from top to bottom."""
    every = [row for rows in groups for row in rows]
    around = around._replace(
        left=max((width_of(row.left) for row in every), default=0.0) + 0.25,
        right=max((width_of(row.right) for row in every), default=0.0) + 0.25,
    )
    heights = [height * (len(rows) + 0.5) + around.top + around.bottom for rows in groups]
    figure, found = panels(heights, around, size, 1, own)
    for ax, rows in zip(found, groups, strict=True):
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_yticks([])
        ax.grid(visible=False, axis="y")
        for y, row in enumerate(rows):
            for x, text, ha in ((-1, row.left, "right"), (1, row.right, "left")):
                ax.annotate(
                    text, (max(x, 0), y), xycoords=("axes fraction", "data"), xytext=(8 * x, 0),
                    textcoords="offset points", ha=ha, va="center", color=dark(row.colour),
                    fontsize=SMALL, fontweight="bold" if row.bold else "normal",
                )  # fmt: skip
    return figure, found


def dark(colour: str) -> str:
    """The colour, for letters: as dark as white paper needs, a contrast of 4.5."""
    rgb: tuple[float, ...] = to_rgb(colour)
    while (1.05 / (0.05 + sum(w * c**2.2 for w, c in zip(WEIGHTS, rgb, strict=True)))) < 4.5:
        rgb = tuple(0.95 * c for c in rgb)
    return str(to_hex(rgb))  # type: ignore[arg-type]  # three of them


def width_of(text: str) -> float:
    """Inches of a text beside a panel."""
    font = FontProperties(family="DejaVu Sans", size=SMALL)
    return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def short(name: str, most: int = LONGEST) -> str:
    """Cut a name that would not fit beside a panel."""
    return name if len(name) <= most else name[: most - 1] + "…"


def write(figure: Figure, stem: str, folder: Path) -> bytes:
    """Write `stem`.png, the same bytes for the same data; return the figure as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not by `savefig`, which draws every figure twice; the SVG, which changes the dpi, comes last.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(folder / f"{stem}.png", metadata={"Software": "attnbench"})
    return svg_of(figure)


def svg_of(figure: Figure) -> bytes:
    """The SVG of a figure, its places to a hundredth of a point, without control characters."""
    canvas: Any = FigureCanvasSVG(figure)
    drawn = io.BytesIO()
    canvas.print_svg(drawn, metadata={"Date": None, "Creator": "attnbench"})
    places = re.compile(rb"(?<=\d\.\d\d)\d+")  # of tags alone: texts have figures
    svg = re.sub(rb"<[^>]*>", lambda tag: places.sub(b"", tag[0]), drawn.getvalue())
    return re.sub(rb"[\0-\x08\x0b-\x1f]", b"", svg)


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
        return slug_of("-".join([*self.group, str(self.number) * (self.count > 1)]))

    @property
    def subject(self) -> str:
        """What all panels share: `attention, along n (2 of 3)`."""
        place = f" ({self.number} of {self.count})" if self.count > 1 else ""
        return ", along ".join(self.group) + place


def slug_of(text: str) -> str:
    """A text as a part of the name of a file."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


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
    reading: str = ""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A figure before it is drawn: `caption` is what its panels share, `alt` what it shows.

    `left_out` counts panels of its kind that are not drawn.
    """

    kind: FigureKind
    draw: Callable[[Size], Figure]
    alt: Sequence[str]
    caption: str = ""
    slug: str = ""
    first: bool = True  # of its kind: further ones are on the page alone
    left_out: int = 0

    @property
    def stem(self) -> str:
        """The name of its file, without a suffix."""
        return f"{self.kind.name}-{self.slug}".rstrip("-")

    def save(self, folder: Path) -> Picture:
        """Draw it as a page shows it, and write it into the folder, too."""
        more = f". {self.left_out} more such panels are left out; the tables have their numbers"
        title = ", ".join(filter(None, (self.kind.title, self.caption)))
        figure = self.draw(OWN)
        return Picture(
            svg=write(figure, self.stem, folder) if self.first else svg_of(figure),
            title=self.kind.title,
            caption=self.caption + more * bool(self.left_out), reading=self.kind.reading,
            alt=f"{title}: {'; '.join(self.alt)}.",
        )  # fmt: skip
