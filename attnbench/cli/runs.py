"""Commands on what is stored: list, report, export, merge, history, compare and docs."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.registry import require
from attnbench.base.units import counted
from attnbench.cli.options import (
    PATH,
    RUN,
    baseline_option,
    command_options,
    found_run,
    impl_files,
    run_argument,
    say,
    show,
    written,
)
from attnbench.errors import StoreError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


@click.command("list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@command_options("list", impl=impl_files("A Python file with implementations of yours."))
def list_(names: tuple[str, ...], files: tuple[str, ...], device: str, **options: Any) -> None:
    """Show the implementations, by family.

    Each with its declared law of time, or why it cannot run here. The workloads, projections,
    caches, masks and position encodings follow. JSON adds parameters, the law of memory, devices,
    passes, dtypes and masks.

    With NAME (longformer, gqa, "kv cache", llama …): its parts, and a command that measures it. Of
    a model (llama-3.1-8b, or the path of a config.json): its calls, by step and kind of layer. Of
    a file of `attnbench capture`: its cases, with their counts.
    """
    from attnbench.execution.process import Settings
    from attnbench.execution.runner import LocalRunner
    from attnbench.planning.caselist import is_captured
    from attnbench.planning.lookup import look_up
    from attnbench.planning.models import MODELS, calls_of
    from attnbench.report.documents.catalogue import document, models_document

    if any(name in MODELS or name.endswith(".json") for name in names):
        captured = [name for name in names if is_captured(Path(name))]
        calls = {name: calls_of(name) for name in names}
        raise SystemExit(show(models_document(calls, captured), options))
    with LocalRunner(Settings(device=device, files=files)) as runner:
        catalogue = runner.catalogue()
        for warning in runner.warnings:
            say(f"Warning: {warning}", err=True)
    answers, catalogue = look_up(names, catalogue) if names else ([], catalogue)
    models = {} if names else {n: row["source"].partition("/blob")[0] for n, row in MODELS.items()}
    raise SystemExit(show(document(catalogue, answers, files, models), options))


@click.command()
@run_argument
@command_options("report", baseline=baseline_option)
def report(run: str, output: Path, baseline: str | None, names: list[str], **paper: Any) -> None:
    """Draw the page, the plots and the Markdown of a run.

    RUN is a folder, a name, `latest` or `previous`. Written into it are report.html, report.md and
    the plots as PNG; of advice advise.html, of a profile profile.html, of a gate run gate.html,
    decided again from the raw data. With --figure only these figures, as files in figures/, whose
    paths are printed.
    """
    from attnbench.report.documents import stored

    if names:
        from attnbench.report.pages import draw_for_paper

        for path in draw_for_paper(
            found_run(run, output), names, baseline=baseline, impls=paper["impls"] or (),
            where=paper["where"], kind=paper["kind"] or "pdf", width=paper["width"] or 3.3,
            titled=not paper["untitled"],
        ):  # fmt: skip
            click.echo(path)
        return
    if any(paper.values()):
        raise UsageError("--format, --width, --impls, --where and --no-title are for --figure NAME")
    path, document = stored(run, output, baseline)
    formats = ["html"] if document.kind == "gate" else ["markdown", "html"]
    click.echo(written(path, document, formats).commands[0][1])


@click.command()
@run_argument
@click.option("--figure", hidden=True, help="Refused: `report` draws.")
@command_options("export")
def export(run: str, output: Path, kind: str, to: Path | None, **chosen: Any) -> None:
    """Write the table of a run, one row for each cell.

    The fastest of a case comes first. RUN is a folder, a name, `latest` or `previous`. Unknown
    values are null, not 0.
    """
    from attnbench.analysis import table

    if chosen["figure"]:
        raise UsageError(f"figures are drawn by: attnbench report {run} --figure NAME")
    if kind == "parquet" and to is None:
        raise UsageError("parquet is binary; name a file with --to FILE")
    frame = table.load(found_run(run, output), chosen["baseline"])
    columns, for_people = chosen["columns"], kind in ("latex", "markdown")
    if chosen["raw"] and not for_people:
        raise UsageError(f"--raw is for latex and markdown: {kind} is raw")
    rows = table.selected(frame, chosen["where"], None if for_people else columns)
    if for_people:
        rows = table.for_people(rows, columns, raw=chosen["raw"])
    if rows.empty and not frame.empty:
        say("no row matches --where", err=True)
    write = getattr(table, f"to_{kind}")
    if to is None:
        write(rows, sys.stdout)
    elif kind == "parquet":
        write(rows, to)
    else:
        try:
            with to.open("w", encoding="utf-8", errors="replace") as file:
                write(rows, file)
        except OSError as err:
            raise StoreError(f"cannot write {to} ({err.strerror}); choose another --to") from err


@click.command()
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN RUN …")
@command_options("merge")
def merge(runs: tuple[str, ...], output: Path, **options: Any) -> None:
    """Join the shards of a sweep, also from several machines, in one run.

    RUN is a folder, a name, `latest` or `previous`. What `sweep --shard 1/8` … `--shard 8/8`
    measured becomes the run that one sweep would have made; its records name their machine, its
    run.json the runs it was made of, which stay as they are.
    """
    from attnbench.execution import merging
    from attnbench.store.runs import load_run

    parts = [found_run(run, output, warn=False) for run in runs]
    merged = load_run(merging.merge(parts, output, **options))
    say(f"{len(merged.records)} cells of {len(runs)} runs -> {merged.path}")
    if merged.unfinished:
        say(merged.unfinished)
    say(f"report:  attnbench report {shlex.quote(str(merged.path))}")


@click.command()
@click.argument("folder", type=PATH)
@command_options("history")
def history(
    folder: Path, run: str | None, output: Path, least: float, *, write: bool, **options: Any
) -> None:  # fmt: skip
    """Show where times changed for good, over the runs in a folder.

    FOLDER holds run folders, or history.jsonl, a line a run, to which --add appends one: a name in
    --output, a folder, `latest` or `previous`. --write puts history.html and history.md into it.

    Each cell is a line over the runs of one machine, without changes common to all cells of a run.
    A step in it is a regression or an improvement. It is suspicious if it rests on few runs, or if
    the environment or other cells changed in the same place. To compare two versions, use
    `attnbench gate`. Exits 0 whatever it finds.
    """
    from attnbench.analysis.history import entries

    if run is not None:
        found = found_run(run, output, warn=False)
        added = entries.add(folder, found)
        file, what = folder / entries.FILE, "added to" if added else "is already in"
        click.echo(
            f"{found.path.name} {what} {file} ({counted(len(entries.read_file(file)), 'run')})"
        )
        return
    from attnbench.analysis.history import series
    from attnbench.report.documents.history import document

    machines = document(series.history(entries.read(folder), least))
    page = "page", f"attnbench history {shlex.quote(str(folder))} --write"
    show(written(folder, machines) if write else replace(machines, commands=[page]), options)


@click.command()
@click.argument("sources", type=RUN, nargs=-1, metavar="A B [C]...")
@command_options("compare")
def compare(
    sources: tuple[str, ...],
    name: str | None,
    output: Path,
    fail_slower: bool,
    fail_removed: bool,
    **options: Any,
) -> None:
    """Compare runs that were measured at different times.

    Each of A, B … is a run (folder, name, `latest`, `previous`), or a file of pytest
    --benchmark-json; all others are compared with A. On one machine a cell is slower or faster if
    its time changed by more than that of equal code does from run to run. Across machines the order
    of implementations, their speed over naive and their growth are compared, never times. Cells
    that only A has are listed. Exits 0 whatever is found, unless --fail-slower or --fail-removed.
    """
    from attnbench.analysis import compare as analysis
    from attnbench.report.documents.compare import document
    from attnbench.store.folder import COMPARISON, RunFolder

    comparisons = analysis.compare(sources, output)
    found = document(comparisons, fail_slower=fail_slower, fail_removed=fail_removed)
    if name:
        with RunFolder.create(COMPARISON, output, name) as folder:
            found = written(folder.path, found)
    raise SystemExit(show(found, options))


def _pages() -> dict[str, Path]:
    """The pages by topic: as they are installed, else those of the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parent / "docs"):
        if pages := {file.stem: file for file in sorted(folder.glob("*.md"))}:
            return pages
    raise UsageError("the documentation is missing; install attnbench again")


@click.command()
@click.argument(
    "topic", required=False, metavar="[TOPIC]",
    shell_complete=lambda _context, _topic, text: [x for x in _pages() if x.startswith(text)],
)  # fmt: skip
def docs(topic: str | None) -> None:
    """Print a page of the documentation.

    Its tables are as wide as the terminal. Without a TOPIC list the pages.
    """
    from attnbench.report.render import tables

    pages = _pages()
    if topic is None:
        for name, file in pages.items():
            say(f"{name:12} {file.read_text('utf-8').splitlines()[0].lstrip('# ')}", hang=13)
        return
    require("topic", [name := Path(topic).stem], pages)
    text, to = pages[name].read_text("utf-8"), tables.console()
    if to.width < 10_000:  # else a program reads it
        text = re.sub(r"(?:^\|.*\n)+", lambda found: _table(found[0], to), text, flags=re.MULTILINE)
    click.echo(text, nl=False)


def _table(text: str, to: Console) -> str:
    """A table of Markdown as the terminal has room for it."""
    from attnbench.report.render import tables

    head, _, *rows = (
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
    )
    return tables.shown(tables.grid(head, rows, to=to), to=to)
