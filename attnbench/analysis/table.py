"""The records table: one row a cell, as a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.analysis.columns import COLUMNS, Column, Kind
from attnbench.execution.store import Run, load_run

_PANDAS_TYPES: dict[Kind, str] = {"int": "Int64", "float": "float64", "text": "str"}


def load(run: Run | Path | str) -> pd.DataFrame:
    """Return one row for each recorded cell, the failed ones included, in recorded order.

    The columns are those of `COLUMNS`. What is unknown is null (`NA` in an integer column, `NaN`
    elsewhere), never 0. Integers are `Int64`, so that they stay integers beside a null.

    Raises:
        StoreError: the folder is no run, or it is damaged.
    """
    loaded = run if isinstance(run, Run) else load_run(Path(run))
    return pd.DataFrame({name: _series(item, loaded) for name, item in COLUMNS.items()})


def _series(column: Column, run: Run) -> pd.Series[Any]:
    values = [_plain(column.value(record, run), column.kind) for record in run.records]
    return pd.Series(values, dtype=_PANDAS_TYPES[column.kind])  # type: ignore[call-overload]


def _plain(value: Any, kind: Kind) -> int | float | str | None:
    """Fit a value into its column: whole numbers as int, lists of names as one text."""
    if value is None:
        return None
    if kind == "int":
        return int(value) if isinstance(value, int) else round(float(value))
    if kind == "float":
        return float(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
