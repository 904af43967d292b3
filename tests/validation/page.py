"""The folder that a validation leaves, and the tables, pages and pictures in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.base.files import check_name
from attnbench.base.units import escape
from attnbench.base.units import table as grid
from attnbench.errors import StoreError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def free_folder(output: Path, name: str | None, prefix: str) -> Path:
    """`output`/`name`, or a time stamp after `prefix`; nothing is made yet.

    Raises:
        StoreError: the name is taken or is no plain folder name.
    """
    path = output / check_name(name or datetime.now(UTC).strftime(f"{prefix}-%Y%m%d-%H%M%S"))
    if path.exists():
        raise StoreError(f"{path} exists already; choose another --name")
    return path


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header and rows of text under a title; all columns but the first hold numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(title: str, tables: Iterable[Table], *lists: Iterable[str], picture: str = "") -> str:
    """The page: a title, lists of sentences, a picture where there is one, and all tables."""
    blocks = [f"# {escape(title)}"]
    blocks += ["\n".join(f"- {escape(line)}" for line in lines) for lines in lists]
    blocks.append(picture)
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


def write_picture(figure: Figure, stem: str, folder: Path, alt: str) -> str:
    """Write `stem`.png and `stem`.svg; return the Markdown that shows the first.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report import figures  # here: matplotlib comes with it

    try:
        figures.write(figure, stem, folder)
    except OSError as err:
        raise StoreError(f"cannot write into {folder} ({err.strerror})") from err
    return f"![{alt}]({stem}.png)"
