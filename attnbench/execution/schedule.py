"""What is measured next, in the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from attnbench.execution.advising import racing
from attnbench.planning.forecast import Forecast, balanced
from attnbench.planning.plan import Job, Plan, jobs_of
from attnbench.schema.record import Record


class Schedule:
    """The jobs of a plan: as planned, balanced within a total time, or racing for advice.

    `until` is when the time is over, by `time.perf_counter`, None without a limit; `counts` says of
    a race how often a step makes each call. `declined` are the cases that there was no time for,
    by their ids, with the seconds that they would take.
    """

    def __init__(
        self, plan: Plan, forecast: Forecast | None, until: float | None,
        counts: Mapping[str, int] | None,
    ) -> None:  # fmt: skip
        self._plan, self._forecast, self._until, self._counts = plan, forecast, until, counts
        self._failed: set[tuple[str, str]] = set()
        self.records: list[Record] = []
        self.declined: dict[str, float] = {}

    def jobs(self) -> Iterator[Job]:
        """One after another, each when a place is free for it; later ones know earlier records."""
        for process, cells in enumerate(self._plan.passes):
            left = (cell for cell in cells if cell.key not in self._failed)
            jobs = jobs_of(left, joined=self._plan.joined)
            if self._forecast is not None and self._until is not None:
                left_s = partial(_left_s, self._until)
                if self._counts is None:
                    jobs = balanced(jobs, self._forecast, left_s)
                else:
                    more = self._counts, self.declined, self.records
                    jobs = racing(jobs, self._forecast, left_s, *more)
            for job in jobs:
                yield replace(job, process=max(process, job.process))

    def learn(self, record: Record) -> bool:
        """Take a record in; False where it adds nothing to what a race knows of the cell."""
        late = record.status in ("skipped", "timeout")
        if self._counts is not None and record.process and late:
            return False  # no time for it once more: what the first process measured stands
        self.records.append(record)
        if self._forecast is not None:
            self._forecast.learn(record)
        if record.status != "ok":
            self._failed.add(record.cell.key)  # it stays failed: no need to wait for it again
        return True


def _left_s(until: float) -> float:
    return until - time.perf_counter()
