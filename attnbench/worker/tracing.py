"""Where the time and the memory of a cell go: traced in a process that times for no sweep.

And the names of the kernels that a call runs, for the table.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from attnbench.api import implementation
from attnbench.base.sample import Batch
from attnbench.base.stats import median, median_interval
from attnbench.machine.state import settle, take_cores
from attnbench.measure import ops
from attnbench.measure.clock import Clock, Flush, clock_for
from attnbench.measure.engine import fastest
from attnbench.measure.opcosts import OpCosts, TooManyOpsError, op_costs
from attnbench.measure.ops import CallSeen
from attnbench.measure.sampling import StoppingRule, Target, warm_up
from attnbench.measure.watch import collector_off
from attnbench.schema.case import Case
from attnbench.schema.messages import CellTraced, Trace
from attnbench.schema.profile import Live, Memory, Note, Op, Profile, Unprofiled
from attnbench.schema.record import Record, Status
from attnbench.theory.costs import OPAQUE_FORMULAS
from attnbench.worker.checking import Entry, Reporter
from attnbench.worker.inputs import Draw
from attnbench.worker.measuring import prepare
from attnbench.worker.trial import Trial, classify
from attnbench.worker.workloads import WORKLOADS

At = Callable[[str], None]

MOST_OPS = 50_000  # in a call; a trace has some four events for each, of 200 bytes of JSON
_MOST_EVENTS = 200_000  # in a trace, of as many calls as fit
_ROUNDS, _FEWEST_ROUNDS, _BUDGET_S = 15, 6, 6.0
# In a row, of batches and of profiled calls each, the fastest of which counts; a long call is made
# fewer times, in a round of about this length.
_IN_A_ROW, _ROUND_US = 8, 100_000.0
_SHORT_US, _MOST_CALLS = 2_000.0, 100
_PATIENCE_US = 10e6  # a round above this is one of three
_TRACED_CALLS = 3
_COSTLY = 1.05  # the profiler's own share of a call that is worth a note
_MISS = 0.01  # of a workspace: what differs more is worth a note
_CALM = 0.9  # of the calls' time on their core; below that other work is worth a note


def trace_cell(asked: Trace, at: At = lambda stage: None) -> CellTraced:
    """Check, time and profile one cell; a wrong one has no profile, and the status says why.

    `at` is called with each stage as it begins.
    """
    if asked.case.device == "cpu":
        take_cores(asked.case.threads)
    try:
        costs = _costs(asked, at)
    except TooManyOpsError as err:
        reason = f"{err}: reduce the sizes, such as --seq-lens"
        return CellTraced(impl=asked.impl, status="skipped", reason=reason)
    failed: list[Record] = []
    reporter = Reporter(
        at=lambda case, impl, stage: at(stage), record=lambda case, record: failed.append(record)
    )
    entry = Entry(index=0, case=asked.case, impls=(asked.impl,))
    trials = prepare(entry, asked.seed, reporter)
    if not trials:
        return CellTraced(impl=asked.impl, status=failed[0].status, reason=failed[0].reason)
    trial, profile = trials[asked.impl], None
    with trial.stage("profile"):
        profile = _profile(trial, asked, costs, at)
    return CellTraced(
        impl=asked.impl, status=trial.status or "ok", reason=trial.reason, profile=profile
    )


def built(case: Case, impl: str, seed: int) -> Trial:
    """The cell with its inputs, built but not checked; `bound` is None where that failed."""
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=seed))
    trial = Trial(impl=implementation(impl), case=case, tensors=tensors, checks_alone=True)
    with trial.stage("build"):
        trial.build()
    return trial


def _costs(asked: Trace, at: At) -> OpCosts | str:
    """What its ops cost, by a first call of the cell before it is checked; or why it is unknown.

    Raises:
        TooManyOpsError: they are too many for a trace, which is found out before a long check.
    """
    if implementation(asked.impl).compiles:
        return ""
    at("costs")
    settle()
    try:
        trial = built(asked.case, asked.impl, asked.seed)
        if trial.bound is None:
            return trial.reason or ""  # and so will the check
        with torch.set_grad_enabled(trial.bound.grad):
            return op_costs(trial.bound.call, OPAQUE_FORMULAS, MOST_OPS)
    except TooManyOpsError:
        raise
    except Exception as err:  # a formula's; one of the call itself comes up again
        return classify(err, "costs")[1]


def _profile(trial: Trial, asked: Trace, costs: OpCosts | str, at: At) -> Profile:
    """The passes, each for one question: times, then memory and the trace."""
    bound, case = trial.bound, trial.case
    assert bound is not None
    notes = [Note("no-costs", {"error": costs})] if costs and isinstance(costs, str) else []
    clock = clock_for(case.device)
    target = Target(call=bound.call, grad=bound.grad, last_call_s=trial.last_call_s)
    at("warm-up")
    warm_up(target, clock=clock, rule=StoppingRule())
    batches, seen = _rounds(target, clock, case.device, at)
    if not seen:
        notes.append(Note("kernels-lost"))
    per_call = max([call.counts.total() for call in seen], default=0)
    calls = max(1, min(_TRACED_CALLS, _MOST_EVENTS // (4 * per_call or 1)))
    if calls < _TRACED_CALLS:
        notes.append(Note("few-calls", {"calls": calls, "events": _MOST_EVENTS}))
    at("trace")
    session = ops.run_session(bound.call, case.device, calls, details=True)
    marks = ops.marks_of(session.profile.kineto_results.experimental_event_tree())
    changes = ops.memory_changes(marks[-1], case.device)
    memory = memory_of(changes, trial.metrics)
    known = costs if isinstance(costs, OpCosts) else None
    found = op_rows(seen, known, changes if case.device == "cpu" else [])
    time_of = unprofiled(batches, target.calls, clock)
    profiled_us = fmean(call.total_us for call in seen) if seen else time_of.median_us
    launches = [us for call in seen for us in call.launches_us]
    disturbed = fmean(call.alone for call in seen) if seen else 1.0
    notes += list(_notes(trial, time_of, profiled_us, memory, disturbed))
    return Profile(
        case=case.to_json(),
        impl=asked.impl,
        label=asked.label,
        environment={},
        ceilings={},
        time=time_of,
        profiled_us=profiled_us,
        calls=len(seen),
        ops=found,
        gaps_us=fmean(call.gaps_us for call in seen) if seen else 0.0,
        gaps=round(median(call.gaps or 0 for call in seen)) if launches else None,
        launch_us=median(launches) if launches else None,
        memory=memory,
        trace=Path(asked.file).name,
        trace_events=_export(session.profile, Path(asked.file)),
        notes=tuple(notes),
    )


def _rounds(
    target: Target, clock: Clock, device: str, at: At
) -> tuple[list[Batch], list[CallSeen]]:
    """Samples without the profiler and calls under it, in turns: the machine's drift hits both.

    Both stand for a few in a row. On CUDA all samples come first, since the profiler's
    library slows every launch after it; no calls where it has lost kernels.
    """
    flush = Flush(device) if clock.l2 == "cold" else lambda: None
    row = max(1, min(_IN_A_ROW, int(_ROUND_US / max(2 * target.calls * target.each_us, 1.0))))
    rounds = _ROUNDS if 2 * row * target.each_us < _PATIENCE_US else 3
    batches: list[Batch] = []
    seen: list[CallSeen] = []
    begin = time.perf_counter()
    while len(batches) < rounds:
        if len(batches) >= _FEWEST_ROUNDS and time.perf_counter() - begin > _BUDGET_S:
            break
        at("profile")
        target.call()
        with collector_off():
            tried = [clock.batch(target.call, target.calls) for _ in range(row)]
        batches.append(fastest(tried))
        if device == "cpu":
            # Short calls often: the first few find other things in the caches.
            more = min(_MOST_CALLS, int(_SHORT_US / max(target.each_us, 1.0)))
            session = ops.run_session(target.call, device, row * max(1, more // row))
            found = ops.calls_of(session, device) or []
            seen += [ops.quietest(found[at : at + row]) for at in range(0, len(found), row)]
    if device == "cpu":
        return batches, seen
    session = ops.run_session(target.call, device, _ROUNDS, before=flush)
    return batches, ops.calls_of(session, device) or []


def unprofiled(batches: list[Batch], calls: int, clock: Clock) -> Unprofiled:
    """The time of a call without a profiler: what other work took is left out where it is known."""
    times = [batch.own_us for batch in batches]
    low, high = median_interval(times) or (None, None)
    return Unprofiled(
        median_us=median(times),
        low_us=low,
        high_us=high,
        samples=len(times),
        calls=calls,
        timer=clock.timer,
        l2=clock.l2,
    )


def op_rows(
    seen: list[CallSeen], costs: OpCosts | None, changes: list[ops.Change]
) -> tuple[Op, ...]:
    """The ops of a call, longest first, with what the dispatcher saw them cost.

    Where it saw another number of them than the profiler, what they cost is unknown. Costs of a
    kernel are those of the op that launched it, where neither has another.
    """
    by: dict[str, set[str]] = {}
    for call in seen:
        for kernel, names in call.launched_by.items():
            by.setdefault(kernel, set()).update(names)
    launchers = [name for names in by.values() for name in names]
    rows = []
    for name, count, self_us, low_us, high_us in ops.self_times(seen):
        op = name
        if by:
            of = by.get(name, set())
            op = next(iter(of)) if len(of) == 1 and launchers.count(*of) == 1 else ""
        known = costs is not None and costs.counts[op] == count
        allocated = [c.bytes for c in changes if c.op == name and c.bytes > 0]
        rows.append(
            Op(
                name=name,
                count=count,
                self_us=self_us,
                low_us=low_us,
                high_us=high_us,
                flops=costs.flops.get(op) if costs and known else None,
                bytes=costs.bytes.get(op) if costs and known else None,
                allocated_bytes=None if by else sum(allocated),
            )
        )
    return tuple(rows)


def memory_of(changes: list[ops.Change], metrics: dict[str, Any]) -> Memory:
    """The timeline of one call and its peak, beside what a record says of the same call."""
    live = peak = 0
    timeline, peak_op = [], None
    for t_us, size, op in changes:
        live += size
        timeline.append(Live(round(t_us, 3), live, op))
        if live > peak:
            peak, peak_op = live, op
    outputs = metrics.get("memory_outputs_bytes")
    return Memory(
        timeline=tuple(timeline),
        peak_bytes=peak,
        peak_op=peak_op,
        outputs_bytes=outputs,
        traced_bytes=None if outputs is None else max(0, peak - outputs),
        measured_bytes=metrics.get("memory_workspace_bytes"),
        predicted_bytes=metrics.get("memory_predicted_bytes"),
    )


def _notes(
    trial: Trial, time_of: Unprofiled, profiled_us: float, memory: Memory, alone: float
) -> Iterator[Note]:
    if trial.impl.compiles:
        yield Note("compiled")
    if trial.case.device == "cpu" and profiled_us > _COSTLY * time_of.median_us:
        yield Note("profiler-cost", {"ratio": profiled_us / time_of.median_us})
    if alone < _CALM:
        yield Note("disturbed", {"share": alone})
    if trial.case.threads > 1:
        yield Note("threads", {"threads": trial.case.threads})
    traced = memory.traced_bytes
    for code, other, name in (
        ("memory-differs", memory.measured_bytes, "measured_bytes"),
        ("prediction-differs", memory.predicted_bytes, "predicted_bytes"),
    ):
        if traced is not None and other is not None and abs(traced - other) > _MISS * other:
            yield Note(code, {"traced_bytes": traced, name: other})  # type: ignore[arg-type]


def _export(profile: Any, file: Path) -> int:
    """Write the trace, gzipped; the number of its events."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        plain = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(plain)
        with open(plain, "rb") as source, gzip.open(file, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
    return len(profile.kineto_results.events())


# compile_s: the process that times finds on disk what this one has compiled.
_METRICS = (
    "kernel", "kernel_count", "device_waits", "sdpa_backend", "sdpa_reason", "kernel_note",
    "compile_s",
)  # fmt: skip


def profile_cell(
    case: Case, name: str, seed: int, at: Callable[[str], None] = lambda stage: None
) -> tuple[Status, dict[str, Any]]:
    """Build and profile `name` in `case`; what became of that, and the metrics of its record.

    It is neither checked nor timed. `at` is called with each stage as it begins.
    """
    try:
        settle()
        at("build")
        trial = built(case, name, seed)
    except Exception as err:
        status, reason = classify(err, "inputs")
        return status, {"kernel_note": f"not profiled: {reason}"}
    if trial.status is None:
        at("profile")
        with trial.stage("profile"):
            trial.profile()
    if trial.status is not None:
        return trial.status, {"kernel_note": f"not profiled: {trial.reason}"}
    return "ok", {name: trial.metrics[name] for name in _METRICS if name in trial.metrics}
