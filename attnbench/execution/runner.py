"""Cells measured and checked, and other questions answered, by worker processes."""

from __future__ import annotations

import abc
import itertools
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.ceilings import exceeded, keep, recalled
from attnbench.execution.events import Warned, Working
from attnbench.execution.policy import Death, Key
from attnbench.execution.process import CAN_FORK, GarbledError, Server, Settings, Worker, ending
from attnbench.execution.supervision import Outcome, Supervision
from attnbench.machine.environment import Environment
from attnbench.planning.plan import Job, reads_cache
from attnbench.schema import messages
from attnbench.schema.case import Case
from attnbench.schema.messages import CellMeasured, CellProfiled, Check, Measure
from attnbench.schema.record import Cell, Record
from attnbench.theory.pruning import Pruning
from attnbench.version import __version__

Limits = tuple[Sequence[str], Sequence[int]]  # dtypes and numbers of threads
E = TypeVar("E")

_START_TIMEOUT_S = 120.0
_STARTS = 3  # of a worker that ends before it is ready
# Where a profiler slows whatever its process launches later (`measure.probes.profile_call`).
_PROFILED_APART = ("cuda",)
_DEATHS_EACH = 3  # crashes after which a check says no more of an implementation
_UNREADABLE = (
    "a worker's answer cannot be read: an implementation's file, or its `supports`,"
    " writes to a file descriptor that it does not own"
)


class Executor(abc.ABC):
    """Where cells are measured: `run(jobs)` yields records. Use as a context manager.

    With the catalogue come `warnings` and `own`, the names that each of the user's files
    registered. `environments` has the facts of the machines that measure by their key; `admit`
    returns those of one with the ceilings known of it, or raises a UsageError: it is not to
    measure. For other ceilings `limits` asks. `pruning` knows what ran out of memory before,
    `suspects` what became of cells, by their keys, that are tried once more. `start_up_s` and
    `ceilings_s` are the wall seconds spent so far on starting workers and on ceilings, since
    `began`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.began, self.start_up_s, self.ceilings_s = time.perf_counter(), 0.0, 0.0
        self.limits: Limits | None = None
        self.environments: dict[str, dict[str, Any]] = {}
        self.admit: Callable[[dict[str, Any]], dict[str, Any]] = dict
        self.warnings: list[str] = []
        self.own: tuple[tuple[str, ...], ...] = ()
        self.pruning = Pruning(enabled=settings.prune)
        self.suspects: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abc.abstractmethod
    def start(self) -> None:
        """Begin in the background with what takes seconds, unless that is done."""

    @abc.abstractmethod
    def catalogue(self) -> messages.Catalogue:
        """Names, capabilities and the machine."""

    @abc.abstractmethod
    def reasons(self, cells: Iterable[Cell]) -> dict[tuple[str, str], str | None]:
        """Why an implementation cannot take its case, by the cells' keys."""

    @abc.abstractmethod
    def needs(self, cells: Iterable[Cell]) -> tuple[dict[tuple[str, str], int | None], int | None]:
        """Bytes that each cell needs at least, by its key, None if unknown; and bytes free now."""

    @abc.abstractmethod
    def run(self, jobs: Iterable[Job]) -> Iterator[Record | Working | Warned]:
        """Yield a record for every cell of the jobs, whatever becomes of it, and what goes on."""


class LocalRunner(Executor):
    """Runs groups in worker processes on this machine, which facts in `place` tell from others."""

    def __init__(self, settings: Settings, place: Mapping[str, Any] = {}) -> None:
        super().__init__(settings)
        self._place = place
        self._device = settings.device
        self._idle: Worker | None = None
        self._kernels: dict[tuple[str, str], dict[str, Any]] = {}  # as profiled, by the cell's key
        self._profiled_s: dict[tuple[str, str], float] = {}  # of cells that have no record yet
        self._server: Server | None = None
        self._process = 0

    def start(self) -> None:
        """Begin to import what workers need: they are forked, each a fresh process all the same."""
        if self._server is not None and not self._server.lives():
            self.renew()
        if self._server is None and CAN_FORK:
            self._server = Server(self.settings)

    def renew(self) -> None:
        """Let the workers from now on have another address layout than those before."""
        self.close()
        if self._server is not None:
            self._server.__exit__()
            self._server = None

    def catalogue(self) -> messages.Catalogue:
        """As `Executor.catalogue`; fixes the device where it was `auto`.

        Raises:
            UsageError: the device is not there, or a user's file does not load.
        """
        catalogue = self._ask(messages.Describe(self._device), messages.Catalogue)
        self._device = catalogue.device
        if reason := catalogue.devices.get(self._device):
            raise UsageError(reason)
        facts = catalogue.environment | {"attnbench": __version__, **self._place}
        self.environments = {Environment(facts).key: self.admit(facts)}
        return msgspec.structs.replace(catalogue, environment=facts)

    def reasons(self, cells: Iterable[Cell]) -> dict[tuple[str, str], str | None]:
        """As `Executor.reasons`."""
        cases, names = _crossed(cells)
        found = self._ask(messages.AskReasons(tuple(cases.values()), names), messages.Reasons)
        return _by_cell(cases, found.reasons)

    def needs(self, cells: Iterable[Cell]) -> tuple[dict[tuple[str, str], int | None], int | None]:
        """As `Executor.needs`."""
        cases, names = _crossed(cells)
        if not cases:
            return {}, None
        found = self._ask(messages.AskNeeds(tuple(cases.values()), names), messages.Needs)
        return _by_cell(cases, found.needs), found.free

    def run(self, jobs: Iterable[Job]) -> Iterator[Record | Working | Warned]:
        """As `Executor.run`: a job is taken when the process of those before it has ended.

        After the first the ceilings are measured, if there are `limits` and none in the cache; else
        after one with a cell that exceeds these.
        """
        self.close()  # it planned: cells get fresh processes
        asked, how = (self.limits, self.settings.memory_limit), self.settings.ceilings
        for here, facts in self.environments.items():
            if self.limits and how == "cached" and "ceilings" not in facts:
                self.environments[here] = yield from recalled(facts, asked)
        for job in jobs:
            threads = job.cases[0][0].threads
            if (job.process, threads) != (self._process, self.settings.library_threads or 1):
                # The processes of a cell are to have nothing in common, and libraries that a server
                # has loaded keep its number of threads.
                self.renew()
                self._process = job.process
                self.settings = replace(self.settings, library_threads=threads)
            keys = [(i, impl) for i, (_, impls) in enumerate(job.cases) for impl in impls]
            cases = [case for case, _ in job.cases]
            if cases[0].device in _PROFILED_APART:
                yield from self._profile(cases, keys)
            named = {(i, impl): (cases[i].case_id, impl) for i, impl in keys}
            again = False
            before = {key: self.suspects[c] for key, c in named.items() if c in self.suspects}
            request = partial(self._measure_request, job)
            supervised = Supervision(self, cases, request, retried=before, until=job.until)
            for event in supervised.run(keys):
                if isinstance(event, Working):
                    yield event
                    continue
                (index, impl), result = event
                if isinstance(result, Death):
                    cell = Cell(case=cases[index], impl=impl)
                    record = Record(cell=cell, status=result.status, reason=result.reason)
                elif isinstance(result, CellMeasured):
                    record = result.record
                else:
                    continue
                if record.status == "oom":
                    self.pruning.oom.append(record.cell)
                key, spent_s = record.cell.key, record.spent_s
                if key in self._profiled_s:
                    spent_s = spent_s | {"profile": self._profiled_s.pop(key)}
                known = self._kernels.get(key, {}) if record.status == "ok" else {}
                if note := supervised.retried.get((index, impl)):
                    known = known | {"retried_note": note}
                metrics = record.metrics | known
                again |= any(exceeded(record, facts) for facts in self.environments.values())
                yield replace(
                    record, metrics=metrics, spent_s=spent_s, process=job.process,
                    environment=next(iter(self.environments), ""),
                )  # fmt: skip
            self.close()  # the next job gets a fresh process
            for here, facts in self.environments.items():
                if self.limits and (again or ("ceilings" not in facts and how != "none")):
                    dtypes, counts = self.limits
                    begin = time.perf_counter()
                    found = {str(threads): self.ceilings(dtypes, threads) for threads in counts}
                    self.environments[here] = facts | {"ceilings": found}
                    yield from keep(found, facts, asked)
                    self.ceilings_s += time.perf_counter() - begin
                    self.close()

    def check(self, items: Sequence[messages.CheckItem]) -> Iterator[Outcome | Working]:
        """Check items of the battery; yield what becomes of each, by its index."""

        def request(remaining: list[Key]) -> Check:
            return Check(tuple(items[i] for i, _ in remaining), self.settings.seed)

        supervised = Supervision(self, [item.case for item in items], request, _DEATHS_EACH)
        return supervised.run([(i, item.impl) for i, item in enumerate(items)])

    def trace(self, request: messages.Trace) -> messages.CellTraced:
        """Where the time and the memory of a cell go; of one whose worker dies, how that ended.

        The worker ends with it: nothing is timed in its process any more.
        """
        supervised = Supervision(self, [request.case], lambda _: request)
        done = supervised.run([(0, request.impl)])
        [(_, found)] = (each for each in done if not isinstance(each, Working))
        self.close()
        if isinstance(found, Death):
            return messages.CellTraced(impl=request.impl, status=found.status, reason=found.reason)
        assert isinstance(found, messages.CellTraced)
        return found

    def ceilings(self, dtypes: Sequence[str], threads: int) -> dict[str, Any]:
        """What the device can do at most, as measured now; see `ceilings.measure_ceilings`."""
        asked = messages.MeasureCeilings(self._device, tuple(dtypes), threads)
        return self._ask(asked, messages.Facts).facts

    def diagnose(self) -> Generator[messages.Testing, None, dict[str, Any]]:
        """Facts of the machine and the self-tests of measuring on it; see `worker.diagnosis`.

        Yields each test before it runs.
        """
        worker = self.worker()
        worker.send(messages.Diagnose(self._device))
        while isinstance(event := self._wait(worker), messages.Testing):
            yield event
        return self._answer(worker, event, messages.Facts).facts

    def close(self) -> None:
        """End the worker that is kept for the next request, if any."""
        if self._idle is not None:
            self._idle.__exit__()
            self._idle = None

    def __exit__(self, *_: object) -> None:
        self.renew()

    def _profile(self, cases: list[Case], keys: list[Key]) -> Iterator[Working]:
        """Learn in a process of its own which kernels the cells run, where that is not known.

        What becomes of it costs a cell no more than their names.
        """

        def request(remaining: list[Key]) -> messages.Profile:
            asked: dict[int, list[str]] = {}
            for index, impl in remaining:
                asked.setdefault(index, []).append(impl)
            entries = [(cases[index], tuple(impls)) for index, impls in asked.items()]
            return messages.Profile(tuple(entries), self.settings.seed)

        cells = [(key, Cell(case=cases[key[0]], impl=key[1])) for key in keys]
        seen, implied = self._kernels, self.pruning.implied
        unknown = [key for key, cell in cells if cell.key not in seen and not implied(cell)]
        begin, start_up_s = time.perf_counter(), self.start_up_s
        for event in Supervision(self, cases, request).run(unknown):
            if isinstance(event, Working):
                yield event
                continue
            (index, impl), result = event
            if isinstance(result, Death):
                known = {"kernel_note": f"not profiled: {result.status}: {result.reason}"}
            else:
                assert isinstance(result, CellProfiled)
                known = result.metrics
            key, end = (cases[index].case_id, impl), time.perf_counter()
            self._kernels[key] = known
            self._profiled_s[key] = round(end - begin - (self.start_up_s - start_up_s), 6)
            begin, start_up_s = end, self.start_up_s
        self.close()

    def _measure_request(self, job: Job, remaining: list[Key]) -> Measure:
        """What remains of a job, in its groups."""
        wanted, numbers, groups = set(remaining), itertools.count(), []
        for group in job.groups:
            left = []
            for (case, impls), number in zip(group, numbers, strict=False):
                names = tuple(impl for impl in impls if (number, impl) in wanted)
                left += [(case, names)] if names else []
            groups += [tuple(left)] if left else []
        fields = set(Measure.__struct_fields__) - {"groups", "oom", "limit_s"}
        settings = {name: getattr(self.settings, name) for name in fields}
        if settings["l2"] == "step":  # what else the step reads has evicted the cache of keys
            settings["l2"] = "cold" if reads_cache(job.cases[0][0]) else None
        if job.until < math.inf:
            ends = {"race_s": job.timed_until, "limit_s": job.until}
            now = time.perf_counter()
            settings |= {name: max(0.0, end - now) for name, end in ends.items()}
        impls_left = {impl for _, impl in remaining}
        oom = tuple(cell for cell in self.pruning.oom if cell.impl in impls_left)
        return Measure(groups=tuple(groups), oom=oom, **settings)

    def _ask(self, request: messages.Request, kind: type[E], *, again: bool = True) -> E:
        try:
            worker = self.worker()
            worker.send(request)
            return self._answer(worker, self._wait(worker), kind)
        except EndedEarlyError:  # somebody may have killed it
            if not again:
                raise
        self.renew()
        return self._ask(request, kind, again=False)

    def _answer(self, worker: Worker, event: messages.Event, kind: type[E]) -> E:
        """The event as of this kind, after which the worker is done."""
        if not isinstance(event, kind) or not isinstance(self._wait(worker), messages.Done):
            raise WorkerError(_UNREADABLE)
        return event

    def _wait(self, worker: Worker) -> messages.Event:
        """The next event, for which a worker is waited for as long as its heartbeat moves.

        `supports` of some kernels takes half a second, to build a plan, for each of many cases.
        """
        patience_s = max(_START_TIMEOUT_S, self.settings.timeout_s)
        while True:
            sign = worker.heartbeat.read()
            try:
                event = worker.event(patience_s)
                break
            except TimeoutError as err:
                if worker.heartbeat.read().step == sign.step:
                    silent = f"no heartbeat for {patience_s:g} s (--timeout)"
                    raise WorkerError(f"{sign.stage}: {silent}") from err
            except GarbledError as err:
                raise WorkerError(_UNREADABLE) from err
        if event is None:
            raise _ended_early(worker)
        if isinstance(event, messages.Failed):
            raise (UsageError if event.usage else WorkerError)(event.message)
        return event

    def worker(self) -> Worker:
        """The worker that is kept, or a fresh one."""
        begin, tries = time.perf_counter(), itertools.count(1)
        while self._idle is None:
            try:
                self._idle = self._started()
                self.start_up_s += time.perf_counter() - begin
            except EndedEarlyError:  # somebody may have killed it, or its server
                self.renew()
                if next(tries) == _STARTS:
                    raise
        return self._idle

    def _started(self) -> Worker:
        try:
            self.start()
            worker = Worker(self.settings, self._device, self._server)
        except TimeoutError as err:  # its server was ended for that: another one may do it
            raise EndedEarlyError(f"a worker cannot be started ({err})") from err
        except ConnectionError as err:
            assert self._server is not None, "there is nobody else to connect to"
            raise _ended_early(self._server) from err
        except OSError as err:
            raise WorkerError(f"a worker cannot be started ({err})") from err
        ready = self._wait(worker)
        if not isinstance(ready, messages.Ready):
            raise WorkerError(_UNREADABLE)
        self.warnings, self.own = list(ready.warnings), ready.own
        return worker


def _crossed(cells: Iterable[Cell]) -> tuple[dict[str, Case], tuple[str, ...]]:
    cells = list(cells)
    cases = {cell.case.case_id: cell.case for cell in cells}
    return cases, tuple({cell.impl for cell in cells})


def _by_cell(cases: dict[str, Case], found: dict[str, tuple[E, ...]]) -> dict[tuple[str, str], E]:
    """By the keys of cells what is known of each implementation, case by case."""
    return {
        (case_id, name): one
        for name, every in found.items()
        for case_id, one in zip(cases, every, strict=True)
    }


class EndedEarlyError(WorkerError):
    """A worker ended before it measured anything."""


def _ended_early(process: Worker | Server) -> EndedEarlyError:
    code, words = process.ended(), process.line.last_words()
    how = "it closed the pipe to us" if code is None else ending(code)
    return EndedEarlyError(
        f"a worker ended before it measured anything ({how})"
        + (f": {words}" if words else f"; it was started with {sys.executable}")
    )
