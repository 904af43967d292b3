"""The records table, one row a cell: loading, comparing within a run, and exporting it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from attnbench.analysis.axes import in_order, varying
from attnbench.analysis.columns import COLUMNS, ColumnKind, TableRow
from attnbench.analysis.pairs import ratio
from attnbench.analysis.ratios import baseline_of, set_ratios
from attnbench.base import units
from attnbench.base.registry import nearest
from attnbench.errors import StoreError, UsageError
from attnbench.schema.case import Position
from attnbench.schema.record import Record
from attnbench.store.runs import Run, load_run

WORST_FIRST = ("incorrect", "crashed", "error", "oom", "timeout", "unsupported", "skipped")
Ratio = tuple[float | None, float | None, float | None]  # value, low, high

_PANDAS_TYPES: dict[ColumnKind, str] = {"int": "Int64", "float": "float64", "text": "str"}


def load(run: Run | Path | str, baseline: str | None = None) -> pd.DataFrame:
    """Return one row for each recorded cell, the failed ones included, best first in each case.

    The columns are those of `COLUMNS`. What is unknown is null (`NA` in an integer column, `NaN`
    elsewhere), never 0. Integers are `Int64`, so that they stay integers beside a null. Cases are
    in the order of their axes; of the rows of one `ratios.set_ratios` has the order.

    Raises:
        StoreError: the folder holds no run, or a damaged one.
        UnknownNameError: the run has no implementation called `baseline`.
    """
    loaded = run if isinstance(run, Run) else load_run(Path(run))
    rows = [TableRow(record, loaded) for record in loaded.records]
    rows = set_ratios(rows, baseline_of(loaded, baseline))
    found = {}
    for name, column in COLUMNS.items():
        values = [_plain(column.value(row), column.kind) for row in rows]
        found[name] = pd.Series(values, dtype=_PANDAS_TYPES[column.kind])  # type: ignore[call-overload]
    return in_order(pd.DataFrame(found))


def _plain(value: Any, kind: ColumnKind) -> int | float | str | None:
    """Fit a value into its column: whole numbers as int, lists of names as one text."""
    if value is None:
        return None
    if kind == "int":
        return int(value) if isinstance(value, int) else round(float(value))
    if kind == "float":
        return float(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# Comparisons within one run.


def time_ratio(run: Run, above: Record | None, below: Record | None) -> Ratio:
    """Time of `above` / that of `below`, as `pairs.ratio`; None where not known.

    Nor is it across models of device, on which a run may have been measured.
    """
    if above is None or below is None or not (above.samples and below.samples):
        return None, None, None
    if not run.same_model(above, below):
        return None, None, None
    if above is below:
        return 1.0, None, None  # by definition; an interval would suggest otherwise
    value, interval = ratio(above, below)
    return value, *(interval or (None, None))


def rope_cost(run: Run) -> pd.DataFrame:
    """Time with a position encoding / time without it: same case and implementation otherwise.

    The records table's rows of the encoded cells, with `cost`, `cost_low` and `cost_high`; only
    pairs of which both halves were measured.
    """
    cells, ratios = {record.cell.key: record for record in run.records}, {}
    for record in run.records:
        case, plain = record.cell.case, replace(record.cell.case, position=Position())
        without = cells.get((plain.case_id, record.cell.impl)) if case != plain else None
        ratios[record.cell.key] = time_ratio(run, record, without)
    frame = load(run)
    names = ["cost", "cost_low", "cost_high"]
    values = [ratios[key] for key in zip(frame["case_id"], frame["impl"], strict=True)]
    frame[names] = pd.DataFrame(values, columns=names, dtype="float64")
    return frame[frame["cost"].notna()].reset_index(drop=True)


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Cells without a result, gathered by implementation, status and reason.

    Columns `impl`, `status`, `reason`, `cells` (how many), and `smallest_n`, `largest_n`. What is
    wrong (incorrect, crashed, error) comes before what is merely absent.
    """
    bad = frame[frame["status"] != "ok"]
    gathered = bad.groupby(["status", "impl", "reason"], sort=False, dropna=False).agg(
        cells=("seq_len", "size"), smallest_n=("seq_len", "min"), largest_n=("seq_len", "max")
    )
    rows = gathered.reset_index()
    order = rows["status"].map({status: i for i, status in enumerate(WORST_FIRST)})
    return rows.iloc[order.argsort(kind="stable")].reset_index(drop=True)


def spent(run: Run) -> list[tuple[str, float]]:
    """Where the wall time went: (stage, seconds), and last what no stage accounts for.

    From run.json; for a run that was killed, the sum over its records.
    """
    stages: dict[str, float] = dict(run.info.get("spent") or {})
    wall_s = stages.pop("wall_s", None)
    if not stages:
        for record in run.records:
            for stage, seconds in record.spent_s.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
    found = [(stage, float(seconds)) for stage, seconds in stages.items()]
    rest = 0.0 if wall_s is None else wall_s - sum(seconds for _, seconds in found)
    return [*found, ("elsewhere", rest)] if rest > 0.005 else found


# For other programs.


def to_csv(frame: pd.DataFrame, stream: TextIO) -> None:
    """Write a header and one line a row; null is empty, integers are integers."""
    frame.to_csv(stream, index=False, lineterminator="\n")


def to_json(frame: pd.DataFrame, stream: TextIO) -> None:
    """Write a list with one object a row, one row a line; null is null."""
    columns = [series.astype(object).where(series.notna(), None) for _, series in frame.items()]
    rows = (dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True))
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
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


_SHORT = ("impl", "time_us", "speedup", "memory_workspace_bytes")
_WITH_INTERVAL = ("time_us", "speedup", "behind")


def selected(frame: pd.DataFrame, where: str | None, columns: Iterable[str] | None) -> pd.DataFrame:
    """The rows for which the condition `where` holds, `mask == 'causal'`, and the columns named.

    Raises:
        UsageError: it is no condition on the columns, or a column is unknown.
    """
    if where:
        # The one column whose name is a word of Python's own, unless within quotes.
        text = re.sub(r"('[^']*'|\"[^\"]*\"|`[^`]*`)|\bpass\b", lambda m: m[1] or "`pass`", where)
        try:
            holds = frame.eval(text, engine="python")
            if not (isinstance(holds, pd.Series) and pd.api.types.is_bool_dtype(holds.dtype)):
                raise TypeError("it is neither true nor false of a row")
        except (ArithmeticError, AttributeError, LookupError, NameError, NotImplementedError,
                SyntaxError, TypeError, ValueError) as err:  # fmt: skip
            name = re.search(r"name '(\w+)' is not defined", str(err))
            why = str(err).partition("\n")[0] + (nearest(name[1], COLUMNS.names()) if name else "")
            raise UsageError(
                f"--where {where!r:.80}: {why}; it takes a condition on columns, such as"
                " \"mask == 'causal' and pass == 'forward'\""
            ) from err
        frame = frame[holds.fillna(value=False).astype(bool)]
    return frame[[COLUMNS.get(name).name for name in columns]] if columns else frame


_WORDS = {"impl": "implementation", "seq_len": "length", "kv_len": "keys", "head_dim": "head size",
          "memory_workspace_bytes": "workspace_bytes"}  # fmt: skip


def for_people(
    frame: pd.DataFrame, columns: Iterable[str] | None, *, raw: bool = False
) -> pd.DataFrame:
    """The named columns as texts under readable headers; rows of a case share their index.

    A column of times has the unit of its median, bytes are MiB; if `raw` both as they are. Without
    names the axes that vary, time, ratio to the baseline, both with their interval, and workspace.
    Times and ratios are rounded to the first digit of half their interval (to the second one where
    the first is 1 or 2), other numbers to three digits; counts are whole.
    """
    axes, failed = varying(frame), bool((frame["status"] != "ok").any())
    names = columns or (*(n for n in axes if n != "kv_len"), *_SHORT, *["status"] * failed)
    baseline = next(iter(frame["baseline"].dropna()), "the baseline")
    texts, rows = {}, frame.to_dict("records")
    for name in names:
        column = COLUMNS.get(name)
        scale, unit = 1.0, column.unit
        if not raw and unit == "µs" and frame[name].notna().any():
            scale, unit = units.unit(float(frame[name].median()), units.TIMES)
        elif not raw and unit == "B":
            scale, unit = 2.0**20, "MiB"
        said = name if raw else _WORDS.get(name, name)
        words = said.replace("speedup", f"speed vs {baseline}").split("_")
        unit = f" ({unit})" if unit else ""
        header = " ".join(w for w in words if w not in ("us", "bytes") or not unit) + unit
        both = not columns and name in _WITH_INTERVAL
        header += " [95 %]" * both
        kind = column.kind if scale == 1 else "float"
        texts[header] = [_rounded(row, name, kind, both, scale) for row in rows]
    return pd.DataFrame(texts, index=None if raw else frame["case_id"])


def _rounded(
    row: dict[Hashable, Any], name: str, kind: ColumnKind, both: bool, scale: float
) -> str:
    value = row[name]
    if units.is_unknown(value) or kind != "float":
        return units.UNKNOWN if units.is_unknown(value) else str(value)
    of = next((each for each in _WITH_INTERVAL if name.startswith(each)), "")
    low, high = (row[f"{of}_{end}"] if of else math.nan for end in ("low", "high"))
    value, low, high = (x / scale for x in (value, low, high))
    if not high > low:
        return units.digits(value)
    places = -math.floor(math.log10((high - low) / 6))
    value, low, high = (f"{round(x, places):.{max(places, 0)}f}" for x in (value, low, high))
    return f"{value} [{low}–{high}]" if both else str(value)


def to_markdown(texts: pd.DataFrame, stream: TextIO) -> None:
    """Write a GitHub table."""
    rows = texts.to_numpy().tolist()
    stream.write(units.table([*map(str, texts)], rows, _are_numbers(texts)) + "\n")


def to_latex(texts: pd.DataFrame, stream: TextIO) -> None:
    """Write a tabular that needs the package booktabs; what LaTeX would read is escaped.

    Where the index changes there is a rule.
    """
    style = texts.style.hide(axis="index").format(escape="latex")
    style = style.format_index(escape="latex", axis="columns")
    layout = "".join("r" if each else "l" for each in _are_numbers(texts))
    lines = style.to_latex(hrules=True, column_format=layout).splitlines(keepends=True)
    for i in range(len(texts) - 1, 0, -1):  # four lines come before the first row
        if texts.index.has_duplicates and texts.index[i] != texts.index[i - 1]:
            lines.insert(i + 4, "\\midrule\n")
    stream.write("".join(lines))


def _are_numbers(texts: pd.DataFrame) -> list[bool]:
    return [bool(texts[name].str.fullmatch(r"[\d.– \[\]]+").all()) for name in texts]
