"""Runs: made with a plan, a record appended when it exists, and loaded, also after a kill."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from attnbench.base import files
from attnbench.base.jsontext import checksum, decode, dumps, unsealed
from attnbench.errors import StoreError
from attnbench.schema.record import SCHEMA, Cell, Record, merged
from attnbench.store.folder import SWEEP, RunFolder

INFO, PLAN, RECORDS = SWEEP.file, "plan.json", SWEEP.journal


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as loaded: its folder, `run.json`, and one record a cell.

    `parts` are the records as written, one for each process that measured a cell (the latest
    wins); `records` has them merged. `cells` are those of the plan. `torn`: a kill left half a
    line, which was left out.
    """

    path: Path
    info: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    parts: list[Record] = field(default_factory=list)
    torn: bool = False

    @property
    def run_id(self) -> str:
        """The run's name, as recorded when it was made."""
        return str(self.info["run_id"])

    @cached_property
    def environments(self) -> dict[str, dict[str, Any]]:
        """The facts of each machine that measured, by `Record.environment`."""
        others: dict[str, dict[str, Any]] = self.info.get("environments") or {}
        return {"": self.info.get("environment") or {}} | others

    def environment_of(self, record: Record) -> dict[str, Any]:
        """The facts of the machine of a record; of one merged from several, what all share."""
        return self.shared(record.environment.split(" "))

    def shared(self, keys: Iterable[str]) -> dict[str, Any]:
        """The facts that several environments share."""
        known = self.environments
        first, *others = [known.get(key, {}) for key in keys]
        return {name: v for name, v in first.items() if all(o.get(name) == v for o in others)}

    def same_model(self, *records: Record) -> bool:
        """Whether the records were measured on one model of device: else no ratio is taken."""
        return len({self.environment_of(record).get("device_name") for record in records}) == 1

    @property
    def files(self) -> tuple[str, ...]:
        """The user's files that it was measured with: to go on they are imported as they were.

        Raises:
            StoreError: one is gone or was changed since, or the run does not say what was in it.
        """
        known = self.info.get("files", {})
        found = tuple((self.info.get("settings") or {}).get("files") or ())
        for file in found:
            with contextlib.suppress(OSError):
                if known.get(file) == files.digest(Path(file)):
                    continue
            raise StoreError(f"{file} (--impl) has changed; restore it, or start a new run")
        return found

    @property
    def unfinished(self) -> str:
        """What of the plan is missing, and how to go on; empty where all of it is measured."""
        processes: int = (self.info.get("settings") or {}).get("processes", 1)
        counts = Counter(part.cell.key for part in self.parts)
        tried = [r for r in self.records if r.status not in ("unsupported", "skipped")]
        planned = len(self.cells) - len(self.records) + len(tried)
        done = sum(r.status != "ok" or counts[r.cell.key] >= processes for r in tried)
        path = shlex.quote(str(self.path))
        facts = [f"only {done} of {planned} planned cells measured"] * (done < planned)
        facts += [f"the last line of {RECORDS} was cut off and is left out"] * self.torn
        facts += [f"go on with: attnbench sweep --resume {path}"] * bool(facts)
        if "merged" in self.info and (shard := self.info.get("shard")):
            facts.append(f"shards of its plan are missing: {', '.join(missing_shards(shard))}")
            facts.append(f"merge them with it: attnbench merge {path} RUN")
        return "; ".join(facts)


def missing_shards(shard: dict[str, Any]) -> list[str]:
    """The shards that a merged run lacks, as `--shard` takes them."""
    count, have = shard["count"], shard["numbers"]
    return [f"{i}/{count}" for i in range(1, count + 1) if i not in have]


@contextlib.contextmanager
def new_run(output: Path, name: str | None, info: dict[str, Any]) -> Iterator[RunFolder]:
    """Make the folder `output`/`name` (a time stamp unless given) with `run.json`, and lock it.

    The plan, which may be long, has a file of its own, since `run.json` is written again.

    Raises:
        StoreError: the name is taken or not a plain folder name, or nothing can be written.
    """
    plan = _shortened(info.get("plan") or ())
    advised = (info.get("options") or {}).get("command") == "advise"  # which cannot go on
    with RunFolder.create(replace(SWEEP, resume="") if advised else SWEEP, output, name) as folder:
        own = {"schema": SCHEMA, "run_id": folder.path.name}
        files.write_whole(folder.path / PLAN, plan)
        write_info(folder, own | info | {"planned": checksum(plan.encode())})
        yield folder.lock()


def write_info(folder: RunFolder, info: dict[str, Any]) -> None:
    """Write `run.json`, without the plan, which has a file of its own.

    Raises:
        StoreError: the folder cannot be written.
    """
    folder.write(dumps({name: v for name, v in info.items() if name != "plan"}, indent=1))


def _shortened(plan: Iterable[dict[str, Any]]) -> str:
    """A plan as text: each case once, with its implementations."""
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for row in plan:
        key = dumps(row["case"], sort_keys=True)
        cases.setdefault(key, (row["case"], []))[1].append(row["impl"])
    rows = ",\n".join(dumps({"case": case, "impls": impls}) for case, impls in cases.values())
    return f"[{rows}]\n"


def _load_plan(path: Path, info: dict[str, Any]) -> list[Cell]:
    """Inverse of `_shortened`; the rows go into `info`, which has the checksum of their file."""
    with files.reading(path / PLAN, hint="; restore it"):
        text = files.read(path / PLAN)
        if checksum(text) != info["planned"]:
            raise ValueError("it was changed since it was written")
        rows = decode(text, list[_Cases])
        info["plan"] = [{"case": row.case, "impl": impl} for row in rows for impl in row.impls]
        return [Cell.from_json(row) for row in info["plan"]]


def load_run(path: Path) -> Run:
    """Load a run folder; an unfinished last line, as a kill leaves it, is passed over.

    Raises:
        StoreError: no such run, or a file in it that is damaged, changed or not ours.
    """
    info, file = load_info(path), path / RECORDS
    own = _load_plan(path, info)
    latest: dict[tuple[tuple[str, str], int], Record] = {}
    torn = False
    with files.reading(file):
        for number, line in enumerate(_lines(file), start=1):
            if torn := not line.endswith(b"\n"):
                break
            try:
                record = Record.from_line(line)
            except StoreError as err:
                raise StoreError(
                    f"{file}, line {number}: {err}; restore it, or delete the line and measure its"
                    f" cell again: attnbench sweep --resume {shlex.quote(str(path))}"
                ) from err
            key = record.cell.key, record.process
            latest.pop(key, None)
            latest[key] = record
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in latest.values():
        cells.setdefault(record.cell.key, []).append(record)
    records, parts = [merged(parts) for parts in cells.values()], list(latest.values())
    return Run(path=path, info=info, cells=own, records=records, parts=parts, torn=torn)


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file with their ends; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), files.open_file(file) as source:
        yield from source


class _Cases(msgspec.Struct):
    case: dict[str, Any]
    impls: list[str]


def load_info(path: Path) -> dict[str, Any]:
    """Read `run.json` alone.

    Raises:
        StoreError: the folder is not a run, or the file is damaged or not ours.
    """
    file = path / INFO
    if not os.path.lexists(file):
        raise StoreError(f"{path} is not a run: no {INFO}")
    with files.reading(file, ", or not from attnbench", "; restore it, or measure again"):
        info = decode(unsealed(files.read(file)), dict[str, Any])
        found = info.get("schema")
        names = isinstance(info.get("run_id"), str) and isinstance(info.get("planned"), str)
        if not isinstance(found, int) or (found == SCHEMA and not names):
            raise ValueError("it has no schema, run_id, or checksum of a plan")
    if found != SCHEMA:
        reads = f"this version reads {SCHEMA}: measure again"
        raise StoreError(f"{file} has schema {found}; {reads}")
    return info
