"""All implementations of one case, in one process: checked, probed, then timed in turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from attnbench.api import IMPLEMENTATIONS
from attnbench.beacon import NOBODY
from attnbench.case import Case
from attnbench.check import Truth
from attnbench.inputs import Draw
from attnbench.measure.clock import clock_for
from attnbench.measure.engine import Contender, race
from attnbench.measure.stopping import StoppingRule
from attnbench.record import Cell, Record, Sample
from attnbench.worker.trial import Trial, classify
from attnbench.workloads import WORKLOADS

Emit = Callable[[Record], None]
Tell = Callable[[int, str], None]  # index of the implementation, stage


def measure_case(
    case: Case, names: list[str], rule: StoppingRule, seed: int, emit: Emit, tell: Tell
) -> None:
    """Measure `case` with every named implementation and emit one record for each.

    The order is fixed: two draws of inputs with needles, each compared with the truth; then
    plain inputs, the probes, and the timed rounds. A record is emitted as soon as it is final.
    """
    trials: dict[str, Trial] = {}
    try:
        workload = WORKLOADS.get(case.workload)
        tell(NOBODY, "inputs")
        tensors = workload.tensors(case)
        trials = {n: Trial(impl=IMPLEMENTATIONS.get(n), case=case, tensors=tensors) for n in names}
        open_trials = dict(trials)
        for number, first in ((1, True), (2, False)):
            tell(NOBODY, "reference")
            workload.fill(case, tensors, Draw(seed=2 * seed + number, needles=True))
            truth = _shared_truth(list(open_trials.values()), case)
            for index, name in enumerate(names):
                if name in open_trials:
                    _prepare_and_check(trials[name], truth, first, partial(tell, index))
                    _drop_if_ended(name, open_trials, emit)
        workload.fill(case, tensors, Draw(seed=seed))
        for index, name in enumerate(names):
            if name in open_trials:
                _probe(trials[name], partial(tell, index))
                _drop_if_ended(name, open_trials, emit)
        _time(case, names, open_trials, rule, seed, emit, tell)
    except Exception as err:  # inputs or reference: no implementation is to blame
        status, reason = classify(err, "inputs and reference")
        for name in trials or names:
            trial = trials.get(name)
            if trial is None or trial.status is None:
                emit(Record(cell=Cell(case=case, impl=name), status=status, reason=reason))


def _shared_truth(trials: list[Trial], case: Case) -> Truth:
    begin = time.perf_counter()
    truth = WORKLOADS.get(case.workload).truth(case, trials[0].tensors) if trials else None
    for trial in trials:  # one reference serves all: each is charged its share
        share = (time.perf_counter() - begin) / len(trials)
        trial.spent_s["check"] = trial.spent_s.get("check", 0.0) + share
    return truth or Truth(values={}, allowed={})


def _prepare_and_check(
    trial: Trial, truth: Truth, first: bool, tell: Callable[[str], None]
) -> None:
    tell("build")
    with trial.stage("build"):
        trial.build() if first else trial.refresh()
    if trial.status is None:
        tell("check")
        with trial.stage("check"):
            trial.check(truth, first=first)


def _probe(trial: Trial, tell: Callable[[str], None]) -> None:
    tell("probe")
    with trial.stage("probe"):
        trial.refresh()
        trial.probe()


def _drop_if_ended(name: str, open_trials: dict[str, Trial], emit: Emit) -> None:
    trial = open_trials[name]
    if trial.status is not None:
        del open_trials[name]
        emit(_record(name, trial))


def _time(
    case: Case,
    names: list[str],
    trials: dict[str, Trial],
    rule: StoppingRule,
    seed: int,
    emit: Emit,
    tell: Tell,
) -> None:
    contenders = {
        name: Contender(call=t.bound.call, grad=t.bound.grad, units=t.bound.units)
        for name, t in trials.items()
        if t.bound is not None
    }

    def finished(name: str) -> None:
        contender, trial = contenders[name], trials[name]
        trial.spent_s |= {"warm-up": contender.warm_s, "samples": contender.spent_s}
        if contender.error is not None:
            trial.fail("samples", contender.error)
        else:
            trial.status = "ok"
        emit(_record(name, trial, contender))

    race(
        contenders,
        clock_for(case.device),
        rule,
        seed,
        before_turn=lambda name, stage: tell(names.index(name), stage),
        finished=finished,
    )


def _record(name: str, trial: Trial, contender: Contender | None = None) -> Record:
    assert trial.status is not None
    turns = contender.turns if contender and trial.status == "ok" else []
    return Record(
        cell=Cell(case=trial.case, impl=name),
        status=trial.status,
        reason=trial.reason,
        samples=tuple(Sample(**dataclasses.asdict(turn)) for turn in turns),
        metrics=trial.metrics,
        spent_s={stage: round(seconds, 6) for stage, seconds in trial.spent_s.items()},
    )
