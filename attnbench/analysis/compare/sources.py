"""What can be compared, read into one shape: runs, and files of pytest-benchmark."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from attnbench.analysis import notes
from attnbench.analysis.apart import CellTime, Key, time_of
from attnbench.analysis.history.entries import Entry
from attnbench.base import files, units
from attnbench.base.jsontext import decode
from attnbench.errors import UsageError
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.folder import GATE, SWEEP, RunFolder
from attnbench.store.runs import Run, load_run
from attnbench.theory.traits import case_label

_NOTCH = 1.57  # McGill, Tukey, Larsen, "Variations of box plots", Am. Stat. 32 (1978): of a median


@dataclass(frozen=True, kw_only=True)
class SourceCell:
    """One cell of a source: what it is called, and what is known of it.

    `time` is None where `reason` says why; `unsteady` is why its error has no bound. `case` is None
    of other tools' cells, `record` of all but a run's.
    """

    label: str
    impl: str
    case: Case | None = None
    time: CellTime | None = None
    reason: str | None = None
    unsteady: str | None = None
    record: Record | None = None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Those of the record; nothing without one."""
        return self.record.metrics if self.record else {}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A measurement of some cells: a run, or a file of pytest-benchmark.

    `environment` are facts of the machine and its libraries, `settings` how it was measured,
    `code` the commit where that is known.
    """

    name: str
    path: Path
    cells: Mapping[Key, SourceCell]
    created: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    run: Run | None = None

    @cached_property
    def busy(self) -> frozenset[str]:
        """The groups of which most cells are unsteady: the others met the same moments."""
        of: dict[str, list[bool]] = defaultdict(list)
        for cell in self.cells.values():
            if cell.time and cell.time.group:
                of[cell.time.group].append(cell.unsteady is not None)
        return frozenset(group for group, found in of.items() if 2 * sum(found) > len(found))

    @property
    def times(self) -> dict[Key, CellTime]:
        """The times that have a bound for their error."""
        known = ((key, cell.time) for key, cell in self.cells.items() if not cell.unsteady)
        return {key: time for key, time in known if time and time.group not in self.busy}


def read(text: str, output: Path) -> Source:
    """A run as `RunFolder.find` takes it, or a .json of pytest-benchmark.

    Raises:
        StoreError: there is no such thing, it is damaged, or of another schema.
        UsageError: it is a gate run, which has two versions of its own.
    """
    file = Path(text)
    ours = file.name in (GATE.file, SWEEP.file, SWEEP.journal) or os.path.isdir(file)
    if not ours and (file.suffix == ".json" or os.path.isfile(file)):
        with files.reading(file, ", or not what compare takes (runs, pytest --benchmark-json)"):
            return pytest_benchmark(file, files.read(file))
    found = RunFolder.find(text, output, SWEEP, GATE)
    if found.kind is GATE:
        raise UsageError(
            f"{found.path} is a gate run: it has compared its two versions itself; see it with:"
            f" attnbench gate --replay {shlex.quote(str(found.path))}"
        )
    return of_run(load_run(found.path))


def of_run(run: Run) -> Source:
    """A stored run as a source."""
    info, cores = run.info, run.shared(run.environments).get("cores")
    cells = {
        record.cell.key: SourceCell(
            label=case_label(record.cell.case), impl=record.cell.impl, case=record.cell.case,
            record=record, time=time_of(record, cores), unsteady=notes.unsteady(record),
            reason=None if record.status == "ok" else f"{record.status}: {record.reason}",
        )
        for record in run.records
    }  # fmt: skip
    return Source(
        name=run.run_id, path=run.path, cells=cells, created=info.get("created"), run=run,
        environment={"attnbench": info.get("attnbench")} | run.shared(run.environments),
        settings=info.get("settings") or {},
        code=None if info.get("dirty") else info.get("commit"),
    )  # fmt: skip


def of_entry(entry: Entry) -> Source:
    """What a history keeps of a run."""
    cells = {
        c.key: SourceCell(
            label=c.label, impl=c.impl, time=CellTime(time_us=c.time_us, group=c.group)
        )
        for c in entry.cells
    }
    return Source(
        name=entry.run, path=Path(), cells=cells, created=entry.created,
        environment=entry.environment, settings=entry.environment,
        code=None if entry.dirty else entry.commit,
    )  # fmt: skip


class _Stats(msgspec.Struct):
    median: float
    iqr: float
    rounds: int


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats


class _File(msgspec.Struct):
    benchmarks: list[_Benchmark]
    machine_info: dict[str, Any]
    commit_info: dict[str, Any] = {}
    datetime: str = ""


def pytest_benchmark(file: Path, text: bytes) -> Source:
    """What `pytest --benchmark-json` wrote: a cell a test, the median of its rounds.

    Its 95 % interval is the notch of a box plot, median ± 1.57 · IQR / √rounds.

    Raises:
        ValueError: it is something else.
    """
    found = decode(text, _File)
    tests = Counter(test.fullname for test in found.benchmarks)
    cells = {}
    for name, stats in ((test.fullname, test.stats) for test in found.benchmarks):
        time = few = reason = None
        if tests[name] > 1:
            reason = f"{tests[name]} tests have this name"
        elif not 0 < stats.median < math.inf:
            reason = f"a median of {stats.median:g} s"
        else:
            error = _NOTCH / 1.96 * stats.iqr / math.sqrt(max(1, stats.rounds)) / stats.median
            time = CellTime(time_us=1e6 * stats.median, error=error)
            few = units.counted(stats.rounds, "round") if stats.rounds < 5 else None
        cells[name, ""] = SourceCell(label=name, impl="", time=time, unsteady=few, reason=reason)
    machine, commit = found.machine_info, found.commit_info
    cpu = machine.get("cpu") or {}
    environment = {
        "device_name": cpu.get("brand_raw") or machine.get("processor"),
        "cores": cpu.get("count"), "node": machine.get("node"),
        "python": machine.get("python_version"),
        "platform": f"{machine.get('system')}-{machine.get('release')}",
    }  # fmt: skip
    known = re.fullmatch("[0-9a-f]{7,}", str(commit.get("id"))) and not commit.get("dirty")
    return Source(
        name=file.name, path=file, cells=cells, created=found.datetime or None,
        environment=environment, code=commit["id"] if known else None,  # else `unversioned`
    )  # fmt: skip
