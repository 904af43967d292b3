"""`attnbench list`: what there is, and whether it can run here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from attnbench.cli.options import device_option, impl_files

if TYPE_CHECKING:
    from attnbench.schema.messages import Catalogue


@click.command("list")
@impl_files
@device_option
@click.option("--json", "as_json", is_flag=True, help="The whole catalogue as JSON.")
def list_(files: tuple[str, ...], device: str, as_json: bool) -> None:
    """Show implementations with devices, passes, declared laws, and whether they run here."""
    import msgspec

    from attnbench.execution.runner import LocalRunner
    from attnbench.execution.settings import Settings

    with LocalRunner(Settings(device=device, files=files)) as runner:
        catalogue = runner.catalogue()
        for warning in runner.warnings:
            click.echo(f"Warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(catalogue), indent=1))
        return
    _print(catalogue)


def _print(catalogue: Catalogue) -> None:
    from attnbench.cli.summary import table

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
                row.name,
                ", ".join(row.workloads),
                row.time or "–",
                row.memory or "–",
                ", ".join(row.devices),
                _passes(row.passes),
                ", ".join(row.masks),
                "no: " + row.unavailable if row.unavailable else "yes",
                row.doc,
            )
            for row in catalogue.implementations
        ],
    )
    for kind in ("workloads", "projections", "caches", "positions"):
        click.echo(f"\n{kind}")
        for name, doc in getattr(catalogue, kind).items():
            click.echo(f"  {name:17} {doc}")


def _passes(passes: tuple[str, ...]) -> str:
    return "all" if len(passes) == 3 else ", ".join(passes)
