"""Before anything is timed: what both sides have, whether it is right, what it allocates."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attnbench.errors import AttnbenchError, UsageError
from attnbench.execution.runner import LocalRunner
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import Checked, Version, VersionName
from attnbench.gate.decide.exact import checked
from attnbench.planning.expansion import check_names, expand, misfit
from attnbench.planning.plan import Axes, make_plan
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.theory.traits import impossible


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What is known of both sides before any pair is timed."""

    cells: tuple[Cell, ...]
    checks: Mapping[int, Mapping[VersionName, Checked]]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Examined:
    """One side: the names its files register, the machine, and a record for each cell.

    `recovered` says of cells that failed at first, and did not when they were tried again, how.
    """

    name: str
    names: list[str] = field(default_factory=list)
    catalogue: Catalogue | None = None
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    recovered: dict[tuple[str, str], str] = field(default_factory=dict)
    failure: str | None = None


# What may strike a process from outside: a machine that is slow or out of memory, a kill.
_MAY_PASS = ("oom", "timeout", "crashed", "error")


def check_sides(
    base: Version, candidate: Version, sweeps: tuple[Axes, ...], settings: Settings
) -> Sides:
    """Check every cell on both sides, in processes of their own.

    The cells are those of the implementations that either side's files register; what one side
    lacks is listed, too. What fails on one side alone is tried once more, in a fresh process: a
    single timeout or lost process proves nothing against a version of the code. A base that does
    not load leaves nothing to compare with.

    Raises:
        UsageError: the candidate's files do not load, or the sweep makes no sense.
    """
    # One call a cell is enough here: these times decide nothing.
    brief = replace(settings, min_time_s=0.0, max_time_s=0.001, replace=True)
    named = {
        side.name: replace(brief, files=side.files, root=side.root, other_root=other.root)
        for side, other in ((base, candidate), (candidate, base))
    }
    with LocalRunner(named["candidate"]) as mine, LocalRunner(named["base"]) as theirs:
        ours = _load("candidate", mine)
        if ours.catalogue is None:
            raise UsageError(f"the candidate cannot be measured: {ours.failure}")
        before = _load("base", theirs) if base.files else _Examined(name="base")
        cells, misfits = _cells(sweeps, ours.catalogue, ours, before)
        fit = tuple(cell for cell in cells if cell.key not in misfits)
        together = ours.catalogue.device == "cpu"  # nothing is timed: both at once
        sides = ((mine, ours), (theirs, before))
        _do([partial(_examine, runner, side, fit) for runner, side in sides], together=together)
        again = (mine, ours, _in_doubt(ours, before)), (theirs, before, _in_doubt(before, ours))
        _do([partial(_examine, *job) for job in again], together=together)
        warnings = [*mine.warnings]
    if before.failure is not None:
        warnings.append(f"the base does not load: {before.failure}")
    return Sides(
        cells=cells,
        checks={
            number: {
                side.name: _checked(cell, found, misfits)
                for side, found in ((base, before), (candidate, ours))
            }
            for number, cell in enumerate(cells)
        },
        environment=ours.catalogue.environment,
        warnings=tuple(warnings),
    )


def _load(name: str, runner: LocalRunner) -> _Examined:
    try:
        catalogue = runner.catalogue()
    except AttnbenchError as err:
        return _Examined(name=name, failure=str(err))
    return _Examined(name=name, names=list(runner.user_names), catalogue=catalogue)


def _do(jobs: Sequence[Callable[[], None]], *, together: bool) -> None:
    """Do the jobs, at once or one after the other; the first error is raised.

    In threads that an interrupt does not wait for: a kernel that hangs would hold it up.
    """
    if not together:
        for job in jobs:
            _do([job], together=True)
        return
    errors: queue.Queue[BaseException | None] = queue.Queue()

    def work(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as err:
            errors.put(err)
        else:
            errors.put(None)

    for job in jobs:
        threading.Thread(target=work, args=(job,), daemon=True).start()
    for _ in jobs:
        err = errors.get()
        if err is not None:
            raise err


def _cells(
    sweeps: tuple[Axes, ...], catalogue: Catalogue, ours: _Examined, before: _Examined
) -> tuple[tuple[Cell, ...], dict[tuple[str, str], str]]:
    """Each case with each implementation of either side that the sweep asks for.

    And the keys of those that make no sense, with the reason.
    """
    own = list(dict.fromkeys([*ours.names, *before.names]))
    check_names(sweeps, catalogue, own)
    cells: dict[tuple[str, str], Cell] = {}
    misfits: dict[tuple[str, str], str] = {}
    foreign: list[str] = []
    for axes in sweeps:
        foreign += [name for name in axes.impls or () if name not in own]
        for case in expand(axes, catalogue.device):
            unfit = impossible(case) or misfit(axes, case)
            for name in axes.impls or own:
                cell = Cell(case=case, impl=name)
                cells.setdefault(cell.key, cell)
                if unfit:
                    misfits[cell.key] = unfit
    if foreign:
        raise UsageError(
            f"{', '.join(dict.fromkeys(foreign))} (--impls) is in none of the files that are"
            f" watched, which register {', '.join(own)}"
        )
    if len(misfits) == len(cells):
        raise UsageError(next(iter(misfits.values()), "there is nothing to watch"))
    return tuple(cells.values()), misfits


def _in_doubt(side: _Examined, other: _Examined) -> tuple[Cell, ...]:
    """The cells that failed on this side, for a reason that may pass, and not so on the other."""
    return tuple(
        record.cell
        for key, record in side.records.items()
        if record.status in _MAY_PASS
        and (key not in other.records or other.records[key].status != record.status)
    )


def _examine(runner: LocalRunner, side: _Examined, cells: tuple[Cell, ...]) -> None:
    """Fill in the records of one side: those that need no process, and the others."""
    if side.failure is not None:
        return
    mine = [cell for cell in cells if cell.impl in side.names]
    if not mine:
        return
    cases = list({cell.case.case_id: cell.case for cell in mine}.values())
    reasons = runner.reasons(cases, sorted({cell.impl for cell in mine}))
    plan = make_plan(mine, reasons)
    for record in (*plan.decided, *runner.run(plan.jobs)):
        failed = side.records.get(record.cell.key)
        if failed is not None and record.status == "ok":
            why = f"{failed.status}: {failed.reason}"
            side.recovered[record.cell.key] = f"failed once on the {side.name} ({why})"
        side.records[record.cell.key] = record


def _checked(cell: Cell, side: _Examined, misfits: Mapping[tuple[str, str], str]) -> Checked:
    if cell.key in misfits:
        return Checked(status="skipped", reason=misfits[cell.key])
    if side.failure is not None:
        return Checked(status="error", reason=side.failure)
    found = checked(side.records.get(cell.key))
    return replace(found, reason=side.recovered.get(cell.key, found.reason))
