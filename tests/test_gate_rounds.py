"""Rounds in real processes, on tiny problems: what happens, never how fast."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import Failure, Rules, Version, VersionName
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.protocol import (
    CellFailed,
    CellVerified,
    Prepared,
    SampleTaken,
    TakeSample,
    VariantConfig,
    VerifyCell,
)
from attnbench.gate.run import rounds
from attnbench.gate.run.processes import ProcessError, RoundProcesses
from attnbench.gate.run.rounds import Bench, measure_round
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from tests.conftest import lives, wait_until

HEADER = """
import os, time
import torch
from attnbench.api import attention

sdpa = torch.nn.functional.scaled_dot_product_attention
"""
KERNEL = """
CALLS_{name}, KEPT_{name} = [], []

@attention("{name}")
def {name}(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    CALLS, KEPT = CALLS_{name}, KEPT_{name}
    CALLS.append(1)
    {trouble}
    return sdpa(q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale)
"""
# Right at first; later the output of earlier inputs, whatever the inputs are now.
STALE = """
    if len(CALLS) == 5:
        KEPT.append(sdpa(q_BHLD, k_BGSD, v_BGSV))
    if len(CALLS) > 5:
        return KEPT[0]"""
# Always right, and done once for the same inputs from the third call on: the work is long, to be
# sure. Torch counts the changes of a tensor.
MEMO = """
    key = q_BHLD.data_ptr(), q_BHLD._version
    KEPT[:] = [x for x in KEPT if x[0] == key] + [[key, None]]
    if len(KEPT) < 3 or KEPT[0][1] is None:
        time.sleep(0.05)
        KEPT[0][1] = sdpa(q_BHLD, k_BGSD, v_BGSV) if len(KEPT) > 2 else None
        return sdpa(q_BHLD, k_BGSD, v_BGSV)
    del KEPT[3:]
    return KEPT[0][1]"""
# Slow once, in the first call after its inputs changed: so looks one that is interrupted.
HICCUP = """
    KEPT.append(q_BHLD._version)
    if len(set(KEPT)) == 2 and KEPT.count(KEPT[-1]) == 1:
        time.sleep(0.1)"""
GARBAGE = """
    for descriptor in range(3, 64):
        try: os.write(descriptor, b"garbage\\n")
        except OSError: pass"""
PLAN = RoundPlan(stage="screen", cells=(0, 1), slowed=1)


def of_both(settings: Settings) -> dict[VersionName, Settings]:
    return {"base": settings, "candidate": settings}


def a_side(folder: Path, name, kernels: dict[str, str]) -> Version:
    root = folder / name
    root.mkdir()
    file = root / "mine.py"
    texts = [KERNEL.format(name=name, trouble=trouble) for name, trouble in kernels.items()]
    file.write_text(HEADER + "".join(texts))
    return Version(name=name, root=str(root), files=(str(file),))


def a_bench(folder: Path, **troubles: str) -> Bench:
    """`mine` and `other`, or what there is `troubles` with on the candidate's side alone."""
    case = Case(workload="attention", device="cpu", seq_len=16, heads=1, head_dim=8)
    kernels = dict.fromkeys(("mine", "other"), "pass") | dict.fromkeys(troubles, "pass")
    return Bench(
        base=a_side(folder, "base", kernels),
        candidate=a_side(folder, "candidate", kernels | troubles),
        cells=tuple(Cell(case=case, impl=name) for name in kernels),
        rules=Rules(),
        settings=of_both(Settings(device="cpu", threads=1, timeout_s=60.0)),
        cpus=(min(os.sched_getaffinity(0)),),
        rng=random.Random(0),
    )


def test_a_round_whose_processor_times_say_nothing_has_none(tmp_path):
    """Of several threads, or on a GPU."""
    bench = a_bench(tmp_path)
    bench.settings = of_both(replace(bench.settings["base"], threads=2))
    found = measure_round(bench, RoundPlan(stage="screen", cells=(0,), slowed=None), 0)
    assert set(found.samples[0]) == {"base", "candidate", "null"}
    assert found.cpu == {}


def test_what_fails_before_it_is_timed_costs_its_cell_and_has_its_code(tmp_path):
    """Each goes on to the next cell, but for what ends the process: the last is to blame."""
    bench = a_bench(
        tmp_path, full="raise MemoryError('full')", wrong="return torch.zeros_like(q_BHLD)",
        clock="time.perf_counter_ns = lambda: 0",
    )  # fmt: skip
    found = measure_round(bench, RoundPlan(stage="screen", cells=(0, 2, 3, 4), slowed=0), 0)
    assert not found.samples
    assert {cell: (why.variant, why.code) for cell, why in found.failures.items()} == {
        2: ("candidate", "oom"), 3: ("candidate", "incorrect"), 4: ("candidate", "incorrect"),
    }  # fmt: skip
    reasons = [found.failures[cell].reason for cell in (2, 3, 4)]
    starts = ("build and check: full", "o is off by", "it replaces the clock")
    assert all(map(str.startswith, reasons, starts)), reasons


def test_what_ends_a_process_while_it_is_timed_breaks_the_round_off(tmp_path):
    bench = a_bench(tmp_path, dies="if len(CALLS) > 6: os.kill(os.getpid(), 11)")
    found = measure_round(bench, RoundPlan(stage="screen", cells=(2,), slowed=None), 0)
    assert not found.samples
    assert not found.facts.get("grown")
    reason = "killed by signal 11 (SIGSEGV)"
    assert found.failures == {2: Failure(variant="candidate", code="crashed", reason=reason)}


def test_what_fails_when_it_is_asked_has_its_code(tmp_path):
    """In one round's processes, one after the other: what ends one comes last.

    A late import of the other side's is refused.
    """
    troubles = {
        "raises": "if len(CALLS) > 4: raise RuntimeError('no more')",
        "stale": STALE,
        "memo": MEMO,
        "hiccup": HICCUP,
        "garbled": f"if len(CALLS) > 6:{textwrap.indent(GARBAGE, '    ')}",
        "silent": "if len(CALLS) > 6: time.sleep(3600)",
    }
    bench = a_bench(tmp_path, **troubles)
    (tmp_path / "base" / "kin.py").write_text("")
    imports = f"import sys; sys.path.append({str(tmp_path / 'base')!r}); import kin"
    late = a_side(tmp_path, "late", dict.fromkeys(troubles, "pass") | {"mine": imports})
    sides: Any = [
        ("candidate", bench.candidate, bench.base),
        ("base", bench.candidate, bench.base),
        ("null", replace(late, name="base"), bench.base),
    ]
    config = partial(
        VariantConfig, cells=dict(enumerate(bench.cells)), device="cpu", threads=1, seed=0,
        cpu=None,
    )  # fmt: skip
    with RoundProcesses(sides, config, bench.settings) as processes:
        assert processes.prepared("candidate").failures == {}
        assert processes.prepared("base").failures == {}
        with pytest.raises(UsageError, match=r"imports kin from the other side"):
            processes.prepared("null")

        def failure(variant, request, within_s=30.0):
            kind: Any = SampleTaken | CellVerified
            with pytest.raises(ProcessError) as caught:
                processes.ask(variant, request, kind, within_s)
            found = caught.value.failure
            assert (caught.value.cell, found.variant) == (request.cell, variant)
            return found.code, found.reason

        def sampled(cell):
            request = TakeSample(cell, 2, 4)
            ns: list[int] = []
            while len(ns) < 8:  # 0 is a clock that stood still
                taken = processes.ask("candidate", request, SampleTaken)
                ns += [each for each in taken.ns if each > 0]
            return min(ns) / 1000

        assert failure("candidate", TakeSample(2, 9, 9)) == (
            "error", "sample: RuntimeError: no more",
        )  # fmt: skip
        code, reason = failure("candidate", VerifyCell(3, sampled(3), 20.0))
        assert (code, reason[:12]) == ("incorrect", "o is off by ")
        memo, hiccup = (
            processes.ask("candidate", VerifyCell(cell, sampled(cell), 20.0), CellVerified)
            for cell in (4, 5)
        )
        assert memo.changed_ratio > 20 >= hiccup.changed_ratio
        assert failure("candidate", TakeSample(6, 9, 9))[0] == "crashed"
        assert failure("base", TakeSample(7, 9, 9), 1.0) == ("timeout", "no answer for 1 s")


class Answers:
    """Processes that answer at once; keeps what they were asked."""

    def __init__(self, ratios: dict[str, float] | None = None, ns: int = 1000) -> None:
        self.ratios, self.ns = ratios or {}, ns
        self.asked: list[tuple[str, Any]] = []
        self.noise, self.rng = 0.0, random.Random(0)

    def ask(self, variant, request, kind, within_s=0.0):
        self.asked.append((variant, request))
        if isinstance(request, TakeSample):
            times = (round(self.ns * (1 + self.noise * self.rng.random())),) * request.batches
            return SampleTaken(times, 1 << 20, times)
        return kind(self.ratios[variant])


def test_a_cell_of_the_control_alone_is_timed_in_base_and_slowed(tmp_path):
    answers: Any = Answers()
    bench, plan = a_bench(tmp_path), RoundPlan(stage="confirm", cells=(), slowed=0)
    samples, cpu, _ = rounds._visit(bench, answers, plan, 0)
    assert set(samples) == {"base", "planted"}
    assert cpu == samples
    slowed = {(variant, request.slowdown) for variant, request in answers.asked}
    assert slowed == {("base", None), ("null", 0.1)}
    answers.ns = 0
    with pytest.raises(ProcessError, match="its clock stood still"):
        rounds._visit(replace(bench, each_us={}), answers, PLAN, 0)


def test_samples_are_taken_for_longer_where_their_ratios_scatter_and_only_so_long(
    tmp_path, monkeypatch
):
    clock, bench = itertools.count(), a_bench(tmp_path)
    monkeypatch.setattr("attnbench.gate.run.rounds.time.perf_counter", lambda: next(clock))
    bench.each_us[0] = 1000.0, 1000.0

    def visits(noise: float, longer_s: float) -> int:
        answers: Any = Answers(ns=1_000_000)
        answers.noise = noise
        samples, *_ = rounds._visit(bench, answers, PLAN, 0, longer_s)
        return len(samples["base"]) // 2

    planned = visits(0.0, 100.0)
    assert visits(0.02, 100.0) == visits(1.0, 0.0) == planned == rounds.MOST_VISITS
    assert planned < visits(1.0, 10.0) < planned + 10 < visits(1.0, 100.0)


@pytest.mark.parametrize(("device", "visits"), [("cpu", 15), ("cuda", 3)])
def test_the_flushes_of_cold_calls_are_part_of_what_a_cell_may_take(
    tmp_path, monkeypatch, device, visits
):
    """A call of 10 µs that stands behind one of 140 µs, on a GPU alone."""
    now, bench = [0.0], replace(a_bench(tmp_path), settings=of_both(Settings(device=device)))
    answers: Any = Answers(ns=10_000)
    ask = answers.ask

    def slow_ask(variant, request, kind, within_s=0.0):
        now[0] += 150e-6 * request.batches * request.calls
        return ask(variant, request, kind)

    answers.ask = slow_ask
    monkeypatch.setattr("attnbench.gate.run.rounds.time.perf_counter", lambda: now[0])
    samples, *_ = rounds._visit(bench, answers, PLAN, 0)
    assert {len(taken) for taken in samples.values()} == {2 * visits}


def test_what_fails_in_both_is_the_bases_and_files_that_change_are_noticed(tmp_path):
    bench, failed = a_bench(tmp_path), CellFailed("crashed", "")

    class Prepares:
        def prepared(self, variant):
            return Prepared({0: failed} if variant != "null" else {}, {"mine.py": variant[:1]})

    answers: Any = Prepares()
    assert rounds._prepare(bench, answers, ["base", "candidate"])[0].variant == "base"
    assert rounds._prepare(bench, answers, ["candidate", "base"])[0].variant == "base"
    assert bench.digests == {"base": {"mine.py": "b"}, "candidate": {"mine.py": "c"}}
    with pytest.raises(UsageError, match=r"base changed while they were measured"):
        rounds._prepare(bench, answers, ["null"])


@pytest.mark.parametrize(("null", "blamed"), [(30.0, False), (1.0, True)])
def test_what_the_base_does_as_well_against_itself_is_not_held_against_the_candidate(null, blamed):
    """One of the two processes of the base is enough to doubt the reading."""
    ratios = {"base": 1.0, "candidate": 50.0, "null": null}
    samples: Any = dict.fromkeys(ratios, ((1000,),))
    answers: Any = Answers(ratios)
    with pytest.raises(ProcessError) if blamed else nullcontext() as caught:
        rounds._verify(answers, 0, samples)
    if caught is not None:
        assert (caught.value.failure.code, caught.value.cell) == ("incorrect", 0)


def test_a_round_is_discarded_by_counters_beyond_their_limits():
    before = {"wall": 1.0, "own": 0.0, "stolen": 5.0, "busy": 3.0}
    after = {"wall": 3.0, "own": 2.0, "stolen": 5.4, "busy": 5.5, "withheld": 1.0}
    assert rounds.taken_by_others(before, after) == {"stolen": 0.2, "foreign": 0.25}
    assert rounds.why_discarded({}) is None
    assert rounds.why_discarded({"stolen": 0.1, "foreign": 0.5, "withheld": 0.1}) is None
    assert rounds.why_discarded({"stolen": 0.11}) == "the hypervisor took 11% of a CPU"
    assert rounds.why_discarded({"foreign": 0.51})
    assert rounds.why_discarded({"foreign": 0.51}, accounted=True) is None
    assert rounds.why_discarded({"stolen": 0.11}, accounted=True)
    assert rounds.why_discarded({"withheld": 0.11})


def test_no_process_outlives_a_runner_that_is_killed(tmp_path):
    """The kernel ends them all with their parent, in the middle of a call if need be."""
    script = tmp_path / "runner.py"
    script.write_text(
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_gate_rounds import *\n"
        "bench = a_bench(Path(sys.argv[2]), mine='if len(CALLS) > 6: time.sleep(3600)')\n"
        "measure_round(bench, PLAN, 0)\n"
    )
    folder = tmp_path / "sides"
    folder.mkdir()
    root = Path(__file__).resolve().parent.parent
    runner = subprocess.Popen([sys.executable, str(script), str(root), str(folder)])
    try:
        server = wait_until(psutil.Process(runner.pid).children)
        members = wait_until(lambda: found if len(found := server[0].children()) == 3 else [])
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    wait_until(lambda: not any(lives(process.pid) for process in (*server, *members)))
