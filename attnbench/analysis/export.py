"""The records table for other programs: CSV and JSON to a text stream, Parquet to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from attnbench.errors import StoreError


def to_csv(frame: pd.DataFrame, stream: TextIO) -> None:
    """Write a header and one line a row; null is empty, integers are integers."""
    frame.to_csv(stream, index=False, lineterminator="\n")


def to_json(frame: pd.DataFrame, stream: TextIO) -> None:
    """Write a list with one object a row, one row a line; null is null."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in plain_rows(frame))
    stream.write("[\n" + ",\n".join(lines) + "\n]\n")


def to_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a Parquet file; integers are int64 with real nulls.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        frame.to_parquet(path, index=False)
    except OSError as err:
        raise StoreError(f"cannot write {path} ({err.strerror or err})") from err


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts of plain Python values, with None for null."""
    columns = {str(name): _plain(series) for name, series in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(series: pd.Series[Any]) -> list[Any]:
    known = series.notna().tolist()
    return [value if there else None for value, there in zip(series.tolist(), known, strict=True)]
