"""Runs groups of cells in worker processes on this machine; `run(groups) -> records`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from attnbench.errors import ExitCode, UsageError, WorkerError
from attnbench.execution.process import GarbledError, Worker, ending
from attnbench.execution.settings import Settings
from attnbench.execution.supervision import Death, Key, Supervision
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record

_START_TIMEOUT_S = 120.0
_DEATHS_EACH = 3  # crashes after which a check says no more of an implementation


@dataclass
class Spent:
    """Wall seconds outside the cells: starting processes and loading what they need."""

    start_up_s: float = 0.0
    processes: int = 0


class LocalRunner:
    """Runs groups in worker processes on this machine: the interface is `run(groups)`.

    `watch(case, impl, stage)` is told what the worker is at, a few times a second.
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

    def catalogue(self) -> dict[str, Any]:
        """Names, capabilities and the machine; fixes the device where it was `auto`.

        Raises:
            UsageError: the device is not there, or a user's file does not load.
        """
        catalogue: dict[str, Any] = self._ask({"do": "describe", "device": self._device})[
            "catalogue"
        ]
        self._device = catalogue["device"]
        reason = catalogue["devices"].get(self._device)
        if reason:
            raise UsageError(reason)
        return catalogue

    def reasons(self, cases: list[Case], names: list[str]) -> dict[tuple[str, str], str | None]:
        """Why an implementation cannot take a case, by (case_id, implementation)."""
        rows = [case.to_json() for case in cases]
        answer = self._ask({"do": "reasons", "cases": rows, "names": names})["reasons"]
        return {
            (case.case_id, name): reason
            for name in names
            for case, reason in zip(cases, answer[name], strict=True)
        }

    def run(self, jobs: Iterable[Job]) -> Iterator[Record]:
        """Measure the groups and yield a record for every cell, whatever becomes of it."""
        for job in jobs:
            keys = [(i, impl) for i, (_, impls) in enumerate(job.cases) for impl in impls]
            cases = [case for case, _ in job.cases]
            request = partial(self._measure_request, cases, [len(group) for group in job.groups])
            supervised = self._supervised(cases, request, Record.from_line)
            for (index, impl), result in supervised.run(keys):
                if isinstance(result, Death):
                    cell = Cell(case=cases[index], impl=impl)
                    result = Record(cell=cell, status=result.status, reason=result.reason)
                yield result
            self.close()  # the next group gets a fresh process

    def check(self, items: list[tuple[Case, str, dict[str, Any]]]) -> Iterator[tuple[int, Any]]:
        """Check (case, implementation, draw) items; yield (index, result) for each."""

        def request(remaining: list[Key]) -> dict[str, Any]:
            rows = [
                {"case": items[i][0].to_json(), "impl": impl, "draw": items[i][2]}
                for i, impl in remaining
            ]
            return {"do": "check", "items": rows, "seed": self.settings.seed}

        keys = [(i, impl) for i, (_, impl, _) in enumerate(items)]
        cases = [case for case, *_ in items]
        supervised = self._supervised(cases, request, _check_result, _DEATHS_EACH)
        for (index, _), result in supervised.run(keys):
            if isinstance(result, Death):
                result = {"status": result.status, "reason": result.reason, "metrics": {}}
            yield index, result

    def ceilings(self, dtypes: list[str]) -> dict[str, Any]:
        """What the device can do at most, as measured now; see `ceilings.measure_ceilings`."""
        request = {"do": "ceilings", "device": self._device, "dtypes": dtypes}
        found: dict[str, Any] = self._ask(request)["ceilings"]
        return found

    def diagnose(self, tell: Callable[[str], None] = lambda test: None) -> dict[str, Any]:
        """Facts of the machine and the self-tests of measuring on it; see `worker.diagnosis`.

        `tell` hears the name of each test before it runs.
        """
        worker = self._worker()
        worker.send({"do": "diagnose", "device": self._device})
        while (event := self._wait(worker))["event"] == "testing":
            tell(event["test"])
        self._wait(worker)  # done
        diagnosis: dict[str, Any] = event["diagnosis"]
        return diagnosis

    def close(self) -> None:
        """End the worker that is kept for the next request, if any."""
        if self._idle is not None:
            self._idle.__exit__()
            self._idle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure_request(
        self, cases: list[Case], lengths: list[int], remaining: list[Key]
    ) -> dict[str, Any]:
        """What remains of a group, in its heats; `lengths` counts the cases of each heat."""
        rows: dict[int, list[str]] = {}
        for index, impl in remaining:
            rows.setdefault(index, []).append(impl)
        heats, first = [], 0
        for length in lengths:
            left = [i for i in range(first, first + length) if i in rows]
            heats.append([{"case": cases[i].to_json(), "impls": rows[i]} for i in left])
            first += length
        settings = self.settings
        return {
            "do": "measure",
            "heats": [heat for heat in heats if heat],
            "seed": settings.seed,
            "l2": settings.l2,
            "timer": settings.timer,
            "energy": settings.energy,
            "rule": {
                "precision": settings.precision,
                "min_time_s": settings.min_time_s,
                "max_time_s": settings.max_time_s,
            },
        }

    def _supervised(
        self,
        cases: list[Case],
        request: Callable[[list[Key]], dict[str, Any]],
        read: Callable[[Any], Any],
        deaths_each: int | None = None,
    ) -> Supervision:
        return Supervision(
            cases,
            worker=self._worker,
            discard=self.close,
            request=request,
            read=read,
            watch=self._watch,
            timeout_s=self.settings.timeout_s,
            deaths_each=deaths_each,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker()
        worker.send(request)
        answer = self._wait(worker)
        self._wait(worker)  # done
        return answer

    def _wait(self, worker: Worker) -> dict[str, Any]:
        try:
            event = worker.event(_START_TIMEOUT_S)
        except TimeoutError as err:
            raise WorkerError(f"a worker said nothing for {_START_TIMEOUT_S:.0f} s") from err
        except GarbledError as err:
            raise WorkerError(
                "a worker's answer cannot be read: an implementation's file, or its `supports`,"
                " writes to a file descriptor that it does not own"
            ) from err
        if event is None:
            code = worker.ended()
            how = "it closed the pipe to us" if code is None else ending(code)
            words = worker.last_words()
            raise WorkerError(
                f"a worker ended before it measured anything ({how})"
                + (f": {words}" if words else f"; it was started with {sys.executable}")
            )
        if event["event"] == "failed":
            error = UsageError if event["exit_code"] == ExitCode.USAGE else WorkerError
            raise error(event["message"])
        return event

    def _worker(self) -> Worker:
        if self._idle is None:
            begin = time.perf_counter()
            try:
                self._idle = Worker(self.settings, self._device)
            except OSError as err:
                raise WorkerError(f"a worker cannot be started ({err})") from err
            ready = self._wait(self._idle)
            self._idle.settled()
            self.warnings, self.user_names = ready["warnings"], ready["user_names"]
            self.spent.start_up_s += time.perf_counter() - begin
            self.spent.processes += 1
        return self._idle


def _check_result(result: Any) -> dict[str, Any]:
    """What a worker found out about one item of the battery, as it was written."""
    return {
        "status": result["status"],
        "reason": result["reason"],
        "metrics": {**result["metrics"]},
    }
