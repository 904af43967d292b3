"""One heat in one process: every cell checked and probed, then all of them timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from attnbench.api import IMPLEMENTATIONS
from attnbench.base.heartbeat import NOBODY
from attnbench.machine import allocator
from attnbench.machine.facts import free_bytes
from attnbench.machine.state import settle
from attnbench.measure.engine import race
from attnbench.measure.sampling import Contender
from attnbench.measure.watch import Ledger
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record
from attnbench.worker.finishing import record_of, timed_record
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import Truth
from attnbench.worker.setup import Setup
from attnbench.worker.trial import Trial, classify
from attnbench.worker.workloads import WORKLOADS

Entry = tuple[Case, list[str]]
Emit = Callable[[int, Record], None]  # index of the case in the heat, its record
Tell = Callable[[int, int, str], None]  # indices of the case and the implementation, stage


def measure_heat(entries: list[Entry], setup: Setup, emit: Emit, tell: Tell) -> None:
    """Measure every cell of the heat and emit one record for each, as soon as it is final.

    Each case gets two draws of inputs, the first with needles (a lost key shows), the second
    plain (a small error everywhere shows), each compared with the truth; then the probes. What is
    still in the race then takes turns, across the cases, too. Whatever ran out of memory beside
    others is tried again alone at the end: only then is it its own fault.
    """
    crowded: list[tuple[int, str]] = []

    def emit_or_postpone(index: int, record: Record) -> None:
        if record.status == "oom" and sum(len(names) for _, names in entries) > 1:
            crowded.append((index, record.cell.impl))
        else:
            emit(index, record)

    _measure_together(entries, setup, emit_or_postpone, tell)
    for index, name in crowded:
        case, names = entries[index]
        place = index, names.index(name)
        alone: list[Entry] = [(case, [name])]
        _measure_together(alone, setup, partial(_emit_at, emit, index), _tell_at(tell, place))


def _emit_at(emit: Emit, index: int, _: int, record: Record) -> None:
    emit(index, record)


def _tell_at(tell: Tell, place: tuple[int, int]) -> Tell:
    """Tell of the only cell of a heat as of the one at `place` in another."""

    def told(_: int, impl: int, stage: str) -> None:
        tell(place[0], NOBODY if impl == NOBODY else place[1], stage)

    return told


def _measure_together(entries: list[Entry], setup: Setup, emit: Emit, tell: Tell) -> None:
    allocator.give_back()
    racing: dict[str, Trial] = {}
    places: dict[str, tuple[int, int]] = {}
    for index, (case, names) in enumerate(entries):
        trials = prepare_case(case, names, setup.seed, partial(emit, index), partial(tell, index))
        for name, trial in trials.items():
            racing[f"{index} {name}"] = trial
            places[f"{index} {name}"] = (index, names.index(name))
    contenders = {key: _contender(trial) for key, trial in racing.items()}
    ledger = Ledger.open()
    over: list[str] = []

    def finished(key: str) -> None:
        if (
            setup.energy and contenders[key].error is None
        ):  # its loop would heat the GPU for those who are still being timed
            over.append(key)
        else:
            emit(places[key][0], timed_record(racing.pop(key), contenders[key], setup, ledger))

    def before_turn(key: str, stage: str) -> None:
        tell(*places[key], stage)

    race(
        contenders,
        setup.clock,
        setup.rule,
        setup.seed,
        watch=setup.watch,
        before_turn=before_turn,
        after_turn=lambda key: racing[key].settle(),
        finished=finished,
    )
    for key in over:
        before_turn(key, "energy")
        emit(places[key][0], timed_record(racing.pop(key), contenders[key], setup, ledger))
        settle()


def _contender(trial: Trial) -> Contender:
    assert trial.bound is not None
    return Contender(
        call=trial.bound.call,
        grad=trial.bound.grad,
        units=trial.bound.units,
        last_call_s=trial.last_call_s,
    )


def prepare_case(
    case: Case,
    names: list[str],
    seed: int,
    emit: Callable[[Record], None],
    tell: Callable[[int, str], None],
) -> dict[str, Trial]:
    """Check and probe the implementations of one case; return those that may be timed."""
    trials: dict[str, Trial] = {}
    try:
        workload = WORKLOADS.get(case.workload)
        settle()
        tell(NOBODY, "inputs")
        tensors = workload.tensors(case)
        trials = {n: Trial(impl=IMPLEMENTATIONS.get(n), case=case, tensors=tensors) for n in names}
        for name in list(trials):
            tell(names.index(name), "check")
            with trials[name].stage("check"):
                _refuse_if_too_large(trials[name])
            _drop_if_ended(name, trials, emit)
        for number, first in ((1, True), (2, False)):
            if not trials:
                break
            tell(NOBODY, "reference")
            workload.fill(case, tensors, Draw(seed=2 * seed + number, needles=first))
            truth = _shared_truth(case, list(trials.values()))
            for name in list(trials):
                told = partial(tell, names.index(name))
                _prepare_and_check(trials[name], truth, first, told)
                _drop_if_ended(name, trials, emit)
        workload.fill(case, tensors, Draw(seed=seed))
        for name in list(trials):
            _probe(trials[name], partial(tell, names.index(name)))
            _drop_if_ended(name, trials, emit)
    except Exception as err:  # inputs or reference: no implementation is to blame
        status, reason = classify(err, "inputs and reference")
        for name in trials or names:
            emit(Record(cell=Cell(case=case, impl=name), status=status, reason=reason))
        return {}
    return trials


def _refuse_if_too_large(trial: Trial) -> None:
    """Save the time of a reference for what is known from its sizes not to fit."""
    costs = WORKLOADS.get(trial.case.workload).costs(trial.case, trial.impl)
    needed, free = costs["memory_predicted_bytes"], free_bytes(trial.case.device)
    if needed is not None and free is not None and needed > free:
        trial.metrics |= costs
        trial.status = "oom"
        trial.reason = f"predicted workspace of {needed} bytes, {free} are free; not tried"


def _shared_truth(case: Case, trials: list[Trial]) -> Truth:
    """One reference serves all: each is charged its share of the time."""
    if not trials:
        return Truth(values={}, allowed={})
    begin = time.perf_counter()
    truth = WORKLOADS.get(case.workload).truth(case, trials[0].tensors)
    share = (time.perf_counter() - begin) / len(trials)
    for trial in trials:
        trial.spent_s["check"] = trial.spent_s.get("check", 0.0) + share
    return truth


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
        trial.probe()


def _drop_if_ended(name: str, trials: dict[str, Trial], emit: Callable[[Record], None]) -> None:
    if trials[name].status is not None:
        emit(record_of(trials.pop(name)))
