"""What `attnbench gate` leaves: the table on the terminal, and the files in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from attnbench.gate.decide.data import GateRun, Outcome

XML, MARKDOWN = "gate.xml", "gate.md"
_STYLES = {
    "incorrect": "bold red", "regressed": "bold red", "inconclusive": "yellow",
    "not comparable": "dim", "improved": "cyan", "ok": "green",
}  # fmt: skip
_NARROW = ("change", "95 % interval", "wins", "verdict")  # columns that are never folded


def show(run: GateRun, outcome: Outcome, console: Console, folder: Path | None = None) -> None:
    """Print the table, the reasons, the controls, and the conclusion.

    `folder` is where the files are, if there are any.
    """
    from attnbench.report.gate import texts

    colour = {0: "green", 1: "red"}.get(int(outcome.exit_code), "yellow")
    common, _ = texts.labels(run.cells)
    with console.capture() as capture:
        if outcome.rows:
            console.print(_table(run, outcome))
            console.print(Text(f"wins: {texts.WINS}", style="dim"))
        for line in _reasons(run, outcome):
            console.print(line)
        for text in (
            f"all cells: {common}",
            *texts.sides(run),
            *texts.code(run),
            *texts.controls(run, outcome),
        ):
            console.print(Text(text))
        for text in (texts.rounds(run), texts.spent(run)):
            console.print(Text(text))
        said = f"{texts.title(outcome)} (exit code {int(outcome.exit_code)})"
        console.print(Text(said, style=f"bold {colour}"))
        for line in _where(folder):
            console.print(line, soft_wrap=True)
    click.echo(capture.get(), nl=False)  # rich would end the process where a pipe is closed


def write_all(folder: Path, run: GateRun, outcome: Outcome) -> None:
    """Write gate.json, gate.xml, gate.md and gate.html, and append to $GITHUB_STEP_SUMMARY.

    The raw data come first. A summary that cannot be appended to is a warning.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.base.files import write_whole
    from attnbench.gate.decide.stored import drop_kept_rounds, write_gate
    from attnbench.report.gate import junit, markdown
    from attnbench.report.gate.page import write_page

    file = write_gate(folder, run, outcome)
    drop_kept_rounds(folder)
    write_whole(folder / XML, junit.render(run, outcome))
    text = markdown.render(run, outcome, file)
    write_whole(folder / MARKDOWN, text)
    warning = markdown.append_summary(text)
    if warning:
        click.echo(f"Warning: {warning}", err=True)
    write_page(folder, run, outcome)


def _table(run: GateRun, outcome: Outcome) -> Table:
    from attnbench.report.gate import texts

    _, names = texts.labels(run.cells)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in texts.HEADER:
        right = name in _NARROW[:3]
        grid.add_column(
            name, justify="right" if right else "left", overflow="fold", no_wrap=name in _NARROW
        )
    for number, row in texts.worst_first(outcome.rows):
        sign, *parts, verdict = texts.texts(row, names[number])
        style = _STYLES[row.verdict]
        grid.add_row(Text(sign, style=style), *map(Text, parts), Text(verdict, style=style))
    return grid


def _reasons(run: GateRun, outcome: Outcome) -> Iterator[Text]:
    from attnbench.report.gate import texts

    for verdict, name, why in texts.reasons(run, outcome):
        yield Text.assemble((f"{texts.SIGNS[verdict]} {name}", _STYLES[verdict]), f": {why}")


def _where(folder: Path | None) -> Iterator[Text]:
    from attnbench.gate.decide.stored import NAME
    from attnbench.report.gate import texts

    if folder is not None:
        yield Text(f"page:   {folder / 'gate.html'}")
        yield Text(f"replay: {texts.replay(folder / NAME)}")
