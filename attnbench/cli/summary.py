"""Tables on the terminal, and the summary at the end of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from attnbench.execution.store import Run

_SHOWN = 60


def console() -> Console:
    """Standard output; wide where it is no terminal, so that no cell is cut off."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=240)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> None:
    """Print a table; the columns named in `right` are aligned to the right."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in header:
        grid.add_column(name, justify="right" if name in set(right) else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(text) for text in row))
    terminal = console()
    with terminal.capture() as capture:
        terminal.print(grid)
    click.echo(capture.get(), nl=False)  # rich would end the process where a pipe is closed


def print_summary(run: Run) -> None:
    """The rows best first, what failed, where the time went, and the next command."""
    from attnbench.analysis.highlights import SUMMARY, summary_rows
    from attnbench.analysis.table import compared, failures, spent

    path, frame = run.path, compared(run)
    measured = frame[frame["status"] == "ok"]
    rows = summary_rows(measured)
    names = ["impl", "time", "interval", "speed", "rate", "workspace", "error", "status"]
    header = [SUMMARY.get(name).header for name in names]
    shown = rows if len(rows) <= _SHOWN else _largest(rows, measured)
    last = None
    lines = []
    for row in shown:
        lines.append([row["case"] if row["case"] != last else ""] + [row[name] for name in names])
        last = row["case"]
    if lines:
        table(["case", *header], lines, right=header[1:-1])
    if len(shown) < len(rows):
        click.echo(
            f"{len(shown)} of {len(rows)} rows: the largest sizes; all: attnbench export"
            f" {path} --format csv"
        )
    _print_failures(failures(frame))
    _print_spent(spent(run), run.info.get("spent", {}).get("wall_s"))
    click.echo(f"records: {path / 'records.jsonl'}")
    click.echo(f"report:  {path / 'report.html'}, once drawn by: attnbench report {path}")


def _largest(rows: list[dict[str, str]], frame: Any) -> list[dict[str, str]]:
    """The rows of the largest n of each workload, at most `_SHOWN`."""
    top = frame.groupby("workload")["seq_len"].transform("max")
    kept = [row for row, keep in zip(rows, frame["seq_len"] == top, strict=True) if keep]
    return kept[:_SHOWN]


def _print_failures(rows: Any) -> None:
    if rows.empty:
        return
    click.echo("not measured:")
    for row in rows.to_dict("records"):
        cells = f"{row['cells']} {'cell' if row['cells'] == 1 else 'cells'}"
        click.echo(f"  {row['status']}: {row['impl']} ({cells}): {row['reason']}")


def _print_spent(stages: list[tuple[str, float]], wall_s: float | None) -> None:
    from attnbench.base.units import seconds

    if wall_s is not None:
        shares = ", ".join(f"{stage} {seconds(value)}" for stage, value in stages)
        click.echo(f"wall time {seconds(wall_s)}: {shares}")
