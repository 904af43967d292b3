"""`attnbench docs`: the pages of docs/, which are installed with the package."""

from __future__ import annotations

from pathlib import Path

import click

from attnbench.base.registry import unknown
from attnbench.errors import UsageError


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
    """Print a page of the documentation; without a TOPIC list the pages."""
    pages = _pages()
    if topic is None:
        for name, file in pages.items():
            click.echo(f"{name:12} {file.read_text('utf-8').splitlines()[0].lstrip('# ')}")
        return
    if (name := Path(topic).stem) not in pages:
        raise unknown("topic", topic, list(pages))
    click.echo(pages[name].read_text("utf-8"), nl=False)
