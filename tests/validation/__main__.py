"""Evidence for the rules of attnbench: `python -m tests.validation scaling|laws|gate|…`.

`make validate PART=scaling` runs one part with its defaults. The parts keep what they found in a
folder under results/; `laws` and `gate` go on where they stopped.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from attnbench.cli import Commands
from attnbench.cli.options import (
    DURATION,
    NAMES,
    SIZES,
    output_option,
    say,
    seed_option,
)
from attnbench.errors import ExitCode


def _percents(context: Any, option: Any, texts: tuple[str, ...]) -> tuple[float, ...]:
    """Read 10,2.5: numbers above 0."""
    try:
        numbers = tuple(map(float, texts))
    except ValueError:
        numbers = ()
    if not numbers or not all(number > 0 for number in numbers):
        raise click.BadParameter("takes numbers above 0 such as 10,2.5", context, option)
    return numbers


ENVIRONMENT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(cls=Commands)
def main() -> None:
    """Hold attnbench's own measuring against what is known."""


@main.command()
@click.option("--runs", type=int, default=100, show_default=True, help="Alone, and beside two.")
@click.option("--faulty", type=int, default=50, show_default=True, help="With spoilt clocks.")
@seed_option
@output_option
@click.option("--name", default="selftest-sweeps", show_default=True, help="The folder.")
def sweeps(runs: int, faulty: int, seed: int, output: Path, name: str) -> None:
    """Start sweeps of four small cells alone, beside two busy processes, and with spoilt clocks.

    Each ends with 0, and the times of the last lie in the intervals of the first as often as those
    of the first themselves. Exits 1 where one sweep did not. The same command goes on where it
    stopped.
    """
    from tests.validation.sweeps import PAGE, examine, table

    summary, interrupted = examine(output / name, runs, faulty, seed, _tell)
    _show([table(summary)], output / name / PAGE, noted=True)
    if interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)
    if any(row["exits_of_0"] < row["sweeps"] for row in summary["conditions"]):
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--processes", type=click.IntRange(min=2), default=10, show_default=True, help="Each."
)
@click.option("--seq-lens", type=SIZES, default="512,1024", show_default=True, help="n.")
@output_option
def profiles(processes: int, seq_lens: tuple[int, ...], output: Path) -> None:
    """Compare profiles of the same code, and of code with one planted copy more."""
    from tests.validation.profiles import write

    write(output / "selftest-profile", processes, tuple(seq_lens), _tell)


@main.command()
@click.option("--draws", type=click.IntRange(min=1), default=20, show_default=True, help="Of each.")
def definitions(draws: int) -> None:
    """Hold every definition in float64 against its formula in 50 digits, at inputs far and near.

    Exits 1 where one is off by more than its rounding may be, which intervals bound. 15 seconds.
    """
    from tests.validation.definitions import examine, table

    found = examine(draws)
    _show([table(found)])
    if any(row.of_allowed > 1 for row in found):
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--draws",
    type=click.IntRange(min=1, max=100_000),
    default=200,
    show_default=True,
    help="Series drawn of each kernel over each range.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="Of the noise.",
)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of tables.")
@output_option
@click.option("--name", help="The folder's name, a new one [a time stamp].")
def scaling(as_json: bool, **options: Any) -> None:
    """Judge imagined kernels of known law, and count verdicts that are right, wrong or missing.

    Powers of n from 1 to 3, with floors, steps, kernel switches and logarithms, over realistic
    ranges and noise, each held to its own law and to wrong ones by the code that judges runs;
    beside it the rule that others use. Nothing is timed. Writes tables. Exits 1 if more than 1 %
    of the verdicts are wrong, or more than 10 % inconclusive over four octaves.
    """
    from tests.validation.scaling.session import PAGE, Request, examine
    from tests.validation.scaling.tables import tables

    finished = examine(Request(**options), _tell)
    if as_json:
        click.echo(json.dumps(finished.summary))
    else:
        found = tables(finished.summary)
        notes = dict.fromkeys(matrix.note for matrix in found)
        _show(found, finished.path / PAGE, notes)
    if not finished.met:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Runs there shall be in the end.",
)
@click.option(
    "--neighbours",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Processes that spin and sleep meanwhile.",
)
@click.option(
    "--budget",
    "budget_s",
    type=DURATION,
    default="3m",
    show_default=True,
    help="How long a run may take, with what is measured again.",
)
@seed_option
@output_option
@click.option(
    "--name", default="selftest-laws", show_default=True, help="The folder, new or to go on with."
)
def laws(**options: Any) -> None:
    """Measure kernels of exact exponents beside other work, and hold them to every law.

    Kernels that take c·n, c·n^2 and c·n^3, by the wall clock and by processor time, are swept,
    measured again until they are decided as `verify --until-decided` does it, and held to n, n^2
    and n^3. The same command goes on where it stopped. Exits 1 if a goal is missed.
    """
    from tests.validation.laws.session import PAGE, Request, examine, table

    path, summary = examine(Request(**options), _tell)
    _show([table(summary)], path / PAGE, noted=True)
    if summary["interrupted"]:
        raise SystemExit(ExitCode.INTERRUPTED)
    if not summary["met"]:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--aa",
    type=click.IntRange(min=0, max=10_000),
    default=40,
    show_default=True,
    help="Live gate runs of identical sides there shall be in the end.",
)
@click.option(
    "--inject",
    type=NAMES,
    callback=_percents,
    default="10,5",
    show_default=True,
    help="Slowdowns in percent, each planted in one cell of runs of its own.",
)
@click.option(
    "--each",
    type=click.IntRange(min=0, max=10_000),
    default=12,
    show_default=True,
    help="Live gate runs there shall be for each planted slowdown.",
)
@click.option(
    "--at-most", type=click.IntRange(min=1), help="Live runs in this sitting [all that miss]."
)
@click.option("--report-only", is_flag=True, help="Run nothing; count what is there again.")
@click.option(
    "--resamples",
    type=click.IntRange(min=0, max=1_000_000),
    default=2000,
    show_default=True,
    help="Runs of each kind resampled from the live ones' rounds, once all of those are there.",
)
@click.option("--cases", is_flag=True, help="Put real changes through the gate, too: minutes each.")
@click.option("--seq-lens", type=SIZES, default="128..1024", show_default=True, help="n.")
@click.option(
    "--neighbours",
    type=click.IntRange(min=0, max=64),
    default=0,
    show_default=True,
    help="Processes that spin and sleep for random 0.2 to 4 s beside the runs.",
)
@output_option
@click.option("--name", help="The folder, a new one or one to go on with [selftest-gate].")
def gate(**options: Any) -> None:
    """Hold the gate against sides that are known, and count false alarms and detections.

    Identical sides must pass, and a slowdown planted in one cell must be found. Runs are kept in
    one folder with all their times: the same command goes on where it stopped, a sitting may be
    interrupted. Further runs are resampled from their rounds, and other tools' rules are applied
    to the same times. A live run takes one to five minutes. Exits 1 if all runs are there (or with
    --report-only) and a goal is missed.
    """
    from tests.validation.gate.session import PAGE, Request, examine
    from tests.validation.gate.tables import tables

    finished = examine(Request(**options), _tell)
    _show(tables(finished.summary), finished.path / PAGE, noted=True)
    if finished.interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)
    if finished.missed:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--seeds", type=click.IntRange(min=1), default=20, show_default=True,
    help="Histories fabricated in each noise.",
)  # fmt: skip
@click.option(
    "--runs", type=click.Path(path_type=Path),
    help="A folder of runs of one code, as of attnbench history, to take the noise `busy` from"
    " [what noise.json has].",
)  # fmt: skip
@output_option
@click.option("--name", default="selftest-history", show_default=True, help="The folder.")
def history(**options: Any) -> None:
    """Count which steps `attnbench history` finds in fabricated histories of 200 runs.

    Steps of 10 % in the noise that runs of identical code showed; nothing is timed. Exits 1 if in
    the calm noise fewer than 95 % of the series have four of five found and at most one false.
    """
    from tests.validation.history.session import PAGE, Request, examine, tables

    path, summary = examine(Request(**options), _tell)
    _show(tables(summary), path / PAGE, noted=True)
    if not summary["met"]:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option(
    "--runs",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with runs named by code and number, quick-1, to count as well [none].",
)
@output_option
@click.option("--name", default="selftest-compare", show_default=True, help="The folder.")
def compare(**options: Any) -> None:
    """Hold runs of known code against each other as `attnbench compare` does.

    Of identical code few cells may be called changed, and a cell that is 30 % slower must be named:
    each in turn in the data, and an implementation that really is (`mine-0.3`, against `mine-0`).
    What is kept of the runs is enough to count again without them. Exits 1 if a goal is missed.
    """
    from tests.validation.compare import PAGE, Request, examine, met, tables

    path, summary = examine(Request(**options), _tell)
    _show(tables(summary), path / PAGE, noted=True)
    if not met(summary):
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--base", type=ENVIRONMENT, required=True, help="The base's interpreter.")
@click.option("--same", type=ENVIRONMENT, required=True, help="One of another environment.")
@click.option(
    "--slow",
    type=ENVIRONMENT,
    required=True,
    help="One of a third, into whose torch the slowdown is planted, for good.",
)
@click.option(
    "--each", type=click.IntRange(min=1), default=20, show_default=True, help="Runs of each kind."
)
@click.option(
    "--seq-lens",
    type=SIZES,
    default="128..1024",
    show_default=True,
    help="n, of which the plant is measured: of 128, 256, 512, 1024.",
)
@output_option
@click.option(
    "--name",
    default="selftest-environments",
    show_default=True,
    help="The folder, new or to go on with.",
)
def environments(**options: Any) -> None:
    """Hold the gate against environments that are known: one torch twice, and a slower copy.

    All three have the same version of torch. In the third, each call of
    scaled_dot_product_attention is made to take 10 % more processor time. The same command goes on
    where it stopped. A run takes one to five minutes.
    """
    from tests.validation.environments import Request, examine

    page, tables = examine(Request(**options), _tell)
    _show(tables, page, noted=True)


@main.command()
@output_option
def packages(output: Path) -> None:
    """Hold definitions, kernels, masks, positions and caches against what other packages have.

    transformers, torchtune, fla, lucidrains' and others, in an environment of their own under
    build/, which is made on the first run. Exits 1 where one lies apart by more than rounding.
    """
    from tests.validation.packages import examine

    page, tables, well = examine(output, _tell)
    _show(tables, page, noted=True)
    if not well:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@output_option
def forecast(output: Path) -> None:
    """Hold forecasts of wall times against those of the runs in a folder."""
    from tests.validation.forecast import tables

    _show(tables(output), output)


@main.command()
@click.option(
    "--inputs", type=click.IntRange(min=1), default=100_000, show_default=True, help="In all."
)
@seed_option
def fuzz(inputs: int, seed: int) -> None:
    """Damage files of runs, gates, profiles and claims, lists and command lines: what crashes?

    Nothing is started or measured. Exits 1 if an input ends in a traceback, hangs for 2 minutes, or
    reads as other numbers than were stored. About 10 minutes.
    """
    from tests.validation.fuzz import fuzz

    with tempfile.TemporaryDirectory(prefix="attnbench-fuzz-") as folder:
        found = fuzz(Path(folder) / "fuzz", inputs, seed, _tell)
    for finding in found.findings:
        say(f"{finding.kind}, number {finding.number}: {finding.what} ({finding.where})")
    total = sum(ends.total() for ends in found.ends.values())
    say(f"{total} inputs, {len(found.findings)} findings, the slowest took {found.slowest_s:.2f} s")
    if found.findings:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--cells", type=click.IntRange(min=1), default=2400, show_default=True, help="Many.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Draws.")
@seed_option
def stacks(cells: int, repeats: int, seed: int) -> None:
    """Check random stacks of 2 to 12 layers with right kernels, then one wrong layer of 12.

    Nothing is timed. Exits 1 if a right one is incorrect. About 5 minutes.
    """
    from attnbench.report.tables import table
    from tests.validation.stacks import right_stacks, wrong_layers

    right, wrong = right_stacks(cells, seed, _tell)
    for found in (right, wrong_layers(repeats, seed)):
        click.echo(f"\n{found.title}")
        click.echo(table(found.header, found.rows, right=found.header[1:]), nl=False)
    for line in wrong:
        say(line)
    if wrong:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--kernels", type=NAMES, help="Kernels by name [all].")
@click.option("--dtypes", type=NAMES, help="As of attnbench check.")
def wrong(kernels: tuple[str, ...] | None, dtypes: tuple[str, ...] | None) -> None:
    """Check kernels that are wrong as people's are, and right ones of unusual make.

    For each the sentences that `attnbench check` says, and whether the expected words are in them.
    Exits 1 if a wrong one is not found, or a right one is called wrong. About 15 minutes.
    """
    from tests.validation.wrong import examine, tables

    found = examine(kernels, ",".join(dtypes or ()), _tell)
    for text in tables(found):
        click.echo(text)
    if not all(said.well for said in found):
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--cells", "count", type=int, default=20_000, show_default=True, help="How many.")
@click.option("--first", type=int, default=0, show_default=True, help="The number to go on from.")
@click.option("--sweeps", type=int, default=200, show_default=True, help="By the command line.")
@seed_option
def cells(count: int, first: int, sweeps: int, seed: int) -> None:
    """Check random tiny cells over all axes, and sweeps with random lists of axes.

    Implementations are right: exits 1 if a cell is incorrect, fails, hangs or ends its process, or
    a sweep ends with other codes than 0, 2 and 3. About 40 minutes.
    """
    from tests.validation import cells as drawn

    found, interrupted = drawn.examine(range(first, max(first, count)), seed, _tell)
    for text in drawn.tables(found):
        click.echo(text)
    if interrupted:
        raise SystemExit(ExitCode.INTERRUPTED)
    exits, wrong = drawn.sweeps(sweeps, seed, _tell)
    ends = ", ".join(f"{times} with exit {code}" for code, times in sorted(exits.items()))
    say(f"{exits.total()} sweeps: {ends or 'none'}; something went wrong in {len(wrong)}")
    if found.wrong or wrong:
        raise SystemExit(ExitCode.FINDING)


@main.command()
def store() -> None:
    """Time how fast 10,000 records and 10⁶ samples load, and a record is stored.

    Exits 1 if that takes more than 2 s, 1 s and 2 ms.
    """
    from tests.validation.store import measured

    with tempfile.TemporaryDirectory(prefix="attnbench-store-", dir=".") as folder:
        if not measured(Path(folder), _tell):
            raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--on", "kinds", type=NAMES, default="local", show_default=True, help="local, ray")
@click.option("--cells", type=int, default=200, show_default=True, help="At least so many.")
@click.option("--kills", type=click.IntRange(min=1), default=20, show_default=True, help="kill -9.")
@seed_option
@output_option
def chaos(**options: Any) -> None:
    """Sweep over hostile implementations, and kill runner and workers meanwhile.

    Exits 1 where anything was lost, doubled, changed, mislabelled or left behind.
    """
    from tests.validation.chaos import examine

    page, table, well = examine(**options, tell=_tell)
    _show([table], page)
    if not well:
        raise SystemExit(ExitCode.FINDING)


@main.command()
@click.option("--cells", type=click.IntRange(min=20), default=2000, show_default=True, help="Many.")
def ray(cells: int) -> None:
    """Sweep over cells that do nothing on four slots of a Ray cluster: what is spent beside them.

    Then once more, with one of two nodes killed halfway. Exits 1 where more than 5 % is spent, or
    a cell lacks its record or has two.
    """
    from tests.validation.cluster import examine

    with tempfile.TemporaryDirectory(prefix="attnbench-ray-", dir=".") as folder:
        found = [examine(cells, kill, Path(folder), _tell) for kill in (False, True)]
        if not all(found):
            raise SystemExit(ExitCode.FINDING)


def _tell(message: str) -> None:
    say(message, err=True)


def _show(
    tables: Iterable[Any],
    page: Path | None = None,
    closing: Iterable[str] = (),
    *,
    noted: bool = False,
) -> None:
    """Print tables, each with its note where `noted`, then closing lines and where the page is."""
    from attnbench.report.tables import table

    for found in tables:
        click.echo(f"\n{found.title}")
        click.echo(table(found.header, found.rows, right=found.header[1:]), nl=False)
        if noted and found.note:
            say(found.note)
    click.echo("")
    for line in closing:
        say(line)
    if page:
        click.echo(f"tables:  {page}")


if __name__ == "__main__":
    main(prog_name="python -m tests.validation")
