"""`attnbench claims`: the notes' statements one by one, with what was measured and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnbench.cli.options import NAMES, output_option
from attnbench.schema.finding import SIGNS, VERDICTS

if TYPE_CHECKING:
    from attnbench.claims.ledger import Ledger
    from attnbench.execution.store import Run

_COLOURS = {0: "green", 1: "red", 3: "yellow"}


@click.command()
@click.argument("run", required=False)
@output_option
@click.option("--only", type=NAMES, metavar="IDS", help="These claims alone, by their ids.")
@click.option("--json", "as_json", is_flag=True, help="Claims, findings and figures as one object.")
def claims(run: str | None, output: Path, only: tuple[str, ...] | None, as_json: bool) -> None:
    """Check what five notes on attention say, one claim at a time, against RUN.

    RUN is a folder, a name, or `latest`, which is taken where there is one. Identities are
    computed in float64 and need no run; counted FLOPs and bytes, and times, are taken from it.
    Each claim holds, is refuted, or is inconclusive, with the reason; beside it stands what theory
    says of the statement (right, wrong, misleading, open), and at the end what is right instead.

    Exits 0 when every verdict that was reached agrees with theory (right holds, wrong is refuted),
    1 when one contradicts it, 3 when no verdict could be reached.
    """
    from attnbench.claims.ledger import exit_code, ledger

    loaded = _run(run, output)
    found = ledger(loaded, only)
    if as_json:
        _print_json(found, loaded)
    else:
        _print(found, loaded)
    raise SystemExit(int(exit_code(found)))


def _run(name: str | None, output: Path) -> Run | None:
    """The named run; the latest where none is named, and none where there is no run."""
    from attnbench.execution.store import find_run, load_run, runs_in

    if name is None and not runs_in(output):
        return None
    return load_run(find_run(name or "latest", output))


def _print_json(found: Ledger, run: Run | None) -> None:
    import json

    rows = [
        claim.to_json() | {"finding": finding.to_json(), "agrees": claim.agrees(finding)}
        for claim, finding in found
    ]
    click.echo(json.dumps({"run": run and run.run_id, "claims": rows}, indent=1))


def _print(found: Ledger, run: Run | None) -> None:
    """One row a claim; what is right where a statement is not; the files; the counts."""
    from attnbench.cli.summary import table

    rows = [
        (SIGNS[f.verdict], c.id, c.text, c.where, f.reason, f.verdict, c.theory) for c, f in found
    ]
    table(("", "claim", "what is claimed", "where", "measured", "verdict", "theory"), rows)
    click.echo()
    _print_right(found)
    for note in sorted({claim.note for claim, _ in found}):
        click.echo(f"note {note[:3]}: {note}")
    if run is None:
        click.echo(
            "no run: identities alone. FLOPs, bytes and times of the rest come with"
            " `attnbench verify --sweep`; then `attnbench claims`"
        )
    else:
        click.echo(f"run: {run.path}")
    _print_counts(found)


def _print_right(found: Ledger) -> None:
    """What is right, for each statement that theory calls wrong or misleading."""
    not_right = [claim for claim, _ in found if claim.right is not None]
    if not_right:
        click.echo("not right as written:")
    for claim in not_right:
        click.echo(f"  {claim.id} ({claim.theory}; {claim.where}): {claim.right}")
        if claim.reading:
            click.echo(f"    read so: {claim.reading}")


def _print_counts(found: Ledger) -> None:
    """How many of each verdict, and those that contradict theory by name."""
    from attnbench.claims.ledger import exit_code

    verdicts = [finding.verdict for _, finding in found]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
    against = [claim.id for claim, finding in found if not claim.agrees(finding)]
    says = f"against theory: {', '.join(against)}" if against else "none contradicts theory"
    click.echo(click.style(f"{counts}; {says}", fg=_COLOURS[int(exit_code(found))]))
