"""Runs groups of cells in worker processes on this machine; `run(groups) -> records`."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import GARBLED, GarbledError, Settings, Worker, ending
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.messages import (
    NOBODY,
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
    Heartbeat,
    ItemChecked,
    Measure,
    MeasureCeilings,
    Ready,
    Reasons,
    Request,
    Result,
    Sign,
    Testing,
)  # fmt: skip
from attnbench.schema.record import Cell, Record, Status

Key = tuple[int, str]  # index of a case or item in the caller's list, implementation
_POLL_S = 0.5


@dataclass(frozen=True)
class Death:
    """What to record of the cells that a worker was at when it ended.

    `surely` is False where another cell may be to blame.
    """

    status: Status
    reason: str
    surely: bool = True


class Supervision:
    """Cells (keys) to be worked off by workers, request after request until none is left.

    `worker()` gives a live worker, `discard()` ends it; `request(keys)` makes the request for
    what is left; `watch(case, impl, stage)` is called with
    what the worker is at. A worker that dies or hangs costs the cell it was at. If it was at none,
    a fresh one tries the rest once more. One whose events cannot be read, or that closed its pipe,
    is ended, too; the cell that it was at by then is tried again alone, in a fresh one, and is to
    blame if that fails as well. An implementation that ended `deaths_each` workers is not tried
    any further, where that is given.
    """

    def __init__(
        self,
        cases: list[Case],
        *,
        worker: Callable[[], Worker],
        discard: Callable[[], None],
        request: Callable[[list[Key]], Measure | Check],
        watch: Callable[[Case | None, str | None, str], None],
        timeout_s: float,
        deaths_each: int | None = None,
    ) -> None:
        self._cases, self._timeout_s = cases, timeout_s
        self._worker, self._discard = worker, discard
        self._request, self._told = request, watch
        self._may_retry = True
        self._deaths_each, self._deaths = deaths_each, Counter[str]()

    def run(self, keys: list[Key]) -> Iterator[tuple[Key, Result | Death]]:
        """Yield a result or a Death for every key, each once."""
        open_keys = dict.fromkeys(keys)
        alone: list[Key] = []  # to be tried by themselves
        while open_keys:
            alone = [key for key in alone if key in open_keys]
            asked = alone[:1] or list(open_keys)
            worker = self._worker()
            local = _LocalKeys(asked)
            watch = _Watch(worker.heartbeat, self._timeout_s)
            worker.send(self._request(asked))
            death: Death | None = None
            for key, result in self._results(worker, local, watch):
                if isinstance(result, Death):
                    death = result
                elif key in open_keys:
                    del open_keys[key]
                    self._may_retry = True  # it got somewhere
                    yield key, result
            left = [key for key in asked if key in open_keys]
            at = [key for key in local.at(watch.read()) if key in left]
            if death is not None:
                self._discard()
                if not death.surely and len(asked) > 1:
                    alone = at or left
                    continue
            blamed = self._blamed(death, at, left)
            for key in blamed:
                del open_keys[key]
                # A worker that ends well and forgets a cell is a defect of ours.
                yield key, death or Death("error", "the worker finished without a result")
            self._deaths.update({impl for _, impl in blamed})
            for key in list(open_keys):
                if self._deaths_each is not None and self._deaths[key[1]] >= self._deaths_each:
                    del open_keys[key]
                    yield key, Death("skipped", f"not tried: it ended {self._deaths_each} workers")

    def _results(
        self, worker: Worker, local: _LocalKeys, watch: _Watch
    ) -> Iterator[tuple[Key, Result | Death]]:
        """Results as they come; a Death, under any key, if the worker ends before it is done."""
        oom_kills = _oom_kills()
        nobody: Key = (NOBODY, "")
        while True:
            try:
                event = worker.event(_POLL_S)
                if isinstance(event, Result):
                    yield local.key(event.key), event
                    continue
                if event is not None and not isinstance(event, Done):
                    raise GarbledError
            except GarbledError:
                sign = watch.read()
                yield nobody, Death("error", f"{sign.stage}: {GARBLED}", surely=False)
                return
            except TimeoutError:
                sign = watch.read()
                self._told(*local.named(sign, self._cases), sign.stage)
                if watch.overdue():
                    yield nobody, Death("timeout", watch.reason())
                    return
                continue
            if event is None:
                watch.stop()
                yield nobody, _death(worker.ended(), watch.read(), oom_kills)
                return
            return  # done

    def _blamed(self, death: Death | None, at: list[Key], left: list[Key]) -> list[Key]:
        """Which of the cells that are left a worker's end costs."""
        if death is None:
            return left
        if at or not left or not self._may_retry:
            return at or left
        self._may_retry = False
        return []


class _LocalKeys:
    """A request numbers its cases from 0; this maps those numbers back to the caller's keys."""

    def __init__(self, remaining: list[Key]) -> None:
        self._impls: dict[int, list[str]] = {}
        for index, impl in remaining:
            self._impls.setdefault(index, []).append(impl)
        self._indices = list(self._impls)

    def key(self, local: Key) -> Key:
        """The caller's key; GarbledError where the request had no such cell."""
        place, impl = local
        if not 0 <= place < len(self._indices) or impl not in self._impls[self._indices[place]]:
            raise GarbledError
        return self._indices[place], impl

    def at(self, sign: Sign) -> list[Key]:
        """The keys that a sign points at: one cell, or all of a case, or none.

        None, too, where it points nowhere: who writes to descriptors of others may hit its file.
        """
        if not 0 <= sign.case < len(self._indices):
            return []
        index = self._indices[sign.case]
        impls = self._impls[index]
        if sign.impl != NOBODY:
            impls = impls[sign.impl : sign.impl + 1] if sign.impl >= 0 else []
        return [(index, impl) for impl in impls]

    def named(self, sign: Sign, cases: list[Case]) -> tuple[Case | None, str | None]:
        keys = self.at(sign)
        if not keys:
            return None, None
        return cases[keys[0][0]], None if sign.impl == NOBODY else keys[0][1]


@dataclass
class _Watch:
    """Notices a heartbeat that has not moved for too long."""

    heartbeat: Heartbeat
    timeout_s: float
    _last: Sign | None = None
    _kept: Sign | None = None
    _since: float = field(default_factory=time.monotonic)

    def stop(self) -> None:
        """Keep the sign as it is now: the worker may go on for a while without its pipe."""
        self._kept = self.read()

    def read(self) -> Sign:
        if self._kept is not None:
            return self._kept
        sign = self.heartbeat.read()
        if self._last is None or sign.step != self._last.step:
            self._last, self._since = sign, time.monotonic()
        return sign

    def overdue(self) -> bool:
        return time.monotonic() - self._since > self.timeout_s

    def reason(self) -> str:
        stage = self._last.stage if self._last else "start-up"
        return f"{stage}: no sign of life for {self.timeout_s:g} s (--timeout)"


def _death(returncode: int | None, sign: Sign, oom_kills: int | None) -> Death:
    """What an end says; one by an exception of ours may be the doing of a cell before this one.

    Python ends with 1 then, as where someone closed the pipe that a later result was for.
    """
    if returncode is None:
        return Death("crashed", f"{sign.stage}: it closes the pipe of its worker", surely=False)
    now = _oom_kills()
    killed = returncode == -signal.SIGKILL
    if killed and oom_kills is not None and now is not None and now > oom_kills:
        return Death("oom", f"{sign.stage}: killed by the system for want of memory")
    reason = f"{sign.stage}: the process ended, {ending(returncode)}"
    return Death("crashed", reason, surely=returncode != 1)


def _oom_kills() -> int | None:
    """How many processes Linux has killed for want of memory since it started."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


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
