"""What can be measured: implementations by family, and the parts of a case by kind."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from attnbench.base.units import counted
from attnbench.errors import ExitCode
from attnbench.report.document import Document, Finding, Section, Table, Text, Value
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue
from attnbench.theory.traits import size_words

COLUMNS = {"name": "name", "time": "time", "doc": "what it is", "family": "", "unavailable": ""}
Calls = Sequence[tuple[str, int, Case]]  # step, how many layers, case
# A row of a model; its axes that are not here are the same in all, or in JSON alone.
_CALL = {"step": "step", "count": "layers", "seq_len": "L", "kv_len": "S"}
_CALL |= {name: name for name in ("mask", "position", "scale", "softcap", "sinks")}
# A row of a captured file, whose cases have sizes of their own.
_CASE = {"count": "calls", "batch": "B", "heads": "H", "kv_heads": "G", "seq_len": "L"}
_CASE |= {"kv_len": "S", "head_dim": "D", "dtype": "dtype", "pass": "pass", "mask": "mask"}
KINDS = ("workloads", "projections", "caches", "masks", "positions")


def document(
    catalogue: Catalogue, answers: Sequence[tuple[str, Any, Sequence[str]]] = (),
    files: Sequence[str] = (), models: Mapping[str, str] = {},
) -> Document:  # fmt: skip
    """The catalogue, a section a family and a kind; `answers` say how names are measured."""
    every: list[dict[str, Any]] = [to_builtins(row) for row in catalogue.implementations]
    more = [name for name in (every[0] if every else {}) if name not in COLUMNS]
    unable = [row for row in every if row["unavailable"]]
    sections = [
        Section(f"{family}: {doc}", [Table(
            columns=COLUMNS | dict.fromkeys(more, ""), most=999,
            rows=[[_plain(row[name]) for name in (*COLUMNS, *more)]
                  for row in every if row["family"] == family],
        )])
        for family, doc in catalogue.families.items()
    ]  # fmt: skip
    lacking = [f"{row['name']}: {row['unavailable']}" for row in unable]
    sections += [Section("Cannot run here", [Text(lacking)])] if lacking else []
    sections += [
        Section(kind, [Table(columns={"name": "name", "doc": "what it is"}, most=999,
                             rows=list(rows.items()))])
        for kind in (*KINDS, "models") if (rows := getattr(catalogue, kind, models))
    ]  # fmt: skip
    beside = "".join(f" --impl {shlex.quote(file)}" for file in files)
    kinds = {kind: rows for kind in KINDS if (rows := getattr(catalogue, kind))}
    parts = ", ".join(counted(len(rows), kind[:-1]) for kind, rows in kinds.items())
    return Document(
        kind="list", exit_code=ExitCode.OK,
        conclusion=Finding(
            sign="none", verdict="", subject="the catalogue",
            reason=f"{counted(len(every), 'implementation')} on {catalogue.device}"
            if every else parts,
        ),
        about=[text for text, *_ in answers], sections=sections,
        commands=[("measure", command + beside) for *_, own in answers for command in own],
    )  # fmt: skip


def models_document(models: Mapping[str, tuple[Calls, str]], captured: Collection[str]) -> Document:
    """The calls of each model, a row for each step and kind of layer, and what no case has.

    Of files that are `captured`: a row for each case.
    """
    sections = []
    for model, (calls, left_out) in models.items():
        shown = _CASE if model in captured else _CALL
        columns = shown | {name: "" for name in ("step", *AXES) if name not in shown}
        rows = list[list[Value]]()
        for step, count, case in calls:
            row = case.to_json() | {"step": step, "count": count, "scale": case.softmax_scale}
            rows.append([Value(row[n], "number" if n == "scale" else "text") for n in columns])
        sizes = [*size_words(calls[0][-1], ("seq_len", "kv_len")), calls[0][-1].dtype]
        table = Table(columns=columns, rows=rows, cut="position", grouped=model not in captured)
        beside = [Text([f"no case has: {left_out}"])] if left_out else []
        title = model if model in captured else f"{model}: {' '.join(sizes)}"
        sections.append(Section(title, [table, *beside]))
    kinds = {"model": len(models) - len(captured), "capture": len(captured)}
    reason = ", ".join(counted(number, kind) for kind, number in kinds.items() if number)
    said = Finding(sign="none", verdict="", subject="calls", reason=reason)
    commands = [
        (
            "measure",
            f"attnbench sweep --cases {shlex.quote(name)}"
            if name in captured
            else f"attnbench sweep --model {shlex.quote(name)}",
        )
        for name in models
    ]
    return Document(
        kind="list", exit_code=ExitCode.OK, conclusion=said, sections=sections, commands=commands
    )


def _plain(value: Any) -> Value:
    """Lists and parameters as texts."""
    if isinstance(value, dict):
        return Value(", ".join(f"{k}={v['default']}" for k, v in value.items()) or None)
    return Value(", ".join(map(str, value)) or None if isinstance(value, list | tuple) else value)
