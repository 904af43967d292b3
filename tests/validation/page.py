"""The folder that a validation leaves, and the tables and pages in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attnbench.base.units import escape
from attnbench.base.units import table as grid
from attnbench.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header and rows of text under a title; all columns but the first hold numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(title: str, tables: Iterable[Table], *lists: Iterable[str]) -> str:
    """The page: a title, lists of sentences, and all tables."""
    blocks = [f"# {escape(title)}"]
    blocks += ["\n".join(f"- {escape(line)}" for line in lines) for lines in lists]
    for table in tables:
        blocks += [f"## {escape(table.title)}", grid(table.header, table.rows), escape(table.note)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as err:
        raise StoreError(f"cannot write into {folder} ({err.strerror})") from err
