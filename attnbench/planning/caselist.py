"""Case lists: cases that are written one by one, each with how often it is called."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from attnbench.base import files, jsontext
from attnbench.base.registry import require
from attnbench.errors import UsageError
from attnbench.planning.plan import Axes, expand
from attnbench.schema.axes import AXES, Axis

# As labels and columns have them: B, mask; L is n.
_KEYS = {axis.symbol or name: axis for name, axis in AXES.items()} | AXES
_KEYS |= {
    "L": AXES["seq_len"],
    "workload": Axis(field="workload", flag="--workload"),
    "count": Axis(field="count", flag="--count", kind="sizes"),
}


def listed(texts: Iterable[str], file: Path | None, workload: str) -> list[Axes]:
    """Read cases such as `B=2,L=1,S=1000,mask=causal,count=32`, and those of a file.

    It is CSV with the keys in its first line, or a list of objects in JSON.

    Raises:
        UnknownNameError: a key that cases have not.
        UsageError: a key twice, a value that it does not take, a count of 0, or no such file.
    """
    found = []
    for text in texts:
        pairs = [part.partition("=")[::2] for part in text.split(",")]
        if not all(value for _, value in pairs):
            raise UsageError(f"--case {text:.200}: write it as KEY=VALUE,KEY=VALUE")
        found.append(_one(f"--case {text:.200}", pairs, workload))
    for number, row in enumerate(_rows(file) if file else [], start=1):
        found.append(_one(f"{file} (--cases), case {number}", row, workload))
    return found


def _rows(file: Path) -> list[Any]:
    """The pairs of each case, a key as often as it is there."""
    try:
        text = files.read(file).decode("utf-8-sig")
        if file.suffix == ".json":
            jsontext.decode(text, list[dict[str, Any]])
            rows: list[Any] = json.loads(text, object_pairs_hook=list)
        else:
            head, *lines = [*csv.reader(io.StringIO(text), strict=True)] or [[]]
            rows = [[*zip_longest(head, row)] for row in lines if row]
    except OSError as err:
        raise UsageError(f"cannot read {file} (--cases): {err.strerror or err}") from err
    except (ValueError, csv.Error) as err:
        raise UsageError(f"{file} (--cases) is not a table or a list of objects: {err}") from err
    if not rows:
        raise UsageError(f"{file} (--cases) holds no cases")
    return rows


def _one(where: str, pairs: Iterable[tuple[Any, Any]], workload: str) -> Axes:
    """The sweep of one case; an empty value of a table or a null is as if not given."""
    given: dict[str, Any] = {}
    for key, value in pairs:
        if value not in ("", None):
            require("key", ["more than keys" if key is None else str(key).strip()], _KEYS, where)
            axis = _KEYS[str(key).strip()]
            values = axis.read(str(value), f"{where}: {key}")
            if len(values) > 1 or axis.keyword in given:
                raise UsageError(f"{where}: {key} is given twice, or has several values")
            given[axis.keyword] = values[0]
    axes = Axes(**{"workload": workload, "step": "call", **given})
    try:
        next(expand(axes, "cpu"))
    except UsageError as err:
        raise UsageError(f"{where}: {err}") from err
    return axes
