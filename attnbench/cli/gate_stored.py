"""The gate's second-class ways: against a stored run, and between files of pytest-benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnbench.cli.progress import Display
from attnbench.cli.summary import table
from attnbench.errors import ExitCode
from attnbench.execution.store import find_run, load_info
from attnbench.gate.decide.benchmark_files import files_of
from attnbench.gate.decide.outcome import Outcome
from attnbench.gate.decide.pytest_benchmark import as_text, compare_files
from attnbench.gate.decide.rules import DEFAULT_THRESHOLD, Rules
from attnbench.gate.run.baseline import BaselineRequest, compare_with_stored
from attnbench.report.gate import texts


def against_baseline(options: dict[str, Any]) -> ExitCode:
    """The cells of a stored run, measured anew on the same machine; a run of its own is left."""
    run = find_run(options["baseline"], options["output"])
    device = load_info(run).get("environment", {}).get("device")
    request = BaselineRequest(
        run=run,
        rules=_rules(options, str(device)),
        files=tuple(str(Path(file).resolve()) for file in options["files"]) or None,
        output=options["output"],
        name=options["name"],
        advisory=options["advisory"],
    )
    with Display(quiet=options["quiet"]) as display:
        found = compare_with_stored(request, display)
    if options["quiet"]:
        click.echo(found.path)
    else:
        _print(found.outcome)
        click.echo(f"records: {found.path / 'records.jsonl'}")
    return found.outcome.exit_code


def between_files(options: dict[str, Any]) -> ExitCode:
    """What files of both sides prove."""
    base, candidate = (files_of(text) for text in options["pytest_benchmark"])
    found = compare_files(base, candidate, _rules(options, "cpu"), advisory=options["advisory"])
    click.echo(found.words if options["quiet"] else as_text(found))
    return found.exit_code


def _rules(options: dict[str, Any], device: str) -> Rules:
    default = DEFAULT_THRESHOLD.get(device, Rules.threshold)
    threshold, growth = options["threshold"], options["growth"]
    return Rules(
        threshold=default if threshold is None else threshold,
        growth=Rules.growth if growth is None else growth,
    )


def _print(outcome: Outcome) -> None:
    common, names = texts.labels([row.cell for row in outcome.rows])
    rows = [texts.texts(row, names[number]) for number, row in texts.worst_first(outcome.rows)]
    table(texts.HEADER, rows, right=texts.HEADER[2:5])
    for row, name in zip(outcome.rows, names, strict=True):
        if row.verdict != "ok" or row.notes:
            click.echo(f"{row.verdict}: {name}: {'; '.join((row.reason, *row.notes))}")
    click.echo(f"all cells: {common}")
    click.echo(f"{texts.title(outcome)} (exit code {int(outcome.exit_code)})")
