"""`gate.json`: all raw data of a gate run in one file, one round a line; and reading it back.

While a run goes on, its rounds are in `rounds.jsonl` as they come: what ends it loses none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from attnbench.base.files import read, reading
from attnbench.base.jsontext import decode, encode, sealed, unsealed
from attnbench.gate.decide.data import Benchmark, GateRun, Round
from attnbench.gate.decide.outcome import Outcome
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from attnbench.store.folder import GATE, RunFolder
from attnbench.version import __version__

NAME = GATE.file
KIND, SCHEMA = "attnbench gate", 3


class _StoredCell(Struct):
    impl: str
    case: dict[str, Any] | None = None  # of a test


@dataclass(frozen=True, kw_only=True)
class _StoredRun(GateRun):
    """The raw data of a run; but for its rounds they are the first line of `rounds.jsonl`."""

    kind: Literal["attnbench gate"]
    schema: Literal[3]
    cells: tuple[_StoredCell, ...]  # type: ignore[assignment]


def raw(run: GateRun) -> dict[str, Any]:
    """All of a run but what was decided from it, as it is written; `run_of` is its inverse."""
    head = {"kind": KIND, "schema": SCHEMA, "attnbench": __version__}
    cells, rounds = [cell.to_json() for cell in run.cells], list(run.rounds)
    return head | vars(run) | {"cells": cells, "rounds": rounds}


def run_of(text: bytes, kept_rounds: Sequence[bytes] = ()) -> GateRun:
    """A gate run from the JSON of its file; with rounds that are kept elsewhere, a line each.

    Raises:
        ValueError, UsageError: something is missing, of a wrong type or out of bounds; and where.
    """
    stored = decode(text, _StoredRun)
    values = {item.name: getattr(stored, item.name) for item in fields(GateRun)}
    values["cells"] = tuple(
        Benchmark(impl=cell.impl)
        if cell.case is None
        else Cell(case=Case.from_json(cell.case), impl=cell.impl)
        for cell in stored.cells
    )
    values["rounds"] = tuple(decode(line, Round) for line in kept_rounds) or stored.rounds
    for number in range(len(values["cells"])):
        if not stored.checks.get(number, {}).keys() >= {"base", "candidate"}:
            raise ValueError(f"cell {number} has no check of both versions")
    return GateRun(**values)


def write_gate(folder: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write a run with what was decided from it into a folder, which is made; return the file.

    The verdicts are there for whoever reads the file; a replay decides again. What is not finite is
    written as unknown.

    Raises:
        StoreError: it cannot be written; no half file is left.
    """
    rows = [vars(row) | {"cell": number} for number, row in enumerate(outcome.rows)]
    decided = vars(outcome) | {"exit_code": int(outcome.exit_code), "rows": rows}
    stored = RunFolder(GATE, folder)
    with contextlib.suppress(OSError):  # writing says why
        folder.mkdir(parents=True, exist_ok=True)
    stored.write(_lines(raw(run) | {"decided": decided}))
    with contextlib.suppress(OSError):  # all of it is in the file now
        stored.journal.unlink()
    return stored.file


def _lines(value: Any) -> str:
    """JSON with an entry of these parts a line."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(encode(item).decode() for item in value) + "\n]"
    whole = ("cells", "checks", "rounds", "decided", "rows")
    parts = (
        f'"{name}": {_lines(part) if name in whole else encode(part).decode()}'
        for name, part in value.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}"


def keep_round(folder: RunFolder, run: GateRun, found: Round) -> None:
    """Append a round to the folder's journal, whose first line is the run as it began.

    Raises:
        StoreError: it cannot be written.
    """
    lines = (found,) if folder.begun else (raw(run), found)
    folder.append(*(sealed(encode(line).decode()) for line in lines))


def load_gate(path: Path, output: Path = Path("results")) -> GateRun:
    """Read a run: its file, its folder, its name in `output`, or one of `RECENT`.

    Of a run that did not come to its end, the rounds that it kept.

    Raises:
        StoreError: there is no such run, or the file is damaged or not ours.
    """
    file = RunFolder.find(str(path), output, GATE).file
    with reading(file, f", or not by attnbench gate of schema {SCHEMA}"):
        data = read(file)
        # Of rounds that are kept a line each, the last may be cut off.
        lines = data.split(b"\n")[:-1] if file.suffix == ".jsonl" else [data]
        head, *rounds = lines or [b""]
        return run_of(unsealed(head), [unsealed(line) for line in rounds])
