"""Tables on the terminal, and the summary at the end of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def print_summary(path: Path) -> None:
    """The rows best first, what failed, where the time went, and the next command."""
    from attnbench.analysis.compare import compared
    from attnbench.analysis.summary import SUMMARY, summary_rows
    from attnbench.store import load_run

    run = load_run(path)
    frame = compared(run)
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
    _print_failures(frame[frame["status"] != "ok"])
    _print_spent(run.info.get("spent", {}))
    click.echo(f"records: {path / 'records.jsonl'}")
    click.echo(f"report:  {path / 'report.html'}, once drawn by: attnbench report {path}")


def _largest(rows: list[dict[str, str]], frame: Any) -> list[dict[str, str]]:
    """The rows of the largest n of each workload, at most `_SHOWN`."""
    top = frame.groupby("workload")["seq_len"].transform("max")
    kept = [row for row, keep in zip(rows, frame["seq_len"] == top, strict=True) if keep]
    return kept[:_SHOWN]


def _print_failures(frame: Any) -> None:
    if frame.empty:
        return
    counts = frame.groupby(["status", "impl", "reason"]).size()
    click.echo("not measured:")
    for (status, impl, reason), count in counts.items():
        click.echo(f"  {status}: {impl} ({count} {'cell' if count == 1 else 'cells'}): {reason}")


def _print_spent(spent: dict[str, float]) -> None:
    from attnbench.units import seconds

    if "wall_s" not in spent:
        return
    wall = spent["wall_s"]
    parts = {name: value for name, value in spent.items() if name != "wall_s"}
    parts["other"] = max(0.0, wall - sum(parts.values()))
    shares = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items())
    click.echo(f"wall time {seconds(wall)}: {shares}")
