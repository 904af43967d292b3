"""Cells measured and checked by worker processes; what a worker's death costs."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import (
    CAN_FORK,
    GARBLED,
    GarbledError,
    Server,
    Settings,
    Worker,
    ending,
)
from attnbench.planning.plan import Job
from attnbench.schema import messages
from attnbench.schema.case import Case
from attnbench.schema.messages import (
    NOBODY,
    CellMeasured,
    Check,
    Heartbeat,
    ItemChecked,
    Measure,
    Result,
    Sign,
)
from attnbench.schema.record import Cell, Record, Status

Key = tuple[int, str]  # index of a case or item in the caller's list, implementation
Watch = Callable[[Case | None, str | None, str], None]  # with what a worker is at: its stage last
E = TypeVar("E")

_POLL_S = 0.5
_START_TIMEOUT_S = 120.0
_DEATHS_EACH = 3  # crashes after which a check says no more of an implementation
_UNREADABLE = (
    "a worker's answer cannot be read: an implementation's file, or its `supports`,"
    " writes to a file descriptor that it does not own"
)


class Death(NamedTuple):
    """What to record of the cells that a worker was at; not `surely`: another may be to blame."""

    status: Status
    reason: str
    surely: bool = True


@dataclass
class Supervision:
    """Cells (keys) to be worked off by workers, request after request until none is left.

    `request(keys)` makes the request for what is left. A worker that dies or hangs costs the cell
    it was at; if it was at none, a fresh one tries the rest once more. One whose events cannot be
    read, or that closed its pipe, is ended, too, and the cell that it was at is tried again alone:
    to blame if that fails as well. An implementation that ended `deaths_each` workers is not tried
    any further.
    """

    runner: LocalRunner
    cases: list[Case]
    request: Callable[[list[Key]], Measure | Check]
    deaths_each: int | None = None
    _may_retry: bool = True
    _deaths: Counter[str] = field(default_factory=Counter)

    def run(self, keys: list[Key]) -> Iterator[tuple[Key, Result | Death]]:
        """Yield a result or a Death for every key, each once."""
        open_keys = dict.fromkeys(keys)
        alone: list[Key] = []  # to be tried by themselves
        while open_keys:
            alone = [key for key in alone if key in open_keys]
            asked = alone[:1] or list(open_keys)
            worker = self.runner.worker()
            attempt = _Attempt(worker.heartbeat, asked)
            worker.send(self.request(asked))
            while isinstance(event := self._next(worker, attempt), Result):
                key = attempt.key(event.key)
                if key is not None and key in open_keys:
                    del open_keys[key]
                    self._may_retry = True  # it got somewhere
                    yield key, event
            left = [key for key in asked if key in open_keys]
            at = [key for key in attempt.at(attempt.sign()) if key in left]
            blamed = at or left
            if event is not None:
                self.runner.close()
                if not event.surely and len(asked) > 1:
                    alone = at or left
                    continue
                if left and not at and self._may_retry:
                    self._may_retry, blamed = False, []
            else:
                blamed = left
            for key in blamed:
                del open_keys[key]
                # A worker that ends well and forgets a cell is a defect of ours.
                yield key, event or Death("error", "the worker finished without a result")
            self._deaths.update({impl for _, impl in blamed})
            for key in list(open_keys):
                if self.deaths_each is not None and self._deaths[key[1]] >= self.deaths_each:
                    del open_keys[key]
                    yield key, Death("skipped", f"not tried: it ended {self.deaths_each} workers")

    def _next(self, worker: Worker, attempt: _Attempt) -> Result | Death | None:
        """The next result, None when the worker is done, or a Death if it ends before."""
        while True:
            try:
                event = worker.event(_POLL_S)
            except GarbledError:
                return attempt.garbled()
            except TimeoutError:
                sign = attempt.sign()
                at = attempt.at(sign)
                case = self.cases[at[0][0]] if at else None
                impl = at[0][1] if at and sign.impl != NOBODY else None
                self.runner.watch(case, impl, sign.stage)
                timeout_s = self.runner.settings.timeout_s
                if time.monotonic() - attempt.since > timeout_s:
                    silent = f"no heartbeat for {timeout_s:g} s (--timeout)"
                    return Death("timeout", f"{sign.stage}: {silent}")
                continue
            if event is None:
                return attempt.death(worker)
            if isinstance(event, messages.Done):
                return None
            if isinstance(event, Result) and attempt.key(event.key):
                return event
            return attempt.garbled()


class _Attempt:
    """A request, whose cases are numbered from 0, and the worker's heartbeat meanwhile."""

    def __init__(self, heartbeat: Heartbeat, asked: list[Key]) -> None:
        self._impls: dict[int, list[str]] = {}
        for index, impl in asked:
            self._impls.setdefault(index, []).append(impl)
        self._indices = list(self._impls)
        self._heartbeat, self._closed = heartbeat, False
        self._last, self.since = heartbeat.read(), time.monotonic()  # when it last moved
        self._oom_kills = _oom_kills()

    def key(self, local: Key) -> Key | None:
        """The caller's key; None where the request had no such cell."""
        place, impl = local
        if not 0 <= place < len(self._indices) or impl not in self._impls[self._indices[place]]:
            return None
        return self._indices[place], impl

    def at(self, sign: Sign) -> list[Key]:
        """The keys that a sign points at: one cell, or all of a case, or none.

        It may point nowhere: who writes to descriptors of others may hit its file.
        """
        if not 0 <= sign.case < len(self._indices):
            return []
        index = self._indices[sign.case]
        impls = self._impls[index]
        if sign.impl != NOBODY:
            impls = impls[sign.impl : sign.impl + 1] if sign.impl >= 0 else []
        return [(index, impl) for impl in impls]

    def sign(self) -> Sign:
        """What the worker is at; what it was at when its pipe closed, if it has."""
        if not self._closed:
            sign = self._heartbeat.read()
            if sign.step != self._last.step:
                self.since = time.monotonic()
            self._last = sign
        return self._last

    def garbled(self) -> Death:
        """An event that cannot be read may be the doing of a cell before this one."""
        return Death("error", f"{self.sign().stage}: {GARBLED}", surely=False)

    def death(self, worker: Worker) -> Death:
        """What an end says; Python ends with 1 where someone closed the pipe for a later result."""
        stage = self.sign().stage
        self._closed = True  # it may go on for a while without its pipe
        returncode = worker.ended()
        if returncode is None:
            return Death("crashed", f"{stage}: it closes the pipe of its worker", surely=False)
        if returncode == -signal.SIGKILL and self._oom_kills != _oom_kills():
            return Death("oom", f"{stage}: killed by the system for want of memory")
        reason = f"{stage}: the process ended, {ending(returncode)}"
        return Death("crashed", reason, surely=returncode != 1)


def _oom_kills() -> str | None:
    """The line in which Linux counts the processes that it has killed for want of memory."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((line for line in lines if line.startswith("oom_kill ")), None)
    return None


class LocalRunner(contextlib.AbstractContextManager["LocalRunner"]):
    """Runs groups in worker processes on this machine: the interface is `run(groups)`.

    `watch(case, impl, stage)` is called with what the worker is at, a few times a second.
    `start_up_s` are the wall seconds spent so far on starting workers; `own` are the names that
    each of the user's files registered.
    """

    def __init__(self, settings: Settings, watch: Watch = lambda case, impl, stage: None) -> None:
        self.settings = settings
        self.start_up_s = 0.0
        self.warnings: list[str] = []
        self.own: tuple[tuple[str, ...], ...] = ()
        self.watch = watch
        self._device = settings.device
        self._idle: Worker | None = None
        self._server: Server | None = None

    def start(self) -> None:
        """Begin to import what workers need, in the background, unless that is done.

        Workers are then forked: each is a fresh process all the same.
        """
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
        """Names, capabilities and the machine; fixes the device where it was `auto`.

        Raises:
            UsageError: the device is not there, or a user's file does not load.
        """
        catalogue = self._ask(messages.Describe(self._device), messages.Catalogue)
        self._device = catalogue.device
        if reason := catalogue.devices.get(self._device):
            raise UsageError(reason)
        return catalogue

    def reasons(
        self, cases: Sequence[Case], names: Sequence[str]
    ) -> dict[tuple[str, str], str | None]:
        """Why an implementation cannot take a case, by (case_id, implementation)."""
        asked = messages.AskReasons(tuple(cases), tuple(names))
        reasons = self._ask(asked, messages.Reasons).reasons
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
            supervised = Supervision(self, cases, partial(self._measure_request, job))
            for (index, impl), result in supervised.run(keys):
                if isinstance(result, Death):
                    cell = Cell(case=cases[index], impl=impl)
                    yield Record(cell=cell, status=result.status, reason=result.reason)
                elif isinstance(result, CellMeasured):
                    yield result.record
            self.close()  # the next job gets a fresh process

    def check(self, items: Sequence[messages.CheckItem]) -> Iterator[tuple[int, ItemChecked]]:
        """Check items of the battery; yield each index with its result."""

        def request(remaining: list[Key]) -> Check:
            return Check(tuple(items[i] for i, _ in remaining), self.settings.seed)

        supervised = Supervision(self, [item.case for item in items], request, _DEATHS_EACH)
        for (index, impl), result in supervised.run([(i, x.impl) for i, x in enumerate(items)]):
            if isinstance(result, Death):
                yield index, ItemChecked(index, impl, result.status, result.reason)
            elif isinstance(result, ItemChecked):
                yield index, result

    def ceilings(self, dtypes: Sequence[str], threads: int) -> dict[str, Any]:
        """What the device can do at most, as measured now; see `ceilings.measure_ceilings`."""
        asked = messages.MeasureCeilings(self._device, tuple(dtypes), threads)
        return self._ask(asked, messages.Facts).facts

    def diagnose(self, began: Callable[[str], None] = lambda test: None) -> dict[str, Any]:
        """Facts of the machine and the self-tests of measuring on it; see `worker.diagnosis`.

        `began` is called with the name of each test before it runs.
        """
        worker = self.worker()
        worker.send(messages.Diagnose(self._device))
        while isinstance(event := self._wait(worker), messages.Testing):
            began(event.test)
        return self._answer(worker, event, messages.Facts).facts

    def close(self) -> None:
        """End the worker that is kept for the next request, if any."""
        if self._idle is not None:
            self._idle.__exit__()
            self._idle = None

    def __exit__(self, *_: object) -> None:
        self.renew()

    def _measure_request(self, job: Job, remaining: list[Key]) -> Measure:
        """What remains of a job, in its groups."""
        wanted, numbers, groups = set(remaining), itertools.count(), []
        for group in job.groups:
            left = []
            for (case, impls), number in zip(group, numbers, strict=False):
                names = tuple(impl for impl in impls if (number, impl) in wanted)
                left += [(case, names)] if names else []
            groups += [tuple(left)] if left else []
        fields = set(Measure.__struct_fields__) - {"groups"}
        settings = {name: getattr(self.settings, name) for name in fields}
        return Measure(groups=tuple(groups), **settings)

    def _ask(self, request: messages.Request, kind: type[E]) -> E:
        worker = self.worker()
        worker.send(request)
        return self._answer(worker, self._wait(worker), kind)

    def _answer(self, worker: Worker, event: messages.Event, kind: type[E]) -> E:
        """The event as of this kind, after which the worker is done."""
        if not isinstance(event, kind) or not isinstance(self._wait(worker), messages.Done):
            raise WorkerError(_UNREADABLE)
        return event

    def _wait(self, worker: Worker) -> messages.Event:
        try:
            event = worker.event(_START_TIMEOUT_S)
        except TimeoutError as err:
            raise WorkerError(f"a worker has not answered for {_START_TIMEOUT_S:.0f} s") from err
        except GarbledError as err:
            raise WorkerError(_UNREADABLE) from err
        if event is None:
            raise _ended_early(worker)
        if isinstance(event, messages.Failed):
            raise (UsageError if event.usage else WorkerError)(event.message)
        return event

    def worker(self) -> Worker:
        """The worker that is kept, or a fresh one."""
        if self._idle is None:
            begin = time.perf_counter()
            try:
                self.start()
                self._idle = Worker(self.settings, self._device, self._server)
            except ConnectionError as err:
                assert self._server is not None, "there is nobody else to connect to"
                raise _ended_early(self._server) from err
            except OSError as err:
                raise WorkerError(f"a worker cannot be started ({err})") from err
            ready = self._wait(self._idle)
            if not isinstance(ready, messages.Ready):
                raise WorkerError(_UNREADABLE)
            self.warnings, self.own = list(ready.warnings), ready.own
            self.start_up_s += time.perf_counter() - begin
        return self._idle


def _ended_early(process: Worker | Server) -> WorkerError:
    code, words = process.ended(), process.line.last_words()
    how = "it closed the pipe to us" if code is None else ending(code)
    return WorkerError(
        f"a worker ended before it measured anything ({how})"
        + (f": {words}" if words else f"; it was started with {sys.executable}")
    )
