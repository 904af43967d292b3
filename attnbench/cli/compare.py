"""`attnbench compare`: stored runs held against each other."""

from __future__ import annotations

from pathlib import Path

import click

from attnbench.cli.options import RUN, output_option
from attnbench.errors import ExitCode, UsageError


@click.command()
@click.argument("sources", type=RUN, nargs=-1, metavar="A B [C]...")
@click.option("--fail-slower", is_flag=True, help="Exit 1 if a cell is slower.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
@click.option("--name", help="Write compare.html and compare.md into a new folder of this name.")
@output_option
def compare(
    sources: tuple[str, ...], fail_slower: bool, as_json: bool, name: str | None, output: Path
) -> None:
    """Compare runs that were measured at different times.

    Each of A, B … is a run (folder, name, `latest`, `previous`), or a file of pytest
    --benchmark-json; all others are held against A. On one machine each cell is slower, faster, or
    not seen to have changed, beyond what its runs of equal code differ by; across machines the
    order of implementations, their speed over naive and their growth are compared, never times.
    Exits 0 whatever is found, unless with --fail-slower.
    """
    from attnbench.analysis import compare as analysis
    from attnbench.base.files import make_folder
    from attnbench.base.jsontext import encode
    from attnbench.gate.decide.stored import folder_of_gate
    from attnbench.report import compare as report
    from attnbench.report import parts

    for gate in filter(None, (folder_of_gate(source, output) for source in sources)):
        raise UsageError(
            f"{gate} is a gate run: it has compared its two versions itself; see it with:"
            f" attnbench gate --replay {gate}"
        )
    found = analysis.compare(sources, output)
    sections = list(map(report.section, found))
    page = parts.write_all(make_folder(output, name), "compare", sections) if name else None
    if as_json:
        click.echo(encode(report.as_json(found)).decode())
    else:
        click.echo(parts.terminal(sections), nl=False)
        if page:
            click.echo(f"page: {page}")
    slower = any(r.verdict == "slower" for c in found if c.same for r in c.same.rows)
    if fail_slower and slower:
        raise SystemExit(int(ExitCode.FINDING))
