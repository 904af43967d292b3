"""Tables as texts for the terminal; Markdown tables: `base.units.table`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from attnbench.base import units

_GAP = 3  # between two columns
_LEAST = 12  # letters that are left of a text that is cut


def console() -> Console:
    """Standard output; where it is neither a terminal nor told its COLUMNS, nothing is wrapped."""
    plain = Console(highlight=False)
    wrapped = plain.is_terminal or "COLUMNS" in os.environ
    return plain if wrapped else Console(highlight=False, width=10_000)


def grid(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Collection[str] = (),
    whole: Collection[str] = (),
    spare: Sequence[str] = (),
    to: Console | None = None,
    cut: str = "",
) -> RenderableType:
    """A table that splits no word on `to`, standard output unless given.

    The cells of columns named in `right` (numbers) and `whole` stay in one line; those in `spare`
    are left out one by one where the console is too narrow; then the texts of the column `cut` lose
    their middle; where that is not enough, words are split.
    """
    texts = [[Text(units.glued(c)) if isinstance(c, str) else c for c in row] for row in rows]
    columns = dict(zip(header, zip(*texts, strict=True), strict=True)) if texts else {}
    full = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    widths = {}
    for name, cells in columns.items():  # headers may be broken between words
        whole_cells = name in (*whole, *right)
        words = [word for c in (name, *(() if whole_cells else cells)) for word in str(c).split()]
        widths[name] = max(map(len, [*words, *(cells if whole_cells else ())]), default=0)
    room = (to or console()).width
    left_out, free = [], room - sum(widths.values()) - _GAP * (len(widths) - 1)
    for name in spare:
        if free < 0:
            left_out.append(name)
            free += widths.pop(name) + _GAP
    if cut and free < 0:
        widths[cut] = max(widths[cut] + free, min(widths[cut], _LEAST))
        columns[cut] = tuple(_without_middle(cell, widths[cut]) for cell in columns[cut])
        full[cut] = widths[cut]
    for name in sorted(set(widths) - {*whole, *right, cut}, key=lambda n: -widths[n]):
        if free < 0:  # words are split where they are longest
            less = min(-free, max(0, widths[name] - _LEAST))
            widths[name], free = widths[name] - less, free + less
    free = max(free, 0)
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, caption_justify="left")
    found.caption = f"columns left out: {'; '.join(left_out)}" if left_out else None
    by_need = sorted(widths, key=lambda name: full[name] - widths[name])
    for number, name in enumerate(by_need):  # those that need little get it, the others share
        more = min(full[name] - widths[name], free // (len(by_need) - number))
        widths[name], free = widths[name] + more, free - more
    for name in widths:
        found.add_column(
            name, width=widths[name], overflow="fold", justify="right" if name in right else "left"
        )
    for row in zip(*(columns[name] for name in widths), strict=True):
        found.add_row(*row)
    return found


def shown(*parts: RenderableType, to: Console | None = None) -> str:
    """What the parts look like on `to`, standard output unless given; with a line break at the end.

    To be printed by click: where a pipe is closed, rich would end the process.
    """
    terminal = to or console()
    with terminal.capture() as capture:
        for part in parts:
            terminal.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    text = capture.get().replace(units.GLUE, " ")
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def _without_middle(text: Text, width: int) -> Text:
    """At most `width` letters, the first and the last ones."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return Text.assemble(text[: width - 1 - tail], "…", text[len(text) - tail :])
