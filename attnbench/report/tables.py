"""Tables and values as texts for the terminal; Markdown tables: `base.units.table`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from attnbench.base import units

LIMITS = ("ceilings", "matmul_tflops")  # of an environment: they have a section of their own


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


def value_text(name: str, value: Any) -> str:
    """Write a value of run.json for people; bytes where the name says so."""
    if isinstance(value, dict):
        # The one table in an environment is that of the caches, whose values are bytes.
        return ", ".join(f"{key} {value_text('_bytes', part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value_text("", part) for part in value)
    if value is None:
        return units.UNKNOWN
    return units.size(value) if name.endswith("_bytes") and type(value) is int else str(value)
