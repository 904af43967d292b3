"""`gate.json`: all raw data of a gate run in one file, one round a line; and reading it back.

While a run goes on, its rounds are in `rounds.jsonl` as they come: what ends it loses none of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from attnbench.base.files import write_whole
from attnbench.base.jsontext import decode, encode
from attnbench.base.registry import nearest
from attnbench.errors import StoreError, UsageError
from attnbench.gate.decide.data import CellNumber, Failure, GateRun, Outcome, Round
from attnbench.schema.case import Case
from attnbench.schema.record import STATUSES, Cell, Status
from attnbench.version import __version__

NAME, ROUNDS = "gate.json", "rounds.jsonl"
KIND, SCHEMA = "attnbench gate", 1


class _Head(Struct):
    """What tells a file of ours."""

    kind: Any = None
    schema: Any = None
    created: Any = None


class _StoredFailure(Failure, frozen=True, kw_only=True):
    code: Status | UnsetType = UNSET  # type: ignore[assignment]

    def failure(self) -> Failure:
        """With its code, which the first versions wrote at the beginning of the reason."""
        code, reason = self.code, self.reason
        if code is UNSET:
            start, _, rest = reason.partition(": ")
            known = next((status for status in STATUSES if status == start), None)
            code, reason = (known, rest) if known else ("error", reason)
        return Failure(variant=self.variant, code=code, reason=reason)


class _StoredRound(Round, frozen=True, kw_only=True):
    failures: Mapping[CellNumber, _StoredFailure]


class _StoredCell(Struct):
    case: dict[str, Any]
    impl: str


@dataclass(frozen=True, kw_only=True)
class _StoredRun(GateRun):
    """The raw data of a run; but for its rounds they are the first line of `rounds.jsonl`."""

    cells: tuple[_StoredCell, ...]  # type: ignore[assignment]
    rounds: tuple[_StoredRound, ...]


def raw(run: GateRun) -> dict[str, Any]:
    """All of a run but what was decided from it, as it is written; `run_of` is its inverse."""
    head = (
        "created", "rules", "base", "candidate", "options", "spent", "over_budget", "environment",
    )  # fmt: skip
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "attnbench": __version__,
        **{name: getattr(run, name) for name in head},
        "cells": [cell.to_json() for cell in run.cells],
        "checks": run.checks,
        "rounds": list(run.rounds),
    }


def run_of(text: bytes, kept_rounds: list[bytes] | None = None) -> GateRun:
    """A gate run from the JSON of its file; with rounds that are kept elsewhere, a line each.

    Raises:
        ValueError, UsageError: something is missing, of a wrong type or out of bounds; and where.
    """
    stored = decode(text, _StoredRun)
    if not isinstance(stored.options.get("seed", 0), int):
        raise ValueError("Expected `int` - at `$.options.seed`")
    count = len(stored.cells)
    for number in range(count):
        if len(stored.checks.get(number, ())) < 2:
            raise ValueError(f"cell {number} lacks a version - at `$.checks`")
    rounds: Iterable[_StoredRound] = stored.rounds
    if kept_rounds is not None:
        rounds = [decode(line, _StoredRound) for line in kept_rounds]
    cells = tuple(_cell(cell, number) for number, cell in enumerate(stored.cells))
    whole = tuple(_round(found, number, count) for number, found in enumerate(rounds))
    return GateRun(**(vars(stored) | {"cells": cells, "rounds": whole}))


def _cell(stored: _StoredCell, number: int) -> Cell:
    try:
        return Cell(case=Case.from_json(stored.case), impl=stored.impl)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as err:
        raise ValueError(f"{type(err).__name__}: {err} - at `$.cells[{number}]`") from err


def _round(stored: _StoredRound, number: int, cells: int) -> Round:
    slowed = [cell for cell, of in stored.samples.items() if "planted" in of]
    if strange := [cell for cell in (*stored.samples, *stored.failures) if cell >= cells]:
        raise ValueError(f"there is no cell {strange[0]} - at `$.rounds[{number}]`")
    if len(slowed) > 1 or any("base" not in stored.samples[cell] for cell in slowed):
        what = "one cell is slowed at most, beside its base"
        raise ValueError(f"{what} - at `$.rounds[{number}].turns`")
    failures = {cell: failure.failure() for cell, failure in stored.failures.items()}
    return Round(**(structs.asdict(stored) | {"failures": failures}))


def write_gate(path: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write a run with what was decided from it, in one step; return the file.

    `path` is the folder, which is made, or the file (`….json`). The verdicts are there for whoever
    reads the file; a replay decides again. What is not finite is written as unknown.

    Raises:
        StoreError: it cannot be written; no half file is left.
    """
    file = path if path.suffix == ".json" and not os.path.isdir(path) else path / NAME
    rows = [vars(row) | {"cell": number} for number, row in enumerate(outcome.rows)]
    decided = {
        "exit_code": int(outcome.exit_code),
        "words": outcome.words,
        "controls": outcome.controls,
        "rows": rows,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise StoreError(f"cannot write {file} ({err.strerror}); choose another folder") from err
    write_whole(file, _lines(raw(run) | {"decided": decided}) + "\n")
    return file


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


def keep_round(folder: Path, run: GateRun, found: Round) -> None:
    """Append a round to the folder's `rounds.jsonl`, whose first line is the run as it began.

    Raises:
        StoreError: it cannot be written.
    """
    file = folder / ROUNDS
    try:
        with file.open("ab") as out:
            if not out.tell():
                out.write(encode(raw(run)) + b"\n")
            out.write(encode(found) + b"\n")
            out.flush()
            os.fsync(out.fileno())
    except OSError as err:
        raise StoreError(f"cannot write {file} ({err.strerror})") from err


def drop_kept_rounds(folder: Path) -> None:
    """Remove `rounds.jsonl`, once all of it is in `gate.json`."""
    with contextlib.suppress(OSError):
        (folder / ROUNDS).unlink()


def load_gate(path: Path, output: Path = Path("results")) -> GateRun:
    """Read a run: its file, its folder, its name in `output`, or `latest`.

    Of a run that did not come to its end, the rounds that it kept.

    Raises:
        StoreError: there is no such run, or the file is damaged or not ours.
    """
    file = find_gate(str(path), output)
    text, rounds = _read(file)
    head = _head(text, file)
    if head.kind != KIND:
        raise StoreError(f"{file} was not written by attnbench gate")
    if type(head.schema) is not int or head.schema != SCHEMA:
        raise StoreError(f"{file} has schema {head.schema!r:.20}; this version reads {SCHEMA}")
    try:
        return run_of(text, rounds)
    except (ValueError, UsageError) as err:
        raise StoreError(f"{file} is damaged: {' '.join(str(err).split()):.300}") from err


def _read(file: Path) -> tuple[bytes, list[bytes] | None]:
    """The run, and the rounds that stand in lines of their own."""
    try:
        data = file.read_bytes()
    except OSError as err:
        raise StoreError(f"{file} cannot be read ({err.strerror})") from err
    if file.suffix != ".jsonl":
        return data, None
    head, *rounds = data.split(b"\n")[:-1] or [b""]  # the last line may be cut off
    return head, rounds


def _head(text: bytes, file: Path) -> _Head:
    try:
        return decode(text, _Head)
    except msgspec.ValidationError:  # it is not an object
        return _Head()
    except ValueError as err:
        raise StoreError(f"{file} is damaged, or was cut off: it is not JSON ({err})") from err


def find_gate(text: str, output: Path) -> Path:
    """The `gate.json` of a run named by file, folder, name in `output`, or `latest`.

    Raises:
        StoreError: there is no such run; the message names the nearest, or how to make one.
    """
    known = sorted(output.glob(f"*/{NAME}"))
    if text == "latest":
        if not known:
            raise StoreError(f"no gate run in {output} yet; make one with: attnbench gate")
        return max(known, key=_created)
    candidates = (Path(text), output / text)
    for path in candidates:
        for file in (path, path / NAME, path / ROUNDS):
            if os.path.isfile(file):  # unlike Path.is_file, False where a name is too long
                return file
    for path in candidates:
        if os.path.isdir(path):
            raise StoreError(f"{path} is not a gate run: it has no {NAME}")
    names = [file.parent.name for file in known]
    listed = ", ".join(names[-8:]) or "none; make one with: attnbench gate"
    raise StoreError(f"no gate run '{text}'{nearest(text, names)}; gate runs in {output}: {listed}")


def _created(file: Path) -> str:
    try:
        return str(_head(_read(file)[0], file).created)
    except StoreError:
        return ""


def folder_of_gate(text: str, output: Path) -> Path | None:
    """The folder named, itself or in `output`, if a gate run lies there and no sweep's."""
    if Path(text).name == NAME and os.path.isfile(text):
        return Path(text).parent
    found = next((path for path in (Path(text), output / text) if os.path.isdir(path)), None)
    if found is None or os.path.exists(found / "run.json") or not os.path.exists(found / NAME):
        return None
    return found
