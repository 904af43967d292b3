"""`gate.json`: all raw data of a gate run in one file, one round a line; and reading it back.

While a run goes on, its rounds are in `rounds.jsonl` as they come: what ends it loses none of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnbench.base.files import write_whole
from attnbench.base.jsontext import read_json
from attnbench.base.registry import nearest
from attnbench.errors import StoreError
from attnbench.gate.decide.outcome import SCHEMA, GateRun, Outcome, Row, Side
from attnbench.gate.decide.reading import DamagedError, run_of
from attnbench.gate.decide.round import Round
from attnbench.version import __version__

NAME, ROUNDS = "gate.json", "rounds.jsonl"
KIND = "attnbench gate"


def write_gate(path: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write a run with what was decided from it, in one step; return the file.

    `path` is the folder, which is made, or the file (`….json`). The verdicts are there for whoever
    reads the file; a replay decides again. What is not finite is written as unknown.

    Raises:
        StoreError: it cannot be written; no half file is left.
    """
    file = path if path.suffix == ".json" and not os.path.isdir(path) else path / NAME
    text = _text(_head(run), _lists(run, outcome))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise StoreError(f"cannot write {file} ({err.strerror}); choose another folder") from err
    write_whole(file, text)
    return file


def keep_round(folder: Path, run: GateRun, found: Round) -> None:
    """Append a round to the folder's `rounds.jsonl`, whose first line is the run as it began.

    Raises:
        StoreError: it cannot be written.
    """
    file = folder / ROUNDS
    try:
        with file.open("a", encoding="utf-8") as out:
            rows = [found.to_json()] if out.tell() else [raw(run), found.to_json()]
            out.writelines(_dump(row) + "\n" for row in rows)
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
    row = _read(file)
    try:
        return run_of(row)
    except DamagedError as err:
        raise StoreError(f"{file} is damaged: {err}") from err


def find_gate(text: str, output: Path) -> Path:
    """The `gate.json` of a run named by file, folder, name in `output`, or `latest`.

    Raises:
        StoreError: there is no such run; the message names the nearest, or how to make one.
    """
    known = _known(output)
    if text == "latest":
        if not known:
            raise StoreError(f"no gate run in {output} yet; make one with: attnbench gate")
        return max(known, key=_created)
    candidates = (Path(text), output / text)
    for path in candidates:
        if os.path.isfile(path):  # unlike Path.is_file, False where a name is too long
            return path
        for name in (NAME, ROUNDS):
            if os.path.isfile(path / name):
                return path / name
    for path in candidates:
        if os.path.isdir(path):
            raise StoreError(f"{path} is no gate run: it has no {NAME}")
    names = [file.parent.name for file in known]
    listed = ", ".join(names[-8:]) or "none; make one with: attnbench gate"
    raise StoreError(f"no gate run '{text}'{nearest(text, names)}; gate runs in {output}: {listed}")


def folder_of_gate(text: str, output: Path) -> Path | None:
    """The folder named, itself or in `output`, if a gate run lies there and no sweep's."""
    if Path(text).name == NAME and os.path.isfile(text):
        return Path(text).parent
    found = next((path for path in (Path(text), output / text) if os.path.isdir(path)), None)
    if found is None or os.path.exists(found / "run.json") or not os.path.exists(found / NAME):
        return None
    return found


def _known(output: Path) -> list[Path]:
    return sorted(output.glob(f"*/{NAME}"))


def _created(file: Path) -> str:
    try:
        return str(_read(file).get("created", ""))
    except StoreError:
        return ""


def _read(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        if file.suffix == ".jsonl":
            head, *rounds = map(_parsed, data.split(b"\n")[:-1])  # the last may be cut off
            row = head | {"rounds": rounds}
        else:
            row = _parsed(data)
    except OSError as err:
        raise StoreError(f"{file} cannot be read ({err.strerror})") from err
    except (ValueError, TypeError) as err:
        said = f"{type(err).__name__}: {err}"
        raise StoreError(f"{file} is damaged, or was cut off: no JSON ({said})") from err
    if not isinstance(row, dict) or row.get("kind") != KIND:
        raise StoreError(f"{file} was not written by attnbench gate")
    if type(row.get("schema")) is not int or row["schema"] != SCHEMA:
        raise StoreError(
            f"{file} has schema {row.get('schema')!r:.20}; this version reads {SCHEMA}"
        )
    return row


def _parsed(data: bytes) -> Any:
    return read_json(data, parse_constant=_no_number)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _head(run: GateRun) -> dict[str, Any]:
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "attnbench": __version__,
        "created": run.created,
        "rules": run.rules.to_json(),
        "base": _side(run.base),
        "candidate": _side(run.candidate),
        "options": dict(run.options),
        "spent": dict(run.spent),
        "over_budget": run.over_budget,
        "environment": dict(run.environment),
    }


def _side(side: Side) -> dict[str, Any]:
    return asdict(side) | {"files": list(side.files)}


def raw(run: GateRun) -> dict[str, Any]:
    """All of a run but what was decided from it, as JSON; `run_of` is its inverse."""
    return _head(run) | _data(run)


def _data(run: GateRun) -> dict[str, Any]:
    return {
        "cells": [cell.to_json() for cell in run.cells],
        "checks": {
            str(cell): {side: asdict(found) for side, found in both.items()}
            for cell, both in run.checks.items()
        },
        "rounds": [found.to_json() for found in run.rounds],
    }


def _lists(run: GateRun, outcome: Outcome) -> dict[str, Any]:
    """What is written one entry a line: the raw data, then what was decided from them."""
    decided = {
        "exit_code": int(outcome.exit_code),
        "words": outcome.words,
        "controls": asdict(outcome.controls),
        "rows": [_row(number, row) for number, row in enumerate(outcome.rows)],
    }
    return _data(run) | {"decided": decided}


def _row(number: int, row: Row) -> dict[str, Any]:
    return {"cell": number} | {k: v for k, v in vars(row).items() if k != "cell"}


def _text(head: Mapping[str, Any], lists: Mapping[str, Any]) -> str:
    parts = [f"{json.dumps(name)}: {_dump(value)}" for name, value in head.items()]
    parts += [f"{json.dumps(name)}: {_listed(value)}" for name, value in lists.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _listed(value: list[Any] | dict[str, Any]) -> str:
    if isinstance(value, list):
        return _block("[]", (_dump(item) for item in value))
    named = (
        f"{json.dumps(name)}: {_listed(item) if name == 'rows' else _dump(item)}"
        for name, item in value.items()
    )
    return _block("{}", named)


def _block(ends: str, lines: Iterable[str]) -> str:
    return f"{ends[0]}\n" + ",\n".join(lines) + f"\n{ends[1]}"


def _dump(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False, default=_other)


def _plain(value: Any) -> Any:
    """What JSON can hold: no number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _other(value: Any) -> Any:
    """Numbers of numpy as numbers; paths and other things as text."""
    return _plain(value.item()) if hasattr(value, "item") else str(value)
