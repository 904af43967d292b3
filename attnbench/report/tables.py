"""Tables and lines on the terminal; those of Markdown are written by `base.units.table`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Standard output; wide where it is no terminal, so that no cell is cut off."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=240)


def grid(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Collection[str] = (),
    whole: Collection[str] = (),
) -> Table:
    """A table; columns named in `right` are aligned to the right, those in `whole` never folded."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in header:
        justify = "right" if name in right else "left"
        found.add_column(name, justify=justify, overflow="fold", no_wrap=name in whole)  # type: ignore[arg-type]
    for row in rows:
        found.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return found


def shown(*parts: RenderableType, to: Console | None = None) -> str:
    """What the parts look like on `to`, standard output unless given; with a line break at the end.

    To be printed by click: where a pipe is closed, rich would end the process.
    """
    terminal = to or console()
    with terminal.capture() as capture:
        for part in parts:
            terminal.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    return capture.get()


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """A table as text, ready to print."""
    return shown(grid(header, rows, right))
