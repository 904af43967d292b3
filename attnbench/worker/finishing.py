"""From a contender that has left the race to its record: what was observed beside its times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from attnbench.base.stats import median
from attnbench.measure.energy import measure_energy
from attnbench.measure.nvml import power_state
from attnbench.measure.sampling import Contender
from attnbench.measure.watch import Ledger
from attnbench.schema.record import Cell, Record
from attnbench.worker.setup import Setup
from attnbench.worker.trial import Trial


def timed_record(trial: Trial, contender: Contender, setup: Setup, ledger: Ledger) -> Record:
    """The record of a cell whose timing has ended, well or not."""
    trial.spent_s |= {"warm-up": contender.warm_s, "samples": contender.spent_s}
    if contender.error is not None:
        trial.fail("samples", contender.error)
        return record_of(trial)
    trial.metrics |= _how(setup) | _conditions(contender) | ledger.metrics() | _gpu(contender)
    if contender.compile_s:
        before = trial.metrics.get("compile_s") or 0.0
        trial.metrics["compile_s"] = before + contender.compile_s
    if setup.energy:
        begin = time.perf_counter()
        trial.metrics |= _energy(trial, setup)
        trial.spent_s["energy"] = time.perf_counter() - begin
    trial.status = "ok"
    return record_of(trial, contender)


def record_of(trial: Trial, contender: Contender | None = None) -> Record:
    """The record of a trial that has come to an end."""
    assert trial.status is not None
    samples = contender.samples if contender and trial.status == "ok" else []
    return Record(
        cell=Cell(case=trial.case, impl=trial.impl.name),
        status=trial.status,
        reason=trial.reason,
        samples=tuple(samples),
        metrics=trial.metrics,
        spent_s={stage: round(seconds, 6) for stage, seconds in trial.spent_s.items()},
    )


def _how(setup: Setup) -> dict[str, Any]:
    found = {"l2": setup.clock.l2, "timer": setup.clock.timer}
    problem = setup.sensor.problem if setup.sensor is not None else None
    return found | ({"sensor_note": problem} if problem else {})


def _conditions(contender: Contender) -> dict[str, Any]:
    seen = contender.conditions
    metrics: dict[str, Any] = {"kept_disturbed": seen.kept_disturbed, "window": contender.window}
    if contender.spent_s:
        metrics["interruptions_per_s"] = round(seen.interrupted / contender.spent_s, 1)
        cpus = contender.cpu_s / contender.spent_s
        metrics["cpu_share"] = round(cpus / torch.get_num_threads(), 4)
    return metrics


def _gpu(contender: Contender) -> dict[str, Any]:
    """What the GPU said beside the blocks, averaged; nothing on CPU or where it says nothing."""
    kept = [sample for sample in contender.samples if sample.discarded is None]
    enqueue = [sample.enqueue_us for sample in kept if sample.enqueue_us is not None]
    clocks = [sample.sm_mhz for sample in kept if sample.sm_mhz is not None]
    readings = contender.conditions.readings
    metrics: dict[str, Any] = {}
    if enqueue:
        metrics["enqueue_us"] = median(enqueue)
    metrics |= {
        name: value
        for name, value in (
            ("sm_mhz", _mean(clocks) or _mean_of(readings, lambda r: r.sm_mhz)),
            ("power_w", _mean_of(readings, lambda r: r.power_w)),
            ("temperature_c", _mean_of(readings, lambda r: r.temperature_c)),
            ("power_state", power_state(readings)),
            ("throttle", _throttle(readings)),
        )
        if value is not None
    }
    return metrics


def _throttle(readings: list[Any]) -> str | None:
    """What slowed the GPU's clock, and in which share of the blocks; None where nothing did."""
    seen = Counter(reason for reading in readings for reason in reading.throttle or ())
    return ", ".join(f"{why} {n / len(readings):.0%}" for why, n in seen.most_common()) or None


def _energy(trial: Trial, setup: Setup) -> dict[str, Any]:
    assert trial.bound is not None
    assert setup.sensor is not None, "--energy is refused where there is no GPU"
    try:
        with torch.set_grad_enabled(trial.bound.grad):
            found = measure_energy(trial.bound.call, setup.sensor)
    except Exception as err:  # the time was measured, and stays
        return {"energy_note": f"energy: {type(err).__name__}: {' '.join(str(err).split())[:200]}"}
    per_unit = None if found.energy_j is None else found.energy_j / trial.bound.units
    return {
        "energy_j": per_unit,
        "energy_note": found.reason,
        "idle_power_w": found.idle_power_w,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_of(readings: list[Any], value: Callable[[Any], float | None]) -> float | None:
    return _mean([found for reading in readings if (found := value(reading)) is not None])
