"""One gate run: both versions checked, then timed in rounds until everything is decided."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from msgspec import structs

from attnbench.base.files import digest
from attnbench.base.parameters import meant
from attnbench.base.units import counted
from attnbench.errors import AttnbenchError, StoreError, UsageError, WorkerError
from attnbench.execution.events import Events, RoundMeasured, Total, Warned, Working
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.gate.decide.data import (
    Checked,
    GateCell,
    GateRun,
    Round,
    RoundFacts,
    Rules,
    Version,
    VersionName,
)
from attnbench.gate.decide.exact import METRICS
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.verdict import beyond_timing, comparable
from attnbench.gate.run.processes import RoundProcesses
from attnbench.gate.run.rounds import Bench, RoundError, measure_round
from attnbench.machine import host
from attnbench.planning.plan import Axes, check_names, expand, make_plan, mismatch
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.theory.traits import impossible
from attnbench.versions.environments import interpreter_of

# Rounds that may be measured again for what went on beside them; after that they count.
MOST_DISCARDED = 8
# What may strike a process from outside: a machine that is slow or out of memory, a kill. What is
# skipped may be so for something larger that failed.
_MAY_PASS = ("oom", "timeout", "crashed", "error", "skipped")
_Key = tuple[str, str]  # case, implementation


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """What a gate run is asked for.

    `settings` say where and how (device, threads, seed, the timeout of a silent process); their
    files come from the versions. The run ends at something wrong unless `keep_going`.
    `options` is kept for people. `keep` is given each round as soon
    as it is measured, with the run as it began, before anything is decided from it. `injected`
    slows the candidate in some cells, by number, by a share: for validation alone.
    """

    base: Version
    candidate: Version
    sweeps: tuple[Axes, ...]
    rules: Rules = field(default_factory=Rules)
    settings: Settings = field(default_factory=Settings)
    injected: Mapping[int, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_going: bool = False
    keep: Callable[[GateRun, Round], None] = lambda run, found: None

    def begun(
        self,
        cells: tuple[GateCell, ...],
        checks: Mapping[int, Mapping[VersionName, Checked]],
        environment: Mapping[str, Any],
        base_environment: Mapping[str, Any],
    ) -> GateRun:
        """The run before its first round."""
        return GateRun(
            rules=self.rules, base=self.base, candidate=self.candidate, cells=cells, checks=checks,
            rounds=(), environment=environment, base_environment=base_environment,
            options={**self.options, "seed": self.settings.seed},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip


def run_gate(
    request: GateRequest,
    check: Callable[..., Events[GateRun]] | None = None,
    processes: Callable[..., RoundProcesses] = RoundProcesses,
) -> Events[GateRun]:
    """Check and time both versions; return the raw data of the run.

    `check` says what the cells are and what became of them, in place of and called as
    `check_versions`; in rounds they are timed by `processes`.

    Raises:
        UsageError: the candidate does not load, nothing is there to compare, or its files
            changed while they were measured.
        WorkerError: no process can be started.
    """
    begin = time.perf_counter()
    digests = {  # before they are checked: what is timed must be the same
        version.name: {os.path.relpath(f, version.root): digest(Path(f)) for f in version.files}
        for version in (request.base, request.candidate)
    }
    with contextlib.ExitStack() as held:
        yield Working("checking both versions")
        settings: dict[VersionName, Settings] = {}
        for version in (request.base, request.candidate):
            own = held.enter_context(interpreter_of(version.environment))
            settings[version.name] = replace(request.settings, **own)
        run = yield from (check or check_versions)(request, settings)
        yield Total(len(run.cells))
        checked_s, device = time.perf_counter() - begin, run.environment["device"]
        alone = device == "cpu" and request.settings.threads == 1
        cpus = host.affinity() if alone else None
        bench = Bench(
            base=request.base, candidate=request.candidate, cells=run.cells, rules=request.rules,
            settings={name: replace(each, device=device) for name, each in settings.items()},
            cpus=tuple(cpus) if cpus else None,
            rng=random.Random(request.settings.seed), injected=request.injected, digests=digests,
            processes=processes,
        )  # fmt: skip
        run = yield from _measure(bench, run, begin + request.rules.budget_s, request)
    rounds_s, wall_s = sum(found.spent_s for found in run.rounds), time.perf_counter() - begin
    spent_s = {"checks_s": checked_s, "rounds_s": rounds_s, "wall_s": wall_s}
    alike = digests["base"] == digests["candidate"]
    return replace(
        run, spent={part: round(seconds, 3) for part, seconds in spent_s.items()},
        options={**run.options, "loaded_alike": alike},
    )  # fmt: skip


def _measure(bench: Bench, run: GateRun, deadline: float, request: GateRequest) -> Events[GateRun]:
    """The run with its rounds: until nothing is open, time is over, or a finding ends it."""
    decision = SequentialDecision(comparable(run), run.rules, int(run.options.get("seed") or 0))
    rounds: list[Round] = []
    discarded, last_s, keep, begun = 0, 0.0, request.keep, run
    while (plan := decision.next_round()) is not None:
        run = replace(run, rounds=tuple(rounds))
        if not request.keep_going and beyond_timing(run, decision):
            return replace(run, at_finding=True)
        if not rounds:
            yield Working("timing, interleaved")
        if time.perf_counter() + last_s > deadline:
            return replace(run, over_budget=True)
        found = _measure_twice(bench, plan, len(rounds))
        if found.discarded is not None and discarded >= MOST_DISCARDED:
            facts = RoundFacts(**found.facts, counted_despite=found.discarded)
            found = structs.replace(found, discarded=None, facts=facts)
        discarded += found.discarded is not None
        last_s = found.spent_s
        rounds.append(found)
        try:
            keep(begun, found)
        except StoreError as err:  # which costs no verdict
            yield Warned(f"{err}: rounds are kept no longer")
            keep = GateRequest.keep
        decision.add(found)
        still = len(decision.progress())
        words = f"confirming {counted(still, 'suspect')}"
        if decision.suspects is None:
            words = f"screening {counted(len(decision.cells), 'cell')}"
        words = words if still else "every cell is decided"
        yield RoundMeasured(len(rounds), found.discarded, words)
    return replace(run, rounds=tuple(rounds))


def _measure_twice(bench: Bench, plan: RoundPlan, number: int) -> Round:
    """Measure a round; once more, if a process fails and no cell is to blame."""
    with contextlib.suppress(RoundError, WorkerError):
        return measure_round(bench, plan, number)
    try:
        return measure_round(bench, plan, number)
    except RoundError as err:
        raise WorkerError(f"the processes of a round fail again and again: {err}") from err


def check_versions(
    request: GateRequest, settings: Mapping[VersionName, Settings]
) -> Events[GateRun]:
    """Check every cell of both versions, in processes of their own; the run so far.

    The cells are those of the implementations that either version's files register; what one
    lacks is listed, too. A base that does not load leaves nothing to compare with.

    Raises:
        UsageError: the candidate's files do not load, the sweep makes no sense, or the GPU takes
            one process at a time.
    """
    base, candidate = request.base, request.candidate
    bases, candidates = (
        replace(
            settings[version.name], files=version.files, root=version.root, other_root=other.root,
            # One call a cell is enough here: these times decide nothing.
            min_time_s=0.0, max_time_s=0.001, replace=True,
        )
        for version, other in ((base, candidate), (candidate, base))
    )  # fmt: skip
    base_environment, failure = {}, None
    with LocalRunner(bases) as theirs, LocalRunner(candidates) as mine:
        try:
            catalogue = mine.catalogue()
        except AttnbenchError as err:
            raise UsageError(f"the candidate cannot be measured: {err}") from err
        mode = catalogue.environment.get("compute_mode")
        if mode not in (None, "default"):
            raise UsageError(
                f"the GPU's compute mode is {mode}, but a round keeps three processes on it at"
                " once: sudo nvidia-smi -c DEFAULT, or --device cpu"
            )
        try:
            if base.files:
                base_environment = theirs.catalogue().environment
        except AttnbenchError as err:
            if base.is_file:
                raise UsageError(f"the base: {err}".replace("--impl", "--against")) from err
            failure = Checked(status="error", reason=str(err))
            yield Warned(f"the base does not load: {err}")
        after, before = (dict.fromkeys(itertools.chain(*each.own)) for each in (mine, theirs))
        own = list(after | before)
        if base.is_file and (alone := sorted(after.keys() ^ before.keys())):
            own = [name for name in own if name not in alone]
            if not own:
                each = f"{base.ref} has {', '.join(before)}; {candidate.ref} has {', '.join(after)}"
                raise UsageError(f"no implementation is in both files (--against): {each}")
            yield Warned(f"in one file alone, so left out: {', '.join(alone)}")
        cells, mismatches = _cells(request.sweeps, catalogue, own)

        def check(name: VersionName, numbers: Iterable[int]) -> dict[int, Checked]:
            if name == "base" and failure:
                return dict.fromkeys(numbers, failure)
            return _checked(theirs if name == "base" else mine, cells, numbers, mismatches)

        # Nothing is timed: where there is a CPU for each, both at once.
        checks = check_twice(check, len(cells), 2 if catalogue.device == "cpu" else 1)
        yield from map(Warned, mine.warnings)
    apart = base.environment != candidate.environment
    return request.begun(cells, checks, catalogue.environment, base_environment if apart else {})


def _checked(
    runner: LocalRunner,
    cells: Sequence[Cell],
    numbers: Iterable[int],
    mismatches: Mapping[str, str | None],
) -> dict[int, Checked]:
    """What becomes of these cells in a version."""
    absent = Checked(status="absent", reason="there is no such implementation")
    found = dict.fromkeys(numbers, absent)
    mine = {cells[n].key: n for n in found if any(cells[n].impl in names for names in runner.own)}
    if mine:
        asked = [cells[n] for n in mine.values()]
        plan = make_plan(asked, runner.reasons(asked), mismatches=mismatches)
        ran = (event for event in runner.run(plan.jobs) if isinstance(event, Record))
        for record in (*plan.decided, *ran):
            metrics = {n: record.metrics[n] for n in METRICS if n in record.metrics}
            now = Checked(status=record.status, reason=record.reason, metrics=metrics)
            found[mine[record.cell.key]] = now
    return found


def check_twice(
    check: Callable[[VersionName, Sequence[int]], dict[int, Checked]], count: int, at_once: int
) -> dict[int, dict[VersionName, Checked]]:
    """What became of each of `count` cells in both versions, so many of which are checked at once.

    What fails in one alone, in a way that may pass, is tried once more, in a fresh process: a
    single timeout or lost process proves nothing against a version of the code.
    """
    found: dict[VersionName, dict[int, Checked]] = {"base": {}, "candidate": {}}
    left = {name: [*range(count)] for name in found}

    def fill(name: VersionName) -> None:
        for number, now in (check(name, left[name]) if left[name] else {}).items():
            then = found[name].get(number)
            if then is not None and now.status == "ok":
                words = f"failed once on the {name} ({then.status}: {then.reason})"
                now = replace(now, reason=words)
            found[name][number] = now

    for _ in range(2):
        do_all([partial(fill, name) for name in found], at_once)
        apart = [n for n in range(count) if len({of[n].status for of in found.values()}) > 1]
        left = {name: [n for n in apart if of[n].status in _MAY_PASS] for name, of in found.items()}
    return {n: {name: of[n] for name, of in found.items()} for n in range(count)}


def do_all(jobs: Sequence[Callable[[], Any]], at_once: int) -> None:
    """Do the jobs, so many at once; the first error is raised.

    The pool's threads are daemons: an interrupt waits for no kernel that hangs.
    """

    def error_of(job: Callable[[], Any]) -> BaseException | None:
        try:
            job()
        except BaseException as err:  # of a SystemExit the pool would never hear
            return err
        return None

    with ThreadPool(at_once) as pool:
        for err in filter(None, pool.imap_unordered(error_of, jobs)):
            raise err


def _cells(
    sweeps: tuple[Axes, ...], catalogue: Catalogue, own: list[str]
) -> tuple[tuple[Cell, ...], dict[str, str | None]]:
    """Each case with each implementation of the files that the sweeps ask for.

    And by the id of a case why it makes no sense, or None.
    """
    check_names(sweeps, catalogue, own)
    absent = dict.fromkeys(n for axes in sweeps for n in axes.impls or () if not meant(n, own))
    if absent:
        raise UsageError(
            f"{', '.join(absent)} (--impls) cannot be compared; what can: {', '.join(own)}"
        )
    cells: dict[_Key, Cell] = {}
    mismatches: dict[str, str | None] = {}
    for axes in sweeps:
        for case in expand(axes, catalogue.device):
            why = impossible(case) or mismatch(axes, case)
            mismatches[case.case_id] = why and mismatches.get(case.case_id, why)  # in every sweep
            for name in (n for text in axes.impls or own for n in meant(text, own)):
                cells[case.case_id, name] = Cell(case=case, impl=name)
    if not cells or all(mismatches.values()):
        raise UsageError(next(filter(None, mismatches.values()), "there is nothing to watch"))
    return tuple(cells.values()), mismatches
