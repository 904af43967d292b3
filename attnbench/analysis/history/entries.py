"""What a history keeps of a run: one line of JSON with its times, and where it was measured.

A line takes some 9 kB for 80 cells, so that years of a CI fit into one file.
"""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from attnbench.analysis import times
from attnbench.base.files import lock, reading, write_whole
from attnbench.base.files import read as read_bytes
from attnbench.base.jsontext import decode, encode
from attnbench.errors import StoreError
from attnbench.machine.environment import asked
from attnbench.store.runs import INFO, Run, load_run
from attnbench.theory.traits import case_label

FILE = "history.jsonl"
Time = Annotated[float, msgspec.Meta(gt=0)]


class CellLine(msgspec.Struct, frozen=True, array_like=True):
    """A cell of a run: its time with the interval in µs, and the group that it took turns in.

    `group` is a case in it, as its own name is another one in every run.
    """

    case_id: str
    impl: str
    label: str
    time_us: Time
    low_us: Time | None = None
    high_us: Time | None = None
    group: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the cell from run to run."""
        return self.case_id, self.impl


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run in its history; `dirty`: files differed from the commit. Unknown is None."""

    schema: Literal[1] = 1
    run: str
    created: str
    commit: str | None = None
    dirty: bool | None = None
    environment: dict[str, Any]
    cells: tuple[CellLine, ...]

    def __post_init__(self) -> None:
        """Refuse a time without its zone, which has no place among the others."""
        if self.when.tzinfo is None:
            raise ValueError(f"{self.created!r} is not a time with its zone")

    @property
    def identity(self) -> tuple[str, str]:
        """What tells it from other runs: names alone come again, in a CI every time."""
        return self.created, self.run

    @property
    def when(self) -> datetime:
        """When the run was made."""
        return datetime.fromisoformat(self.created)

    @property
    def machine(self) -> tuple[Any, ...]:
        """Times of two machines are never compared."""
        return tuple(self.environment.get(name) for name in asked("series"))

    @property
    def facts(self) -> dict[str, Any]:
        """Of its environment what times may depend on; what is not known is left out."""
        return {name: self.environment[name] for name in asked("cause") if name in self.environment}


def entry_of(run: Run) -> Entry:
    """What is kept of a run: the cells that have a time which can be right."""
    info = run.info
    known = run.shared(run.environments)
    # What was asked for, under what there was: `threads` may be given as None.
    facts = (info.get("settings") or {}) | known | {"attnbench": info.get("attnbench")}
    members = sorted((str(r.metrics.get("group")), r.cell.case.case_id) for r in run.records)
    groups, cells = dict(members), []
    for record in run.records:
        time_us = times.time_us(record)
        if time_us is None or times.suspect(record, run.environment_of(record), time_us):
            continue
        low_us, high_us = times.interval_us(record) or (None, None)
        case = record.cell.case
        cells.append(
            CellLine(
                case.case_id, record.cell.impl, case_label(case), _brief(time_us),
                low_us and _brief(low_us), high_us and _brief(high_us),
                groups[record.metrics["group"]] if record.metrics.get("group") else "",
            )
        )  # fmt: skip
    kept = *asked("series"), *asked("cause")
    return Entry(
        run=run.run_id, created=str(info.get("created") or ""), commit=info.get("commit"),
        dirty=info.get("dirty"), cells=tuple(cells),
        environment={name: facts[name] for name in kept if name in facts},
    )  # fmt: skip


def _brief(value: float) -> float:
    return float(f"{value:.5g}")


def read_file(file: Path) -> list[Entry]:
    """The lines of a history; none where there is no file.

    Raises:
        StoreError: the file cannot be read, or a line is not one of ours; it is named.
    """
    if not os.path.lexists(file):
        return []
    with reading(file):
        lines = read_bytes(file).splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        with reading(f"{file}, line {number}", ", or not from this version"):
            found.append(decode(line, Entry))
    return found


def read(folder: Path) -> list[Entry]:
    """The runs of a folder, from its `history.jsonl` and its run folders, the oldest first.

    A run that is in both counts once, one without any time is left out.

    Raises:
        StoreError: there is no run, or something in the folder is damaged or of another schema.
    """
    runs = [entry_of(load_run(file.parent)) for file in sorted(folder.glob(f"*/{INFO}"))]
    entries = [*read_file(folder / FILE), *runs]
    known = {entry.identity: entry for entry in entries if entry.cells}
    if not known:
        raise StoreError(
            f"no run in {folder}, neither as a folder nor in {FILE};"
            f" add one with: attnbench history {shlex.quote(str(folder))} --add RUN"
        )
    return sorted(known.values(), key=lambda entry: (entry.when, entry.run))


def add(folder: Path, run: Run) -> Entry | None:
    """Append a run to the history in `folder`, which is made; None where it is in it already.

    Raises:
        StoreError: the run is unfinished or has no time, or the history is damaged or cannot be
            written.
    """
    if run.unfinished:
        raise StoreError(f"{run.path} is unfinished: {run.unfinished}")
    entry, file = entry_of(run), folder / FILE
    if not entry.cells:
        raise StoreError(f"{run.path} has no cell with a time, and no place in a history")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as err:
        raise StoreError(f"cannot write {file} ({err.strerror})") from err
    try:
        lock(descriptor, folder)  # of two that add at a time, none may be lost
        known = read_file(file)
        if any(old.identity == entry.identity for old in known):
            return None
        write_whole(file, "".join(f"{encode(one).decode()}\n" for one in [*known, entry]))
    finally:
        os.close(descriptor)
    return entry
