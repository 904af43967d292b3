"""Case lists: cases that are written one by one, each with how often it is called."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from attnbench.base import files, jsontext
from attnbench.base.parameters import Parameter
from attnbench.base.registry import require
from attnbench.errors import UsageError
from attnbench.planning.plan import Axes, expand
from attnbench.schema.axes import AXES, KEYWORDS, Axis
from attnbench.schema.case import CAPTURE_VERSION

# As labels and columns have them: B, mask; L is n.
_KEYS = {axis.symbol or name: axis for name, axis in AXES.items()} | AXES
_KEYS |= {
    "L": AXES["seq_len"],
    "workload": Axis(field="workload", flag="--workload"),
    "count": Axis(field="count", flag="--count", kind="sizes"),
    "lengths": Axis(field="lengths", flag="--lengths"),
}
_LENGTHS = Parameter(many=True)
_BY_LENGTHS = {"batch_sizes", "seq_lens", "kv_lens", "masks"}


def listed(texts: Iterable[str], file: Path | None, axes: Mapping[str, Any]) -> list[Axes]:
    """Read cases such as `B=2,L=1,S=1000,mask=causal,count=32`, and those of a file.

    It is CSV with the keys in its first line, a list of objects in JSON, or what `attnbench
    capture` wrote. `lengths=512+64` makes two of one case: padded to the longest, and packed. The
    list is then called in either way.

    Raises:
        UnknownNameError: a key that cases have not.
        UsageError: a key twice, a value that it does not take, a count of 0, no such file, or both
            lengths and one of `axes`, which hold in place of what cases say, that they decide.
    """
    found, workload = [], axes.get("workload") or "attention"
    for text in texts:
        pairs = [part.partition("=")[::2] for part in text.split(",")]
        if not all(value for _, value in pairs):
            like = "KEY=VALUE,KEY=VALUE, such as B=2,n=512,mask=causal"
            raise UsageError(f"--case {text[:200] or repr('')}: write it as {like}")
        found.append(_one(f"--case {text:.200}", pairs, workload))
    for number, row in enumerate(_rows(file) if file else [], start=1):
        found.append(_one(f"{file} (--cases), case {number}", row, workload))
    if all(len(ways) == 1 for ways in found):
        return [axes for (axes,) in found]
    for name in (name for name in _BY_LENGTHS if axes.get(name)):
        raise UsageError(f"{KEYWORDS[name].flag} does not go with a case that has lengths")
    return [
        ways[at].having(step=f"call {how}") for at, how in ((0, "padded"), (-1, "packed"))
        for ways in found
    ]  # fmt: skip


def is_captured(file: Path) -> bool:
    """Whether it is what `attnbench capture` wrote."""
    with contextlib.suppress(OSError, ValueError):
        return "capture" in jsontext.decode(files.read(file), dict[str, Any])
    return False


def _rows(file: Path) -> list[Any]:
    """The pairs of each case, a key as often as it is there."""
    if file.suffix == ".py":
        hint = f"attnbench capture -- python {file} makes one of a program"
        raise UsageError(f"{file} (--cases) is not a case list in CSV or JSON; {hint}")
    try:
        text = files.read(file).decode("utf-8-sig")
        if file.suffix == ".json" and text.lstrip().startswith("{"):
            captured = json.loads(text)
            if (version := captured.get("capture")) != CAPTURE_VERSION:
                of = "an object, not a list of cases"
                if version is not None:
                    of = f"a capture of version {version}, not {CAPTURE_VERSION}; capture again"
                raise UsageError(f"{file} (--cases) is {of}")
            rows: list[Any] = [
                [pair for pair in case.items() if pair[0] != "call"] for case in captured["cases"]
            ]
        elif file.suffix == ".json":
            jsontext.decode(text, list[dict[str, Any]])
            rows = json.loads(text, object_pairs_hook=list)
        else:
            head, *lines = [*csv.reader(io.StringIO(text), strict=True)] or [[]]
            if ";" in "".join(head):
                raise ValueError("its separator must be a comma, not a semicolon")
            rows = [[*zip_longest(head, row)] for row in lines if row]
    except OSError as err:
        raise UsageError(f"cannot read {file} (--cases): {err.strerror or err}") from err
    except (ValueError, KeyError, AttributeError, TypeError, csv.Error) as err:
        raise UsageError(f"{file} (--cases) is not a table or a list of objects: {err}") from err
    if not rows:
        raise UsageError(f"{file} (--cases) holds no cases")
    return rows


def _one(where: str, pairs: Iterable[tuple[Any, Any]], workload: str) -> list[Axes]:
    """The sweeps of one case; an empty value of a table or a null is as if not given."""
    given: dict[str, Any] = {}
    for key, value in pairs:
        if value not in ("", None):
            require("key", ["more than keys" if key is None else str(key).strip()], _KEYS, where)
            axis = _KEYS[str(key).strip()]
            values = axis.read(str(value), f"{where}: {key}")
            if len(values) > 1 or axis.keyword in given:
                raise UsageError(f"{where}: {key} is given twice, or has several values")
            given[axis.keyword] = values[0]
    ways = [{"workload": workload, "step": "call", **given}]
    for axis in (KEYWORDS[name] for name in given if name in KEYWORDS):
        if not axis.applies(str(ways[0]["workload"])):
            of = f"workload {ways[0]['workload']}; it does to {', '.join(axis.of or ())}"
            raise UsageError(f"{where}: {axis.symbol or axis.field} does not apply to {of}")
    try:
        ways = _ragged(**ways[0]) if "lengths" in given else ways
        sweeps = [Axes(**way) for way in ways]
        for axes in sweeps:
            next(expand(axes, "cpu"))
    except UsageError as err:
        raise UsageError(f"{where}: {err}") from err
    return sweeps


def _ragged(lengths: str, masks: str = "full", **given: Any) -> list[dict[str, Any]]:
    """A batch of items of these lengths: padded, and packed."""
    sizes, clash = _LENGTHS.read(lengths), given.keys() & _BY_LENGTHS
    if isinstance(sizes, tuple) and given.get("batch_sizes", len(sizes)) != len(sizes):
        raise UsageError(f"B={given['batch_sizes']} is not the number of lengths, {len(sizes)}")
    wrong = [f"{KEYWORDS[name].symbol or 'mask'} is given" for name in sorted(clash)]
    wrong += [f"mask is {masks}"] * (masks not in ("full", "causal"))
    wrong += [f"workload is {given['workload']}"] * (given["workload"] != "attention")
    if not isinstance(sizes, tuple) or wrong:
        more = "in place of B, L, n, S, in workload attention with mask full or causal"
        raise UsageError(f"lengths takes {_LENGTHS}, {more}: {', '.join(wrong) or lengths}")
    text = f"{'+'.join(map(str, sizes))}:causal={masks == 'causal':d}"
    padded = {"batch_sizes": len(sizes), "seq_lens": max(sizes), "masks": f"padding:{text}"}
    return [given | padded, given | {"seq_lens": sum(sizes), "masks": f"document:{text}"}]
