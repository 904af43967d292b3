"""One round: fresh processes of both versions, interleaved, cell by cell."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from attnbench.base.stats import median
from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.gate import protocol
from attnbench.gate.decide.data import (
    Failure,
    GateCell,
    Round,
    RoundFacts,
    Rules,
    Sample,
    Samples,
    Variant,
    Version,
    VersionName,
)
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.run.processes import ProcessError, RoundProcesses
from attnbench.machine import host

# A cell gets about this much of each process's time in a round, in batches of this length at least.
VARIANT_US = 60_000.0
BATCH_US = 1000.0
# Batches in a sample: few, so that those of base and candidate that make a pair lie close together.
BATCHES = 2
# Each visit is the variants in a random order and back: at least one, so that each has two samples;
# three where that takes no more than five times as long.
MOST_VISITS, LEAST_VISITS, LONGER = 15, 3, 5.0
ROUNDS = 30  # that are to fit into the budget, where samples are taken for longer than planned
UNTIMED_US = 10_000.0  # of so long a call the caches of another are a small part
# A call after a change of its inputs has colder caches; a result that was kept is another matter.
REMEMBERED = 20.0
CLOCK_TRIES = 3  # of a sample in which a clock stood still or stepped back
# How long a sample may take beyond all expectation before its process is given up.
PATIENCE_S, PATIENCE_FACTOR = 30.0, 50.0

PROCESSES: tuple[Variant, ...] = ("base", "candidate", "null")
# Shares of a round's wall time beyond which it is measured again: of one CPU, by the hypervisor;
# CPUs that others kept busy, on the CPUs that are ours; by a CPU quota.
_LIMITS = {
    "stolen": (0.10, "the hypervisor took {:.0%} of a CPU"),
    "foreign": (0.50, "other processes kept {:.2g} CPUs busy"),
    "withheld": (0.10, "the CPU quota withheld {:.0%}"),
}
_TICK_S = 0.01


@dataclass(kw_only=True)
class Bench:
    """All that rounds share. `injected` slows the candidate in some cells: for validation alone.

    `settings` are those of each version; `each_us` remembers how long a call takes, and with all
    that goes with it, so that every round plans the same batches; `digests` what the files of each
    version held when first loaded; `processes` makes those of a round.
    """

    base: Version
    candidate: Version
    cells: tuple[GateCell, ...]
    rules: Rules
    settings: Mapping[VersionName, Settings]
    cpus: tuple[int, ...] | None
    rng: random.Random
    injected: Mapping[int, float] = field(default_factory=dict)
    each_us: dict[int, tuple[float, float]] = field(default_factory=dict)
    digests: dict[VersionName, dict[str, str]] = field(default_factory=dict)
    processes: Callable[..., RoundProcesses] = RoundProcesses


class RoundError(Exception):
    """A process of a round failed before it was at any cell; the message says how."""


def measure_round(bench: Bench, plan: RoundPlan, number: int) -> Round:
    """Measure one round in fresh processes; what fails in it is part of the round.

    Raises:
        RoundError: a process failed, and no cell is to blame.
        UsageError: a version's code was edited meanwhile, or imports the other's.
        WorkerError: no process can be started.
    """
    begin = time.perf_counter()
    cpu = bench.cpus[number % len(bench.cpus)] if bench.cpus else None
    cells = list(dict.fromkeys((*plan.cells, *([] if plan.slowed is None else [plan.slowed]))))
    versions: list[tuple[Variant, Version, Version]] = [
        ("base", bench.base, bench.candidate),
        ("candidate", bench.candidate, bench.base),
        ("null", bench.base, bench.candidate),
    ]
    bench.rng.shuffle(versions)  # who is forked first has other memory

    settings = bench.settings["base"]
    config = partial(
        protocol.VariantConfig, cells={cell: bench.cells[cell] for cell in cells},
        device=settings.device, threads=settings.threads, seed=settings.seed, cpu=cpu,
    )  # fmt: skip
    samples, cpu_times, grown = {}, {}, {}
    facts, reason = RoundFacts(), None
    with bench.processes(versions, config, bench.settings) as processes:
        try:
            failures = _prepare(bench, processes, [variant for variant, *_ in versions])
            if not failures:
                before, _ = _read_counters(processes)
                bench.rng.shuffle(cells)
                ready_s = time.perf_counter() - begin
                longer_s = min(ready_s, bench.rules.budget_s / ROUNDS - ready_s) / len(cells)
                for cell in cells:
                    samples[cell], used, grown[str(cell)] = _visit(
                        bench, processes, plan, cell, longer_s
                    )
                    if used:
                        cpu_times[cell] = used
                after, reason = _read_counters(processes)
                facts = taken_by_others(before, after)
                reason = reason or why_discarded(facts, accounted=bool(cpu_times))
                facts |= RoundFacts(cpu=cpu, grown=grown)
                for cell in plan.cells:
                    _verify(processes, cell, samples[cell])
        except ProcessError as err:
            if err.cell is None:
                raise RoundError(str(err)) from err
            failures = {err.cell: err.failure}
    if failures:  # broken off: what it timed counts for nothing
        samples, cpu_times = {}, {}
        facts.pop("grown", None)
    return Round(
        stage=plan.stage, samples=samples, cpu=cpu_times, failures=failures, discarded=reason,
        facts=facts, spent_s=round(time.perf_counter() - begin, 3),
    )  # fmt: skip


def _prepare(
    bench: Bench, processes: RoundProcesses, variants: list[Variant]
) -> dict[int, Failure]:
    """Wait until all processes are ready; return the cells that some cannot time.

    What fails in base and candidate alike is not the candidate's fault: the base is named.
    """
    failures: dict[int, Failure] = {}
    for variant in variants:
        prepared = processes.prepared(variant)
        version = bench.candidate if variant == "candidate" else bench.base
        known = bench.digests.setdefault(version.name, {})
        for file, digest in prepared.digests.items():  # not always the same: some import late
            if known.setdefault(file, digest) != digest:
                raise UsageError(
                    f"files below {version.root} changed while they were measured; leave them"
                    " alone and run again"
                )
        for cell, failed in prepared.failures.items():
            if cell not in failures or variant != "candidate":
                failures[cell] = Failure(variant=variant, code=failed.code, reason=failed.reason)
    return failures


def _visit(
    bench: Bench, processes: RoundProcesses, plan: RoundPlan, cell: int, longer_s: float = 0.0
) -> tuple[dict[Variant, Samples], dict[Variant, Samples], dict[str, int]]:
    """Every variant's samples in one cell: in a random order and back, as often as time allows.

    And for up to `longer_s` more while their ratios scatter too much for one observation: what a
    round costs before it times anything is best spent on a good one. How far they scatter is alike
    for base and candidate, and favours neither.

    Also their CPU times, where known; and by how many bytes each process has grown between its
    first sample and its last.
    """
    variants: list[Variant] = [*PROCESSES] if cell in plan.cells else ["base"]
    slowdown: dict[Variant, float] = {"planted": bench.rules.threshold}
    if cell == plan.slowed:
        variants.append("planted")
    if cell in bench.injected:
        slowdown["candidate"] = bench.injected[cell]
    if cell not in bench.each_us:
        bench.each_us[cell] = _estimate_us(processes, cell, bench.settings["base"].device)
    each_us, wall_us = bench.each_us[cell]
    # Planned by the length of a call alone.
    calls = max(1, math.ceil(BATCH_US / each_us))
    fit = VARIANT_US / (2 * BATCHES * calls * wall_us)
    visits = int(max(1, min(fit, MOST_VISITS), min(LONGER * fit, LEAST_VISITS)))
    patience_s = PATIENCE_S + PATIENCE_FACTOR * each_us * 1e-6 * (1 + calls * BATCHES)
    samples: dict[Variant, list[Sample]] = {variant: [] for variant in variants}
    used: dict[Variant, list[Sample]] = {}
    held: dict[str, list[int]] = {}
    until_s, visit = math.inf, 0
    while True:
        visit += 1
        bench.rng.shuffle(variants)
        for variant in variants + variants[::-1]:
            process: Variant = "null" if variant == "planted" else variant
            request = protocol.TakeSample(
                cell, calls, BATCHES, each_us < UNTIMED_US, slowdown.get(variant)
            )
            for _ in range(CLOCK_TRIES):
                taken = processes.ask(process, request, protocol.SampleTaken, patience_s)
                if min(taken.ns) > 0:
                    break
            else:
                reason = "its clock stood still or stepped back"
                raise ProcessError(Failure(variant=variant, code="error", reason=reason), cell)
            samples[variant].append(taken.ns)
            if taken.cpu_ns:
                used.setdefault(variant, []).append(tuple(max(1, ns) for ns in taken.cpu_ns))
            if variant != "planted":
                held.setdefault(variant, []).append(taken.held_bytes)
        if visit >= visits:
            until_s = min(until_s, time.perf_counter() + longer_s)
            of, cpu = ({v: tuple(x) for v, x in each.items()} for each in (samples, used))
            seen = Round(stage=plan.stage, samples={cell: of}, cpu={cell: cpu} if cpu else {})
            if time.perf_counter() >= until_s or _scatter(seen, cell) <= bench.rules.margin / 3:
                return of, cpu, {variant: each[-1] - each[0] for variant, each in held.items()}


def _scatter(seen: Round, cell: int) -> float:
    """The standard error of the median over pairs, of the variant in which it is the largest.

    For normal errors, by the median of the distances from the median: 1.48 · 1.25 · that / √n.
    """
    errors = [0.0]
    for variant in seen.samples[cell].keys() - {"base"}:
        pairs = seen.pairs(cell, variant)
        middle = median(pairs)
        errors.append(1.86 * median([abs(x - middle) for x in pairs]) / math.sqrt(len(pairs)))
    return max(errors)


def _estimate_us(processes: RoundProcesses, cell: int, device: str) -> tuple[float, float]:
    """How long a call of the base takes: of one, or of as many as fill a batch.

    And with all that goes with it: on a GPU a flush and its launch may last ten times as long.
    """

    def fastest_us(calls: int) -> tuple[float, float]:
        request, begin = protocol.TakeSample(cell, calls, 2), time.perf_counter()
        taken = processes.ask("base", request, protocol.SampleTaken)
        wall_us = (time.perf_counter() - begin) * 1e6 / (2 * calls)
        # Of two batches the longer: a clock that stood still would ask for millions of calls.
        both = zip(taken.ns, taken.cpu_ns or taken.ns, strict=True)
        each_us = max(0.01, *(min(pair) / 1000 for pair in both))
        return each_us, max(each_us, wall_us) if device == "cuda" else each_us

    once_us, wall_us = fastest_us(1)
    return (once_us, wall_us) if once_us >= BATCH_US else fastest_us(math.ceil(BATCH_US / once_us))


def _verify(processes: RoundProcesses, cell: int, samples: Mapping[Variant, Samples]) -> None:
    """See that what was timed is still right, and not remembered; raise ProcessError otherwise."""

    def ratio(variant: Variant) -> float:
        fastest_us = median(map(min, samples[variant])) / 1000
        request = protocol.VerifyCell(cell, fastest_us, REMEMBERED)
        return processes.ask(variant, request, protocol.CellVerified).changed_ratio

    base, candidate = ratio("base"), ratio("candidate")
    # What either process of the base does as well is the machine's doing, or the case's.
    if candidate > REMEMBERED >= base and ratio("null") <= REMEMBERED:
        longer = f"a call takes {candidate:.0f} times as long once its inputs have changed"
        reason = f"it returns a cached result: {longer}"
        raise ProcessError(Failure(variant="candidate", code="incorrect", reason=reason), cell)


def _read_counters(processes: RoundProcesses) -> tuple[dict[str, float], str | None]:
    """Seconds so far by the system's counters, where known; why a GPU's sensors discard the round.

    Never its times: `wall` and `own`, the processor time that the round itself has used, are what
    the others are held against.
    """
    answers = [
        processes.ask(of, protocol.ReadCounters(), protocol.CountersRead) for of in PROCESSES
    ]
    found = {
        "wall": time.perf_counter(),
        "own": sum(answer.cpu_ns for answer in answers) / 1e9 + time.process_time(),
    }
    for name, count, unit_s in (
        ("stolen", host.stolen_ticks(), _TICK_S),
        ("busy", host.busy_ticks(), _TICK_S),
        ("withheld", host.throttled_us(), 1e-6),
    ):
        if count is not None:
            found[name] = count * unit_s
    return found, next((answer.discarded for answer in answers if answer.discarded), None)


def taken_by_others(before: Mapping[str, float], after: Mapping[str, float]) -> RoundFacts:
    """Which shares of the wall time others took between two readings, where that is known."""
    spent = {name: after[name] - then for name, then in before.items() if name in after}
    if "busy" in spent:
        spent["foreign"] = spent["busy"] - spent["own"]
    wall_s = max(spent["wall"], 1e-9)
    shares = {name: round(max(0.0, spent[name]) / wall_s, 4) for name in _LIMITS if name in spent}
    return cast(RoundFacts, shares)


def why_discarded(facts: RoundFacts, *, accounted: bool = False) -> str | None:
    """Why a round in which others took these shares is measured again, or None.

    Where CPU time accounts for what other processes took from each batch, they discard nothing.
    """
    shares: Mapping[str, Any] = facts
    for name, (most, words) in _LIMITS.items():
        if shares.get(name, 0.0) > most and not (accounted and name == "foreign"):
            return words.format(shares[name])
    return None
