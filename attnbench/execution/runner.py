"""Runs groups of cells in worker processes on this machine; `run(groups) -> records`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import GarbledError, Worker, ending
from attnbench.execution.settings import Settings
from attnbench.execution.supervision import Death, Key, Supervision
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.messages import (
    AskReasons,
    Catalogue,
    Ceilings,
    CellMeasured,
    Check,
    CheckItem,
    Describe,
    Described,
    Diagnose,
    Diagnosis,
    Done,
    Event,
    Failed,
    ItemChecked,
    Measure,
    MeasureCeilings,
    Ready,
    Reasons,
    Request,
    Testing,
)  # fmt: skip
from attnbench.schema.record import Cell, Record

_START_TIMEOUT_S = 120.0
_UNREADABLE = (
    "a worker's answer cannot be read: an implementation's file, or its `supports`,"
    " writes to a file descriptor that it does not own"
)
E = TypeVar("E")
_DEATHS_EACH = 3  # crashes after which a check says no more of an implementation


@dataclass
class Spent:
    """Wall seconds outside the cells: starting processes and loading what they need."""

    start_up_s: float = 0.0
    processes: int = 0


class LocalRunner:
    """Runs groups in worker processes on this machine: the interface is `run(groups)`.

    `watch(case, impl, stage)` is called with what the worker is at, a few times a second.
    """

    def __init__(
        self,
        settings: Settings,
        watch: Callable[[Case | None, str | None, str], None] = lambda case, impl, stage: None,
    ) -> None:
        self.settings = settings
        self.spent = Spent()
        self.warnings: list[str] = []
        self.user_names: list[str] = []
        self._watch = watch
        self._device = settings.device
        self._idle: Worker | None = None

    def catalogue(self) -> Catalogue:
        """Names, capabilities and the machine; fixes the device where it was `auto`.

        Raises:
            UsageError: the device is not there, or a user's file does not load.
        """
        catalogue = self._ask(Describe(self._device), Described).catalogue
        self._device = catalogue.device
        reason = catalogue.devices.get(self._device)
        if reason:
            raise UsageError(reason)
        return catalogue

    def reasons(
        self, cases: Sequence[Case], names: Sequence[str]
    ) -> dict[tuple[str, str], str | None]:
        """Why an implementation cannot take a case, by (case_id, implementation)."""
        reasons = self._ask(AskReasons(tuple(cases), tuple(names)), Reasons).reasons
        return {
            (case.case_id, name): reason
            for name in names
            for case, reason in zip(cases, reasons[name], strict=True)
        }

    def run(self, jobs: Iterable[Job]) -> Iterator[Record]:
        """Measure the jobs and yield a record for every cell, whatever becomes of it."""
        for job in jobs:
            keys = [(i, impl) for i, (_, impls) in enumerate(job.cases) for impl in impls]
            cases = [case for case, _ in job.cases]
            supervised = self._supervised(cases, partial(self._measure_request, job))
            for (index, impl), result in supervised.run(keys):
                if isinstance(result, Death):
                    cell = Cell(case=cases[index], impl=impl)
                    yield Record(cell=cell, status=result.status, reason=result.reason)
                elif isinstance(result, CellMeasured):
                    yield result.record
            self.close()  # the next job gets a fresh process

    def check(self, items: Sequence[CheckItem]) -> Iterator[tuple[int, ItemChecked]]:
        """Check items of the battery; yield each index with its result."""

        def request(remaining: list[Key]) -> Check:
            return Check(tuple(items[i] for i, _ in remaining), self.settings.seed)

        supervised = self._supervised([item.case for item in items], request, _DEATHS_EACH)
        for (index, impl), result in supervised.run([(i, x.impl) for i, x in enumerate(items)]):
            if isinstance(result, Death):
                yield index, ItemChecked(index, impl, result.status, result.reason)
            elif isinstance(result, ItemChecked):
                yield index, result

    def ceilings(self, dtypes: Sequence[str]) -> dict[str, Any]:
        """What the device can do at most, as measured now; see `ceilings.measure_ceilings`."""
        return self._ask(MeasureCeilings(self._device, tuple(dtypes)), Ceilings).ceilings

    def diagnose(self, began: Callable[[str], None] = lambda test: None) -> dict[str, Any]:
        """Facts of the machine and the self-tests of measuring on it; see `worker.diagnosis`.

        `began` is called with the name of each test before it runs.
        """
        worker = self._worker()
        worker.send(Diagnose(self._device))
        while isinstance(event := self._wait(worker), Testing):
            began(event.test)
        return self._answer(worker, event, Diagnosis).diagnosis

    def close(self) -> None:
        """End the worker that is kept for the next request, if any."""
        if self._idle is not None:
            self._idle.__exit__()
            self._idle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure_request(self, job: Job, remaining: list[Key]) -> Measure:
        """What remains of a job, in its groups."""
        impls: dict[int, list[str]] = {}
        for index, impl in remaining:
            impls.setdefault(index, []).append(impl)
        number, groups = 0, []
        for group in job.groups:
            places = enumerate(group, start=number)
            left = [(case, tuple(impls[i])) for i, (case, _) in places if i in impls]
            groups += [tuple(left)] if left else []
            number += len(group)
        settings = self.settings
        return Measure(
            groups=tuple(groups),
            seed=settings.seed,
            precision=settings.precision,
            min_time_s=settings.min_time_s,
            max_time_s=settings.max_time_s,
            l2=settings.l2,
            timer=settings.timer,
            energy=settings.energy,
        )

    def _supervised(
        self,
        cases: list[Case],
        request: Callable[[list[Key]], Measure | Check],
        deaths_each: int | None = None,
    ) -> Supervision:
        return Supervision(
            cases,
            worker=self._worker,
            discard=self.close,
            request=request,
            watch=self._watch,
            timeout_s=self.settings.timeout_s,
            deaths_each=deaths_each,
        )

    def _ask(self, request: Request, kind: type[E]) -> E:
        worker = self._worker()
        worker.send(request)
        return self._answer(worker, self._wait(worker), kind)

    def _answer(self, worker: Worker, event: Event, kind: type[E]) -> E:
        """The event as of this kind, after which the worker is done."""
        if not isinstance(event, kind) or not isinstance(self._wait(worker), Done):
            raise WorkerError(_UNREADABLE)
        return event

    def _wait(self, worker: Worker) -> Event:
        try:
            event = worker.event(_START_TIMEOUT_S)
        except TimeoutError as err:
            raise WorkerError(f"a worker has not answered for {_START_TIMEOUT_S:.0f} s") from err
        except GarbledError as err:
            raise WorkerError(_UNREADABLE) from err
        if event is None:
            code = worker.ended()
            how = "it closed the pipe to us" if code is None else ending(code)
            words = worker.last_words()
            raise WorkerError(
                f"a worker ended before it measured anything ({how})"
                + (f": {words}" if words else f"; it was started with {sys.executable}")
            )
        if isinstance(event, Failed):
            raise (UsageError if event.usage else WorkerError)(event.message)
        return event

    def _worker(self) -> Worker:
        if self._idle is None:
            begin = time.perf_counter()
            try:
                self._idle = Worker(self.settings, self._device)
            except OSError as err:
                raise WorkerError(f"a worker cannot be started ({err})") from err
            ready = self._wait(self._idle)
            if not isinstance(ready, Ready):
                raise WorkerError(_UNREADABLE)
            self._idle.settled()
            self.warnings, self.user_names = list(ready.warnings), list(ready.user_names)
            self.spent.start_up_s += time.perf_counter() - begin
            self.spent.processes += 1
        return self._idle
