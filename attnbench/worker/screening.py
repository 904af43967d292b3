"""Which implementations of a call are worth timing in a race, by a call or two of each."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from attnbench.base import units
from attnbench.measure import probes
from attnbench.measure.race import Race
from attnbench.schema.case import Case
from attnbench.worker.catalogue import is_built_in
from attnbench.worker.drawn import divided
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import DroppedError
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS

SLOWER = 3.0  # a second call of so many times the default's: dropped
OTHERS = 2  # beside the default, for which there is all the time of a race
TRIED = 0.75  # of the time for timing, in which still others are tried
BRIEF = 0.01  # of that time: a call that takes longer is made as seldom as possible
FIRST_S = 0.5  # unless it is shorter than this: a first one may start threads or load libraries
ROUNDS = 2  # for which there is to be time, where more than these others are tried
CHECKS = 0.1  # of all the time, for references of checks
SHORT_S, SHORT_CALLS = 0.02, 3  # a call so short is made so often before it is called slow
COMPILE_S = 20.0  # of one implementation, on a CPU
LIMIT = 10.0, 30.0  # a call may take so many times the default's, and so many seconds more
SMALL = 256  # keys of the case in which ops are compared where a call takes long


@dataclass
class Screening:
    """What calls of a group's cases took so far, and what there is still time for.

    In each case the default comes first (`Race.kept`), then kernels of the user's, then the others
    by the FLOPs and the memory they need, and last what compiles.
    """

    race: Race
    call_s: dict[tuple[Case, str], float] = field(default_factory=dict)
    _ops: dict[tuple[Case, tuple[str, ...]], str] = field(default_factory=dict)

    def ordered(self, trials: dict[str, Trial]) -> dict[str, Trial]:
        """The trials of a case in the order in which they are tried."""

        def place(name: str) -> tuple[bool | float, ...]:
            trial, needs = trials[name], [math.inf]
            with contextlib.suppress(Exception):  # an author's formula: the probe says so
                costs = trial.costs()
                needs = [costs[of] or math.inf for of in ("flops_executed", "memory_bound_bytes")]
            given = is_built_in(trial.impl.file), trial.impl.compiles
            return (not self._kept(trial), *given, *needs)

        return {name: trials[name] for name in sorted(trials, key=place)}

    def admit(self, trial: Trial) -> None:
        """To be called before anything of it runs.

        Raises:
            DroppedError: there is no time to call it.
        """
        trial.brief_s = max(FIRST_S, BRIEF * self.race.timing_s)
        call_s = self._default_s(trial.case)
        self.race.call_limit_s = math.inf
        if not self._kept(trial):  # if it does not return, others go on: they need time, too
            self.race.call_limit_s = min(LIMIT[0] * call_s + LIMIT[1], self.race.left_s / 2)
        more = self._more(trial)
        until_s = TRIED * self.race.timing_s if more else self.race.limit_s
        if self._until_s(call_s * more + COMPILE_S * trial.impl.compiles, more=more) > until_s:
            compiling = f", and compiling it takes some {COMPILE_S:g} s" * trial.impl.compiles
            reason = f"not tried: --budget has no time left for it{compiling}"
            raise DroppedError(reason, dropped="budget")

    def begin(self) -> None:
        """To be called before the inputs of a case are made.

        Raises:
            DroppedError: there is no time for another case.
        """
        takes_s = ROUNDS * max(self.call_s.values(), default=0.0)
        if self.call_s and self._until_s(takes_s, more=True) > TRIED * self.race.timing_s:
            reason = "not tried: --budget has no time left for it"
            raise DroppedError(reason, dropped="budget")

    def compare(self, trial: Trial) -> None:
        """To be called once it is built; of the default, to which others are compared, once called.

        Where calls take long, the ops of a smaller case are compared. What no op of torch has
        computed, such as the result of a kernel of Triton, is not compared.

        Raises:
            DroppedError: it dispatches the ops of another one, on tensors of the same shapes,
                strides and dtypes.
        """
        default = self._kept(trial) and (trial.case, trial.impl.name) not in self.call_s
        if default or trial.impl.compiles or trial.bound is None:
            return
        case, call, where, ops = trial.case, trial.bound.call, "", tuple[str, ...]()
        with contextlib.suppress(Exception):  # the check says so, if it comes up again
            if self._default_s(case) > trial.brief_s:
                case = divided(case, max(1, case.kv_len // SMALL))
                workload, where = WORKLOADS.get(case.workload), f" at S = {case.kv_len}"
                workload.fill(case, tensors := workload.tensors(case), Draw(seed=0))
                call = workload.bind(case, trial.impl, tensors).call
            ops = probes.dispatched_ops(call)
        name = trial.impl.name
        first = self._ops.setdefault((trial.case, ops), name) if ops else name
        if first != name:
            same = f"dispatches the same ops as {first}{where}, on tensors of the same layout"
            raise DroppedError(f"{same}: they are one candidate", dropped="same", same_as=first)

    def called(self, trial: Trial, *, first: bool) -> None:
        """To be called after a check of it.

        Raises:
            DroppedError: there is no time to call it again.
        """
        call_s, key = trial.last_call_s, (trial.case, trial.impl.name)
        self.call_s.pop(key, None)
        until_s = self._until_s(call_s, more=self._more(trial))
        if not first:  # a round; of the default at least, without which there is no answer
            others_s = 0.0 if self._kept(trial) else sum(self.call_s.values())
            until_s = self.race.elapsed_s + call_s + others_s
        if until_s > self.race.limit_s:
            reason = f"a call takes {units.time(1e6 * call_s)}: too long for this --budget"
            raise DroppedError(reason, dropped="budget", needs_s=until_s)
        self.call_s[key] = call_s
        if first and self._kept(trial):
            self.compare(trial)

    def slow(self, trials: dict[str, Trial]) -> Iterator[tuple[str, DroppedError]]:
        """Of the trials of a case those whose second call took far longer than the default's.

        Of three or more two stay in any case.
        """
        others = [trial for trial in trials.values() if not self._kept(trial)]
        for default in (trial for trial in trials.values() if self._kept(trial)):
            for trial in (other for other in others if other.calls > 1):
                times = self._least_s(trial) / self._least_s(default)
                faster = sum(other.last_call_s < trial.last_call_s for other in others)
                if times > SLOWER and (faster >= OTHERS or len(others) < OTHERS):
                    took, by = (units.time(1e6 * x.last_call_s) for x in (trial, default))
                    reason = f"a second call took {took}, {times:.3g} times the {by}"
                    del self.call_s[trial.case, trial.impl.name]
                    reason += f" of {default.impl.name}"
                    yield trial.impl.name, DroppedError(reason, dropped="slow")

    def _least_s(self, trial: Trial) -> float:
        """How long a call takes: if it is short, the least of a few, as one may be disturbed."""
        assert trial.bound is not None
        with torch.set_grad_enabled(trial.bound.grad):
            for _ in range(SHORT_CALLS if trial.last_call_s < SHORT_S else 0):
                begin = time.perf_counter()
                trial.bound.call()
                trial.last_call_s = min(trial.last_call_s, time.perf_counter() - begin)
        return trial.last_call_s

    def _kept(self, trial: Trial) -> bool:
        return trial.impl.name in self.race.kept

    def _default_s(self, case: Case) -> float:
        """How long a call of the default takes, 0 if it has none."""
        return max([s for (of, n), s in self.call_s.items() if of == case and n in self.race.kept],
                   default=0.0)  # fmt: skip

    def _more(self, trial: Trial) -> bool:
        """Whether the default of its case, and as many others as must be, were called."""
        others = sum(of == trial.case and name not in self.race.kept for of, name in self.call_s)
        return others >= OTHERS and not self._kept(trial)

    def _until_s(self, takes_s: float, *, more: bool) -> float:
        """When a round of all that was called could end, or several, and what `takes_s` besides."""
        rounds_s = (ROUNDS if more else 1) * sum(self.call_s.values())
        return self.race.elapsed_s + rounds_s + CHECKS * self.race.limit_s + takes_s
