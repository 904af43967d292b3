"""One group in one process: every cell built, checked and probed, then all timed interleaved."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from msgspec import structs

from attnbench.api import implementation
from attnbench.base import units
from attnbench.base.sample import FULL_SPEED
from attnbench.base.stats import median
from attnbench.machine import host, state
from attnbench.measure.clock import LEAST_STEP_US, Clock, clock_for, steps_of
from attnbench.measure.engine import Measurement
from attnbench.measure.race import Race
from attnbench.measure.sampling import StoppingRule, Target, forget_compiled, uneven
from attnbench.measure.sensor import GpuSensor, measure_energy, power_state
from attnbench.measure.watch import CounterMarks, Reading, Watch, most_slope, page_fault_us, speeds
from attnbench.schema.messages import Measure, ModelSizes
from attnbench.schema.record import Cell, Record
from attnbench.worker.catalogue import is_built_in
from attnbench.worker.checking import Entry, Reporter, check_twice, measure_distances
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.model import part_of
from attnbench.worker.reference import DroppedError
from attnbench.worker.screening import Screening
from attnbench.worker.trial import Trial, classify
from attnbench.worker.workloads import WORKLOADS

RACE_WARM_S = 0.1  # in a race, whose rounds go on for long, they are not to wait for calm


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Everything about measuring that is the same for all cells of a request.

    `sensor` is what the GPU says of itself, None on CPU; `energy` asks for joules a call; a `race`
    ends the timing of what is decided. `reference_s` is how long the references of a case may take.
    MLP and head of the `model` are timed beside each layer.
    """

    rule: StoppingRule
    clock: Clock
    watch: Watch
    seed: int = 0
    sensor: GpuSensor | None = None
    energy: bool = False
    race: Race | None = None
    reference_s: float | None = None
    model: ModelSizes | None = None

    @classmethod
    def of(cls, request: Measure, device: str) -> Instruments:
        """Open clock and sensor for a request of the runner.

        Raises:
            CaptureError: this torch cannot time what is inside a CUDA graph.
        """
        clock = clock_for(device, l2=request.l2, timer=request.timer)
        sensor = GpuSensor.open() if device == "cuda" else None
        timing_s = request.race_s
        return cls(
            rule=StoppingRule(
                precision=request.precision,
                min_time_s=request.min_time_s,
                max_time_s=request.max_time_s,
                warm_s=None if timing_s is None else RACE_WARM_S,
            ),
            race=None
            if timing_s is None
            else Race(timing_s=timing_s, limit_s=request.limit_s or timing_s, kept=request.kept),
            reference_s=request.reference_s,
            model=request.model,
            clock=clock,
            watch=Watch(sensor=sensor),
            seed=request.seed,
            sensor=sensor,
            energy=request.energy,
        )

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """The stream to work on: a graph cannot capture what began on torch's default stream."""
        if self.clock.timer != "graph":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)


def measure_group(entries: list[Entry], instruments: Instruments, reporter: Reporter) -> None:
    """Measure every cell of the group and report one record for each, as soon as it is final.

    Each case is checked on two draws of inputs, then probed. What is left is timed interleaved,
    across the cases, too. What ran out of memory beside others is tried again alone at the end:
    only then is it its own fault. Not where that broke the clock: the process ends with the record.
    In a race there is no time for that.
    """
    if instruments.race or sum(len(entry.impls) for entry in entries) == 1:
        _measure_together(entries, instruments, reporter)
        return
    crowded: list[tuple[int, str]] = []

    def record(case: int, found: Record) -> None:
        if found.status in ("oom", "skipped") and not instruments.clock.broken:
            crowded.append((case, found.cell.impl))
        else:
            reporter.record(case, found)

    _measure_together(entries, instruments, Reporter(at=reporter.at, record=record))
    for index, name in crowded:
        entry = next(entry for entry in entries if entry.index == index)
        _measure_together([replace(entry, impls=(name,))], instruments, reporter)


def _measure_together(entries: list[Entry], instruments: Instruments, reporter: Reporter) -> None:
    host.return_freed_memory()
    torch.cuda.empty_cache()
    forget_compiled()
    group = secrets.token_hex(4)  # records with the same one were interleaved: their rounds pair
    trials: dict[str, Trial] = {}
    indices: dict[str, int] = {}
    lengths = sorted(entry.case.seq_len for entry in entries)
    screening = Screening(instruments.race) if instruments.race else None
    for entry in entries:
        state.compile_each(len(entries))
        ready = prepare(entry, instruments.seed, reporter, instruments.reference_s, screening)
        for name, trial in ready.items():
            trial.metrics["group"] = group
            shortest = 1 < entry.case.seq_len == lengths[0] < lengths[-1]
            trial.shortest = shortest and is_built_in(trial.impl.file)
            key = f"{entry.index} {name}"
            trials[key], indices[key] = trial, entry.index
    # What references and checks worked in, several GB in float64, would stay in torch's cache until
    # memory runs out; then it is given back to the driver, while something is timed.
    torch.cuda.empty_cache()
    targets: dict[str, Target] = {}
    whole: dict[str, str] = {}  # by the key of a part that of its cell
    parts: dict[str, Parts] = {}
    heads: dict[int, Tensors] = {}  # of each case, those that all its layers make
    weights: Tensors = {}
    for key, trial in trials.items():
        bound = trial.bound
        assert bound is not None
        targets[key] = Target(
            call=bound.call, grad=bound.grad, units=bound.units, last_call_s=trial.last_call_s
        )
        reporter.at(indices[key], trial.impl.name, "parts")
        parts[key] = _parts(trial, targets[key], instruments, heads, indices[key], weights)
        for name, (part, _) in parts[key].items():
            targets[f"{key} {name}"], whole[f"{key} {name}"] = part, key
    weights.clear()  # what is timed holds its own
    marks = CounterMarks.now()
    over: list[str] = []

    def at(key: str, stage: str) -> None:
        key = whole.get(key, key)
        reporter.at(indices[key], trials[key].impl.name, stage)

    def emit(key: str) -> None:
        together = [target for target in targets.values() if target.part_of is None]
        record = timed_record(trials.pop(key), targets[key], together, instruments, marks)
        reporter.record(indices[key], with_parts(record, parts.pop(key)))

    def finished(key: str) -> None:
        if key not in trials:
            return
        # Measuring energy loops, which would heat the GPU for those who are still being timed.
        later = instruments.energy and targets[key].error is None
        over.append(key) if later else emit(key)

    Measurement(
        targets,
        instruments.clock,
        instruments.rule,
        watch=instruments.watch,
        before_sample=at,
        after_sample=lambda key: trials[whole.get(key, key)].restore_settings(),
        finished=finished,
        race=instruments.race,
    ).run(instruments.seed)
    for key in over:
        at(key, "energy")
        emit(key)
        state.settle()


Parts = dict[str, tuple[Target, float]]  # by name, and how many times each makes up the whole


def _parts(
    trial: Trial, whole: Target, instruments: Instruments, heads: dict[int, Tensors], index: int,
    weights: Tensors,
) -> Parts:  # fmt: skip
    """What is timed beside a layer: its core, and the MLP and the head of the model."""
    bound, case, sizes, found = trial.bound, trial.case, instruments.model, Parts()
    assert bound is not None
    target = partial(Target, grad=bound.grad, part_of=whole, units=case.query_tokens)
    with contextlib.suppress(RuntimeError, MemoryError):  # without the memory for it
        if bound.core:
            found["core"] = target(call=bound.core(heads.setdefault(index, {}))), case.layers
    if sizes is None or case.workload not in ("layer", "decode"):
        return found
    notes = list(sizes.notes)
    for name, count in (("mlp", case.layers * bool(sizes.inner)), ("head", bool(sizes.vocab))):
        try:
            if count:
                with torch.set_grad_enabled(bound.grad):
                    call, share, words = part_of(sizes, case, weights, head=name == "head")
                found[name] = target(call=call), count / share
                notes += [f"{name} timed on {words}"] * (share < 1)
        except (RuntimeError, MemoryError) as err:
            notes.append(f"{name} not timed: {' '.join(str(err).split())[:120]}")
    trial.metrics |= {"model_layers": sizes.layers, "model_note": "; ".join(notes) or None}
    return found


def with_parts(record: Record, parts: Parts) -> Record:
    """The record with the times of its parts, those of all its layers, in each sample's round."""
    if not record.samples:
        return record
    samples, spent_s, metrics = list(record.samples), dict(record.spent_s), dict(record.metrics)
    for name, (part, times) in parts.items():
        us = {s.round: times * s.own_us for s in part.samples if s.discarded is None}
        samples = [structs.replace(s, **{f"{name}_us": us.get(s.round)}) for s in samples]
        spent_s[name] = round(part.warm_s + part.spent_s, 6)
        if us and name != "core":
            metrics[f"{name}_us"] = median(us.values())
    return replace(record, samples=tuple(samples), spent_s=spent_s, metrics=metrics)


def prepare(
    entry: Entry, seed: int, reporter: Reporter, reference_s: float | None = None,
    screening: Screening | None = None,
) -> dict[str, Trial]:  # fmt: skip
    """Check and probe the implementations of one case; return those that may be timed."""
    case, trials = entry.case, dict[str, Trial]()
    try:
        if screening:
            screening.begin()
        workload = WORKLOADS.get(case.workload)
        state.settle()
        reporter.at(entry.index, None, "inputs")
        tensors = workload.tensors(case)
        trials = {
            name: Trial(impl=implementation(name), case=case, tensors=tensors)
            for name in entry.impls
        }
        draws = Draw(seed=2 * seed + 1, needles=True), Draw(seed=2 * seed + 2)
        if screening:
            trials = screening.ordered(trials)
        limits: Any = {"reference_s": reference_s or math.inf, "screening": screening}
        check_twice(entry, trials, draws, reporter, **limits)
        measure_distances(entry, trials, draws[1].seed, reporter)
        workload.fill(case, tensors, Draw(seed=seed))
        for name in list(trials):
            with reporter.stage(entry.index, trials, name, "probe"):
                trials[name].probe()
    except Exception as err:  # inputs or reference: no implementation is to blame
        status, reason = classify(err, "inputs and reference")
        row: Any = {"status": status, "reason": reason}
        row["metrics"] = err.metrics if isinstance(err, DroppedError) else {}
        for name in trials or entry.impls:
            reporter.record(entry.index, Record(cell=Cell(case=case, impl=name), **row))
        return {}
    return trials


def core_speed(
    target: Target, readings: Sequence[Reading], together: Iterable[Target]
) -> dict[str, float | str]:
    """How long the loop takes around these calls on a core at full speed, in µs; how often it did.

    The speeds are those that the process's `readings` show. Wide vector units lower the clock for a
    while (AVX-512 by a factor of 1.29 on one host): what a call does to the loop by itself is no
    slow core. And how steeply the calls that were timed `together` follow the core's speed at most.
    """
    found = speeds(readings)
    full_us = found[0].loop_us * max(1.0, median(target.slowed_by or [1.0]))
    at_full = sum(us <= FULL_SPEED * full_us for us in target.probes_us)
    listed = (f"{us:.1f} µs ({x:.0%}, {units.time(1e3 * ms)} at a time)" for us, x, ms in found)
    return {
        "probe_us": full_us,
        "full_speed_share": round(at_full / len(target.probes_us), 4),
        "core_speeds": ", ".join(listed),
        "speed_slope": round(most_slope(other.at_speeds for other in together), 4),
    }


def timed_record(
    trial: Trial,
    target: Target,
    together: Iterable[Target],
    instruments: Instruments,
    marks: CounterMarks,
) -> Record:
    """The record of a cell whose timing has ended, well or not; of those timed `together`."""
    trial.spent_s |= {"warm-up": target.warm_s, "samples": target.spent_s}
    if target.error is not None:
        trial.fail("samples", target.error)
        return trial.record()
    clock = instruments.clock
    trial.metrics |= {"l2": _cold_or_warm(trial, target, clock), "timer": clock.timer}
    if instruments.clock.l2 == "cold" and instruments.clock.timer == "host":
        trial.metrics["warm_us"] = trial.warm_us()
    if trial.shortest:
        trial.metrics["overhead_us"] = trial.overhead_us()
    if instruments.sensor is not None and instruments.sensor.problem:
        trial.metrics["sensor_note"] = instruments.sensor.problem
    disturbed = sum(s.disturbed for s in target.samples if s.discarded is None)
    trial.metrics |= {
        "kept_disturbed": target.kept_disturbed + disturbed,
        "window": target.window,
        "uneven": uneven(target, together),
    }
    if target.decided and target.decided[1] > 1:
        faster, times = target.decided
        trial.metrics |= {"lost_to": faster.partition(" ")[2], "lost_by": times}
    if target.probes_us:
        trial.metrics |= core_speed(target, instruments.watch.readings, together)
        calls = target.calls * target.batches * len(target.samples) * target.units
        cost_us, faults = page_fault_us(), target.page_faults / calls
        trial.metrics["page_faults"] = round(faults, 1)
        trial.metrics["page_faults_us"] = None if cost_us is None else faults * cost_us
        threads = int(median(target.at_work))
        if (allowed := host.affinity()) and threads > len(allowed):
            trial.metrics["crowded"] = f"{threads} threads on {units.counted(len(allowed), 'CPU')}"
    if target.spent_s:
        interrupted = target.interrupted / target.spent_s
        trial.metrics["interruptions_per_s"] = round(interrupted, 1)
        cpus = target.cpu_s / target.spent_s
        trial.metrics["cpu_share"] = round(cpus / torch.get_num_threads(), 4)
    trial.metrics |= marks.shares() | host.cell_facts() | _gpu(target)
    if target.compile_s:
        before = trial.metrics.get("compile_s") or 0.0
        trial.metrics["compile_s"] = before + target.compile_s
    if instruments.energy:
        begin = time.perf_counter()
        trial.metrics |= _energy(trial, instruments)
        trial.spent_s["energy"] = time.perf_counter() - begin
    trial.status = "ok"
    return trial.record(target.samples)


def _cold_or_warm(trial: Trial, target: Target, clock: Clock) -> str:
    """What the cache was before each call, or before each step of it."""
    if (clock.l2, clock.timer) != ("cold", "events") or trial.bound is None:
        return clock.l2
    steps, each_us = len(steps_of(trial.bound.call)), target.each_us
    return "cold first step" if steps > 1 and each_us < LEAST_STEP_US * steps else clock.l2


def _gpu(target: Target) -> dict[str, Any]:
    """What the GPU said after the samples, averaged; nothing on CPU or where it says nothing."""
    kept = [sample for sample in target.samples if sample.discarded is None]
    readings = target.readings
    throttle = Counter(reason for reading in readings for reason in reading.throttle or ())
    shares = [f"{why} {count / len(readings):.0%}" for why, count in throttle.most_common()]
    metrics = {
        "enqueue_us": _of_known(median, (sample.enqueue_us for sample in kept)),
        "hidden_us": _of_known(median, (sample.hidden_us for sample in kept)),
        "sm_mhz": _of_known(fmean, (reading.sm_mhz for reading in readings)),
        "power_w": _of_known(fmean, (reading.power_w for reading in readings)),
        "temperature_c": _of_known(fmean, (reading.temperature_c for reading in readings)),
        "power_state": power_state(readings),
        "throttle": ", ".join(shares) or None,
    }
    for name in ("power_held_us", "heat_held_us"):  # from the first reading to the last
        held = [us for reading in readings if (us := getattr(reading, name)) is not None]
        metrics[name] = held[-1] - held[0] if held else None
    return {name: value for name, value in metrics.items() if value is not None}


def _of_known(function: Callable[[list[float]], float], values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return function(known) if known else None


def _energy(trial: Trial, instruments: Instruments) -> dict[str, Any]:
    assert trial.bound is not None
    assert instruments.sensor is not None, "--energy is refused where there is no GPU"
    try:
        with torch.set_grad_enabled(trial.bound.grad):
            found = measure_energy(trial.bound.call, instruments.sensor)
    except Exception as err:  # the time was measured, and stays
        return {"energy_note": f"energy: {type(err).__name__}: {' '.join(str(err).split())[:200]}"}
    per_unit = None if found.energy_j is None else found.energy_j / trial.bound.units
    return {
        "energy_j": per_unit,
        "energy_note": found.reason,
        "idle_power_w": found.idle_power_w,
    }
