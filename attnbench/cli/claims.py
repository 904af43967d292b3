"""`attnbench claims`: statements of notes or papers, with what was measured and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnbench.cli.options import NAMES, run_argument
from attnbench.schema.finding import SIGNS, VERDICTS

if TYPE_CHECKING:
    from attnbench.analysis.claims.ledger import Ledger


@click.command()
@run_argument
@click.option(
    "--file", type=click.Path(path_type=Path), metavar="TOML", help="Your claims, not the notes'."
)
@click.option("--only", type=NAMES, metavar="IDS", help="These claims alone, by their ids.")
@click.option("--json", "as_json", is_flag=True, help="Claims, findings and figures as one object.")
def claims(
    run: str, output: Path, file: Path | None, only: tuple[str, ...] | None, as_json: bool
) -> None:
    """Hold claims against RUN: whether a paper's table, or a README's, comes out here.

    RUN is a folder, a name, or `latest`. Without --file the claims are those of five lecture notes
    on attention. A claim is a few lines of TOML:

    \b
      [[claim]]
      id = "sdpa-speed"
      source = "README"
      place = "Results, table 1"
      says = "sdpa is at least 1.5x faster than naive at n = 2048"
      quantity.kind = "ratio"
      quantity.where = { workload = "attention", seq_len = 2048 }
      quantity.first = { impl = "naive" }
      quantity.second = { impl = "sdpa" }
      relation = { is = ">=", limit = 1.5 }

    `where` selects by columns of `attnbench export`. A quantity is a value, ratio, exponent,
    crossover, share (of a model's term) or unmeasured; a relation one of ==, <, >, <=, >=, between,
    about, with a tolerance. `right = "…"` marks what should be refuted, and says what is right;
    `open = true` marks what may go either way. Every field: attnbench/analysis/claims/statement.py.

    Each claim holds, is refuted, or is inconclusive, with the reason. Exits 0 when every verdict
    that was reached is the expected one, 1 when one is not, 3 when none could be reached.
    """  # noqa: D301
    from msgspec import to_builtins

    from attnbench.analysis.claims.ledger import agrees, exit_code, ledger
    from attnbench.analysis.claims.reading import NOTES, read
    from attnbench.execution.store import find_run, load_run

    stated = read(file or NOTES)
    loaded = load_run(find_run(run, output))
    found = ledger(stated, loaded, only)
    code = int(exit_code(found))
    if as_json:
        rows = [
            {
                **to_builtins(c),
                "expected": c.expected,
                "finding": f.to_json(),
                "agrees": agrees(c, f),
            }
            for c, f in found
        ]
        click.echo(json.dumps({"run": loaded.run_id, "claims": rows}, indent=1))
    else:
        _print(found)
        click.echo(f"run: {loaded.path}")
        verdicts = [finding.verdict for _, finding in found]
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
        against = ", ".join(claim.id for claim, finding in found if not agrees(claim, finding))
        summary = f"not as expected: {against}" if against else "all as expected"
        click.secho(f"{counts}; {summary}", fg={0: "green", 1: "red", 3: "yellow"}[code])
    raise SystemExit(code)


def _print(found: Ledger) -> None:
    """One row a claim; what is right where a statement is not."""
    from attnbench.report.tables import table

    header = ("", "claim", "what is claimed", "where", "measured", "verdict", "expected")
    rows = [
        [SIGNS[f.verdict], c.id, c.says, f"{c.source} · {c.place}", f.reason, f.verdict, c.expected]
        for c, f in found
    ]
    shown = [[text or "either" for text in row] for row in rows]
    click.echo(table(header, shown), nl=False)
    click.echo()
    for claim, _ in found:
        if claim.right or claim.note:
            read_as = f" (read as: {claim.reading})" if claim.reading else ""
            what = "right is" if claim.right else "note"
            click.echo(f"{claim.id}, {what}: {claim.right or claim.note}{read_as}")
