"""Results compared with the reference, on two draws of inputs: before cells are timed, or alone."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attnbench.api import Implementation, implementation
from attnbench.measure.sampling import forget_compiled
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.worker.drawn import Affordable, affordable, draw_part, drawn_truth
from attnbench.worker.inputs import Draw, Tensors, with_gradients
from attnbench.worker.properties import HIDDEN_NAN, PROPERTIES
from attnbench.worker.reference import Reference
from attnbench.worker.trial import IncorrectError, Trial, classify, raised, restore_settings
from attnbench.worker.workloads import WORKLOADS

if TYPE_CHECKING:
    from attnbench.worker.screening import Screening


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Where the worker says what it is at, and what became of each cell as soon as it is final.

    `at` is called with a case's place in the request, the implementation (None: none in
    particular) and the stage; `record` with the place and the record.
    """

    at: Callable[[int, str | None, str], None]
    record: Callable[[int, Record], None]

    @contextlib.contextmanager
    def stage(self, index: int, trials: dict[str, Trial], name: str, stage: str) -> Iterator[None]:
        """Charge what is done to one of the trials; one that fails is reported and dropped."""
        self.at(index, name, stage)
        with trials[name].stage(stage):
            yield
        if trials[name].status is not None:
            self.record(index, trials.pop(name).record())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A case of a request, its place there, and the implementations to measure."""

    index: int
    case: Case
    impls: tuple[str, ...]


def check_twice(
    entry: Entry,
    trials: dict[str, Trial],
    draws: tuple[Draw, Draw],
    reporter: Reporter,
    truth: Callable[[Case, Tensors, Implementation | None], Reference] | None = None,
    reference_s: float = math.inf,
    screening: Screening | None = None,
) -> None:
    """Compare each trial with the reference on two draws; one that fails is reported and dropped.

    With needles in the first a lost key shows, without them a small error everywhere. A result
    that was kept from the first is wrong in the second. What has a definition of its own is held
    against that; all others share one reference. Where both draws' references would take more than
    `reference_s`, a part of each is checked, and then the whole of a smaller case; what has no part
    that takes less is a `DroppedError`. In a race a `screening` drops what is not worth timing, and
    what is `brief` has its second draw on the smaller case alone.
    """
    workload, sizes = WORKLOADS.get(entry.case.workload), None
    for first, draw in zip((True, False), draws, strict=True):
        wanted = [n for n, trial in trials.items() if first or not (sizes and trial.brief)]
        if not wanted:
            break
        reporter.at(entry.index, None, "reference")
        tensors = next(iter(trials.values())).tensors
        workload.fill(entry.case, tensors, draw)
        begin = time.perf_counter()
        if first and reference_s < math.inf:
            sizes = affordable(entry.case, tensors, reference_s)
        truth_of = functools.partial(truth or workload.truth, entry.case, tensors)
        if sizes is not None:
            truth_of = functools.partial(drawn_truth, tensors, draw_part(entry.case, sizes, draw))
        exact = [trial for trial in trials.values() if trial.impl.definition is None]
        shared = truth_of(None) if exact else None
        for trial in exact:
            share = (time.perf_counter() - begin) / len(exact)
            trial.spent_s["reference"] = trial.spent_s.get("reference", 0.0) + share
        for name, trial in ((name, trials[name]) for name in wanted):
            reference = shared
            if trial.impl.definition is not None:
                with reporter.stage(entry.index, trials, name, "reference"):
                    reference = truth_of(trial.impl)
            if name in trials:
                with reporter.stage(entry.index, trials, name, "build"):
                    if screening and first:
                        screening.admit(trial)
                    trial.build() if first or trial.bound is None else trial.bound.refresh()
            if name in trials:
                assert reference is not None
                with reporter.stage(entry.index, trials, name, "check"):
                    if screening and first:
                        screening.compare(trial)
                    trial.check(reference, first=first)
                    if screening:
                        screening.called(trial, first=first)
        for name, reason in list(screening.slow(trials)) if screening else ():
            with reporter.stage(entry.index, trials, name, "check"):
                raise reason
    if sizes is not None:
        _check_smaller(entry, trials, draws, reporter, sizes)


def _check_smaller(
    entry: Entry, trials: dict[str, Trial], draws: tuple[Draw, Draw], reporter: Reporter,
    sizes: Affordable,
) -> None:  # fmt: skip
    """What a part of each result was right of: check all of a smaller case, if that is supported.

    What fails there is reported as failed here, and dropped.
    """
    case, workload = sizes.smaller, WORKLOADS.get(entry.case.workload)
    tensors = workload.tensors(case)
    able = [n for n, x in trials.items() if workload.reason_against(case, x.impl) is None]
    smaller = {n: Trial(impl=trials[n].impl, case=case, tensors=tensors) for n in able}
    only = Reporter(at=reporter.at, record=lambda _, __: None)
    check_twice(replace(entry, case=case), dict(smaller), draws, only)
    for name, trial in list(trials.items()):
        trial.metrics["checked"] = sizes.share + f", all at n = {case.kv_len}" * (name in able)
        other = smaller.get(name, trial)
        trial.spent_s = dict(Counter(trial.spent_s) + Counter(other.spent_s))
        if other.status is not None:
            trial.status, trial.reason = other.status, f"{other.reason} (at n = {case.kv_len})"
            trial.metrics["fault"] = other.metrics.get("fault")
            reporter.record(entry.index, trials.pop(name).record())


# How far approximations are from exact attention, by what the inputs are.
DISTANCES = {"approx_error": False, "approx_error_local": True}


def measure_distances(
    entry: Entry, trials: dict[str, Trial], seed: int, reporter: Reporter
) -> None:
    """Hold what has a definition of its own against exact attention, too; a column each.

    And what is in a workload that approximates. On normal inputs, whose attention is spread over
    all keys, and on local ones. A trial that fails is reported and dropped.
    """
    workload = WORKLOADS.get(entry.case.workload)
    every = workload.approximates(entry.case)
    names = [name for name, x in trials.items() if every or x.impl.definition is not None]
    names = [name for name in names if "checked" not in trials[name].metrics]  # would take too long
    if not names or entry.case.pass_ == "backward":
        return
    tensors = trials[names[0]].tensors
    for column, local in DISTANCES.items():
        if (local and entry.case.workload != "attention") or not trials.keys() & names:
            continue
        reporter.at(entry.index, None, "reference")
        workload.fill(entry.case, tensors, Draw(seed=seed, local=local))
        exact = workload.exact_output(entry.case, tensors)
        for name in [name for name in names if name in trials]:
            with reporter.stage(entry.index, trials, name, "check"):
                trials[name].measure_distance(column, exact)


_recent: deque[tuple[Case, Tensors, Reference]] = deque(maxlen=2)  # of the two draws of an item


def _known_truth(case: Case, tensors: Tensors, impl: Implementation | None) -> Reference:
    """The reference. Of the same inputs it serves every implementation of attention.

    And that of `both` serves `forward`. Inputs that require no gradient have none.
    """
    workload, truth = WORKLOADS.get(case.workload), None
    for known, inputs, found in _recent if impl is None else ():
        same = replace(known, pass_=case.pass_) == case and known.pass_ in (case.pass_, "both")
        if same and all(torch.equal(inputs[name], x) for name, x in tensors.items()):
            truth = found
    if truth is None:
        truth = workload.truth(case, tensors, impl)
        if impl is None:
            _recent.append((case, {name: x.detach().clone() for name, x in tensors.items()}, truth))
    spare = {f"d{name}" for name, x in tensors.items() if not x.requires_grad}
    names = [n for n in truth.values if n == "o" or (case.needs_grad and n not in spare)]
    return replace(truth, values={name: truth.values[name] for name in names})


def check_item(
    case: Case,
    name: str,
    options: dict[str, Any],
    seed: int,
    at: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Check `name` in `case` without any timing; status, reason and errors as plain JSON.

    `options` are the fields of `Draw` that the battery sets, or the `property` that is to hold;
    `at` is called with each stage as it begins.
    """
    workload = WORKLOADS.get(case.workload)
    forget_compiled()
    try:
        if "property" in options:
            at("check")
            return _check_property(options["property"], case, name, seed)
        needles = not options.keys() & {"query_amplitude", "score_offset", "expanded"}
        draw = Draw(seed=seed, needles=needles, **options)
        tensors = with_gradients(workload.tensors(case), draw)
        trial = Trial(impl=implementation(name), case=case, tensors=tensors, checks_alone=True)
        entry = Entry(index=0, case=case, impls=(name,))
        draws = draw, replace(draw, seed=seed + 1, needles=False)
        reporter = Reporter(at=lambda _, __, stage: at(stage), record=lambda _, __: None)
        check_twice(entry, {name: trial}, draws, reporter, _known_truth)
    except Exception as err:
        status, reason = classify(err, "inputs and reference")
        return {"status": status, "reason": reason, "metrics": {}}
    return {"status": trial.status or "ok", "reason": trial.reason, "metrics": trial.metrics}


def _check_property(wanted: str, case: Case, name: str, seed: int) -> dict[str, Any]:
    impl, workload = implementation(name), WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=seed))
    status, reason, metrics = "ok", None, dict[str, Any]()
    try:
        PROPERTIES.get(wanted)(case, impl, tensors)
        metrics |= {"hidden_nan": "kept out"} if wanted == HIDDEN_NAN else {}
    except Exception as err:
        status, reason = classify(err, "check")
        if wanted == HIDDEN_NAN and isinstance(err, IncorrectError) and not impl.hidden_may_be_nan:
            status, metrics["hidden_nan"] = "ok", "shows"
        else:
            metrics["fault"] = raised(err, "check", impl.file)
        if status == "incorrect":
            metrics["fault"] = {"code": "property", "tensor": "o", "property": wanted}
    restore_settings()
    return {"status": status, "reason": reason, "metrics": metrics}
