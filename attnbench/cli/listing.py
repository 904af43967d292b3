"""`attnbench list`: what there is, and whether it can run here."""

from __future__ import annotations

import json

import click

from attnbench.cli.options import device_option, impl_files


@click.command("list")
@impl_files
@device_option
@click.option("--json", "as_json", is_flag=True, help="The whole catalogue as JSON.")
def list_(files: tuple[str, ...], device: str, as_json: bool) -> None:
    """Show implementations with devices, passes, declared laws, and whether they run here."""
    from attnbench.execution.runner import LocalRunner
    from attnbench.execution.settings import Settings

    with LocalRunner(Settings(device=device, files=files)) as runner:
        catalogue = runner.catalogue()
        for warning in runner.warnings:
            click.echo(f"Warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(catalogue, indent=1))
        return
    _print(catalogue)


def _print(catalogue: dict[str, object]) -> None:
    from attnbench.cli.summary import table

    rows = catalogue["implementations"]
    assert isinstance(rows, list)
    table(
        (
            "implementation",
            "serves",
            "time",
            "memory",
            "devices",
            "passes",
            "masks",
            "here",
            "what it is",
        ),
        [
            (
                row["name"],
                ", ".join(row["workloads"]),
                row["time"] or "–",
                row["memory"] or "–",
                ", ".join(row["devices"]),
                _passes(row["passes"]),
                ", ".join(row["masks"]),
                "no: " + row["unavailable"] if row["unavailable"] else "yes",
                row["doc"],
            )
            for row in rows
        ],
    )
    for kind in ("workloads", "projections", "caches", "positions"):
        entries = catalogue[kind]
        assert isinstance(entries, dict)
        click.echo(f"\n{kind}")
        for name, doc in entries.items():
            click.echo(f"  {name:17} {doc}")


def _passes(passes: list[str]) -> str:
    return "all" if len(passes) == 3 else ", ".join(passes)
