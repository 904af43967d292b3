"""attnbench's own engine as a tool, without checks and probes: one process, all cells in turns.

Usage: python -m tests.validation.timer.tools.ours JOB, where JOB is JSON; see `job.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from attnbench.machine.state import settle
from attnbench.measure.engine import Measurement
from attnbench.measure.sampling import StoppingRule, Target
from attnbench.schema.messages import Measure
from attnbench.worker.measuring import Instruments
from tests.validation.timer.tools.job import Job, described

# Of what is left after warming up: the rest goes by between turns, where counters are read.
ROOM = 0.97
_LEAST_S = 0.01


@dataclass(frozen=True, kw_only=True)
class ShareRule(StoppingRule):
    """Never satisfied: a cell goes on until its share of what warming up has left is spent.

    The fewest samples are waived once nothing is `left_s` of the whole budget.
    """

    share_s: Callable[[], float]
    left_s: Callable[[], float]

    def done(self, times_us: list[float], spent_s: float) -> bool:
        """Decide from the seconds spent in samples."""
        enough = len(times_us) >= self.min_samples or (bool(times_us) and not self.left_s())
        return enough and spent_s >= self.share_s()


class Account:
    """Seconds that each cell has cost so far, warming up included; told of each turn as it begins.

    `ended_s[name]` has one entry for each sample: the seconds spent on the cell when it ended.
    `share_s` is how long each may sample: known once the first turn after warming up begins.
    """

    def __init__(
        self, names: list[str], left_s: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self.ended_s: dict[str, list[float]] = {name: [] for name in names}
        self.share_s = 0.0
        self._spent = dict.fromkeys(names, 0.0)
        self._left_s, self._now = left_s, now
        self._turn: tuple[str, str] | None = None
        self._begin = 0.0

    def turn(self, name: str, stage: str) -> None:
        """The turn of `name` begins: `warm-up` or `samples`; the one before has ended."""
        self.close()
        if stage == "samples" and not self.share_s:
            self.share_s = max(_LEAST_S, ROOM * self._left_s() / len(self._spent))
        self._turn, self._begin = (name, stage), self._now()

    def close(self) -> None:
        """The last turn has ended."""
        if self._turn is None:
            return
        name, stage = self._turn
        self._spent[name] += self._now() - self._begin
        if stage == "samples":
            self.ended_s[name].append(self._spent[name])
        self._turn = None


def measure(job: Job) -> Instruments:
    """Race all cells until the budget is spent; what was found goes into the job."""
    settle(job.threads)
    calls = job.prepare()
    settle()
    each_s = max(_LEAST_S, job.left_s() / len(calls))
    request = Measure(
        groups=(), seed=job.seed, precision=1e-9, min_time_s=each_s, max_time_s=each_s
    )
    setup = Instruments.of(request, job.device)
    account = Account(list(calls), job.left_s, time.monotonic)
    rule = ShareRule(**asdict(setup.rule), share_s=lambda: account.share_s, left_s=job.left_s)
    targets = {name: Target(call=call) for name, call in calls.items()}

    def before_sample(name: str, stage: str) -> None:
        account.turn(name, stage)
        settle()  # as a worker does

    Measurement(targets, setup.clock, rule, setup.watch, before_sample).run(job.seed)
    account.close()
    job.found = {name: _found(targets[name], account.ended_s[name]) for name in calls}
    return setup


def _found(target: Target, ended_s: list[float]) -> dict[str, Any]:
    if target.error is not None:
        return {"error": described(target.error)}
    samples = target.samples
    return {
        "times_us": [sample.time_us for sample in samples],
        "ended_s": ended_s,
        "turns_us": [sample.blocks_us or (sample.time_us,) for sample in samples],
        "calls": target.calls,
        "window": target.window,
        "dropped": {i: s.discarded for i, s in enumerate(samples) if s.discarded is not None},
    }


def main() -> None:
    """Serve one job."""
    job = Job.from_text(sys.argv[1])
    setup = measure(job)
    job.write(l2=setup.clock.l2, timer=setup.clock.timer)


if __name__ == "__main__":
    main()
