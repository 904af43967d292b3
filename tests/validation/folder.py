"""The folder that a validation leaves: its name is free, and it is made only when needed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from attnbench.base.files import check_name
from attnbench.errors import StoreError


def free_folder(output: Path, name: str | None, prefix: str) -> Path:
    """`output`/`name`, or a time stamp after `prefix`; nothing is made yet.

    Raises:
        StoreError: the name is taken or is no plain folder name.
    """
    path = output / check_name(name or datetime.now(UTC).strftime(f"{prefix}-%Y%m%d-%H%M%S"))
    if path.exists():
        raise StoreError(f"{path} exists already; choose another --name")
    return path
