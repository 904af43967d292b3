"""Evidence for the rules of attnbench: `python -m tests.validation gate|laws|sweeps|…`.

`make validate PART=laws` runs one part with its defaults. Parts with a folder under results/ keep
their runs there, and go on where they stopped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from attnbench.cli.commands import Commands
from attnbench.cli.options import (
    DURATION,
    NAMES,
    SIZES,
    output_option,
    say,
    seed_option,
)
from attnbench.errors import ExitCode
from attnbench.store.folder import check_name
from tests.validation.runner import Ended

Row = tuple[str, dict[str, Any], str]  # names, type and default, help


@click.group(cls=Commands)
def main() -> None:
    """Hold attnbench's own measuring against what is known."""


def _count(name: str, default: int, text: str, least: int = 0) -> tuple[str, dict[str, Any], str]:
    kind = click.IntRange(min=least)
    return name, {"type": kind, "default": default, "show_default": True}, text


def _percents(context: Any, option: Any, texts: tuple[str, ...]) -> tuple[float, ...]:
    """Read 10,2.5."""
    try:
        return tuple(map(float, texts))
    except ValueError:
        raise click.BadParameter("takes numbers such as 10,2.5", context, option) from None


BESIDE = _count("--neighbours", 2, "Processes that spin and sleep for random 0.2 to 4 s meanwhile.")
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module with `examine(path, tell, **options)`, as a command; `path` only where `kept`."""

    name: str
    doc: str
    options: tuple[Row | Callable[..., Any], ...] = ()
    kept: bool = True

    def command(self) -> click.Command:
        """The command, which loads the module when it is called."""

        def run(output: Path | None = None, name: str = "", **options: Any) -> None:
            module = importlib.import_module(f"tests.validation.{self.name}")
            place = () if output is None else (output / check_name(name),)
            show(module.examine(*place, tell, **options))

        folder = {"default": f"selftest-{self.name}", "show_default": True}
        where = (output_option, ("--name", folder, "The folder, new or to go on with."))
        made: Any = run
        for row in reversed((*self.options, *(where if self.kept else ()))):
            option = row if callable(row) else click.option(row[0], help=row[2], **row[1])
            made = option(made)
        return click.command(self.name, help=self.doc)(made)


PARTS = (
    Part(
        name="gate",
        doc="""Count false alarms and detections of live gate runs on sides that are known.

        Identical sides must pass, and a slowdown planted in one cell must be found. A run takes one
        to five minutes. Exits 1 if all runs are there and a goal is missed.""",
        options=(
            _count("--aa", 40, "Runs of identical sides there shall be in the end."),
            ("--inject", {"type": NAMES, "callback": _percents, "default": "10,5",
             "show_default": True}, "Slowdowns in percent, each in one cell of runs of its own."),
            _count("--each", 12, "Runs there shall be for each slowdown."),
            ("--seq-lens", {"type": SIZES, "default": "128..1024", "show_default": True}, "n."),
            _count("--neighbours", 0, BESIDE[2]),
        ),
    ),
    Part(
        name="laws",
        doc="""Hold kernels of known law to right and to wrong laws, and count the verdicts.

        Imagined kernels, with overheads, steps, logarithms and noise (4 minutes); and kernels that
        take c·n, c·n^2 and c·n^3, swept beside other work (a minute a run). Exits 1 if a goal is
        missed.""",
        options=(
            _count("--draws", 200, "Series drawn of each imagined kernel over each range.", 1),
            _count("--runs", 20, "Sweeps there shall be in the end."),
            BESIDE,
            seed_option,
        ),
    ),
    Part(
        name="advise",
        doc="""Advise on random shapes, six implementations each, and judge by a longer run.

        A minute a shape. Exits 1 where fewer than 95 % of the picks are within 5 % of the best, one
        is sure and further off than the longer run's interval, or more than 25 % are not sure.""",
        options=(
            _count("--shapes", 40, "There shall be in the end."),
            ("--budget", {"type": DURATION, "default": "30s", "show_default": True}, "Of each."),
            _count("--longer", 10, "How many times as long the run that judges takes samples.", 1),
            seed_option,
        ),
    ),
    Part(
        name="twins",
        doc="""Advise on SDPA beside itself under another name, and beside itself with one op more.

        Exits 1 where a twin is advised once, or named as faster twice. 10 minutes.""",
        options=(
            _count("--twins", 60, "There shall be in the end."),
            ("--budget", {"type": DURATION, "default": "10s", "show_default": True}, "Of each."),
            seed_option,
        ),
    ),
    Part(
        name="sweeps",
        doc="""Start small sweeps alone, beside two busy processes, and with spoilt clocks.

        Each ends with 0, and the times of the last lie in the intervals of the first as often as
        those of the first themselves. Exits 1 where one sweep did not end with 0.""",
        options=(
            _count("--runs", 100, "Alone, and beside two."),
            _count("--faulty", 50, "With spoilt clocks."),
            seed_option,
        ),
    ),
    Part(
        name="forecasts",
        doc="""Hold what random sweeps take against what they say before they begin.

        In a folder with other sweeps at least 90 % shall be within a factor of 2, in an empty one
        80 % within 3, and 90 % in the interval. Prints how far off each stage was, which
        planning/forecast.py has as constants. Exits 1 if a goal is missed. 15 minutes.""",
        options=(_count("--sweeps", 40, "There shall be in the end."), seed_option),
    ),
    Part(
        name="compare",
        doc="""Hold runs of known code against each other as `attnbench compare` does.

        Of identical code few cells may be called changed, and a cell that is 30 % slower must be
        named: each in turn in the data, and an implementation that really is (`mine-0.3`, against
        `mine-0`). Exits 1 if a goal is missed.""",
        options=(("--runs", {"type": FOLDER}, "New runs to count: quick-1, mine-0-1 … [none]."),),
    ),
    Part(
        name="chaos",
        doc="""Sweep over hostile implementations, and kill runner and workers meanwhile.

        Exits 1 where anything was lost, doubled, changed, mislabelled or left behind.""",
        options=(
            ("--on", {"type": NAMES, "default": "local", "show_default": True}, "local, ray"),
            _count("--cells", 200, "At least so many."),
            _count("--kills", 20, "kill -9.", 1),
            seed_option,
        ),
    ),
    Part(
        name="steps",
        doc="""Hold a decode call, timed alone with a cold cache, against the same inside a step.

        The step has a Llama's shapes, at a 7B's width and at an eighth of it, grouped heads and
        caches of 4096. Exits 1 where a call is more than 15 % off, or an order is wrong. 3 minutes.
        """,
        options=(
            _count("--layers", 8, "Of the model.", 1),
            _count("--rounds", 12, "In which step and calls take turns.", 1),
        ),
        kept=False,
    ),
    Part(
        name="shares",
        doc="""Hold the predicted share of attention in a step against models of transformers.

        Prefill of a Llama, a Qwen2 and a BERT, and a decode step through 8 layers, in float32 and
        bfloat16. Exits 1 where a share is more than 15 % off, or two intervals lack it. 8 minutes.
        """,
        options=(_count("--rounds", 4, "In which model and prediction take turns.", 1),),
        kept=False,
    ),
    Part(
        name="costs",
        doc="""Check random tiny cells over all axes, their FLOPs and memory, and random sweeps.

        Exits 1 if a right built-in is called incorrect, fails, hangs or ends its process; executes
        other FLOPs than are predicted, or takes other memory; or if a sweep ends with other codes
        than 0, 2 and 3. About an hour.""",
        options=(
            _count("--cells", 20_000, "How many."),
            _count("--first", 0, "The number to go on from."),
            _count("--sweeps", 200, "By the command line."),
            seed_option,
        ),
        kept=False,
    ),
    Part(
        name="definitions",
        doc="""Hold every definition in float64 against its formula in 50 digits, far and near.

        Exits 1 where one is off by more than its rounding may be, which intervals bound.
        15 seconds.""",
        options=(_count("--draws", 20, "Of each.", 1),),
        kept=False,
    ),
)  # fmt: skip
for part in PARTS:
    main.add_command(part.command())


@main.command()
@click.option("--kernels", type=NAMES, help="Kernels by name [all].")
@click.option("--dtypes", type=NAMES, help="As of attnbench check.")
def wrong(kernels: tuple[str, ...] | None, dtypes: tuple[str, ...] | None) -> None:
    """Check kernels that are wrong as people's are, and right ones of unusual make.

    For each the sentences that `attnbench check` says, and whether the expected words are in them.
    Exits 1 if a wrong one is not found, or a right one is called wrong. About a quarter of an hour.
    """
    from tests.validation.wrong import examine, tables

    found = examine(kernels, ",".join(dtypes or ()), tell)
    for text in tables(found):
        click.echo(text)
    if not all(said.well for said in found):
        raise SystemExit(ExitCode.FINDING)


def tell(message: str) -> None:
    """Say how far a part is."""
    say(message, err=True)


def show(ended: Ended) -> None:
    """Print what a part found, and end with its exit code."""
    from attnbench.report.render.tables import grid, shown

    for found in ended.tables:
        click.echo(f"\n{found.title}")
        click.echo(shown(grid(found.header, found.rows, right=found.header[1:])), nl=False)
        if found.note:
            say(found.note)
    for line in ended.lines:
        say(line)
    if ended.page:
        click.echo(f"tables:  {ended.page}")
    if ended.interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)
    if not ended.met:
        raise SystemExit(ExitCode.FINDING)


if __name__ == "__main__":
    main(prog_name="python -m tests.validation")
