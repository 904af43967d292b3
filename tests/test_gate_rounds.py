"""Rounds in real processes, on tiny problems: what happens, never how fast."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import Rules, Version
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.run import rounds
from attnbench.gate.run.processes import ProcessError
from attnbench.gate.run.rounds import Bench, RoundError, measure_round
from attnbench.schema.case import Case
from attnbench.schema.record import Cell

CODE = """
    import os, time
    import torch
    from attnbench.api import attention

    CALLS = 0
    KEPT = []

    @attention("mine")
    def mine(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        global CALLS
        CALLS += 1
        {trouble}
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale
        )

    @attention("other")
    def other(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        return torch.nn.functional.scaled_dot_product_attention(q_BHLD, k_BGSD, v_BGSV)
"""
# Right at first; later the output of earlier inputs, whatever the inputs are now.
STALE = """
    if CALLS == 5:
        KEPT.append(torch.nn.functional.scaled_dot_product_attention(q_BHLD, k_BGSD, v_BGSV))
    if CALLS > 5:
        return KEPT[0]"""
# Always right, and done once for the same inputs from the third call on: the work is long, to be
# sure. Torch counts the changes of a tensor.
MEMO = """
    sdpa = torch.nn.functional.scaled_dot_product_attention
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
PLAN = RoundPlan(stage="screen", cells=(0, 1), slowed=1)


def a_side(folder: Path, name, trouble: str = "pass") -> Version:
    root = folder / name
    root.mkdir()
    file = root / "mine.py"
    file.write_text(textwrap.dedent(CODE).format(trouble=trouble))
    return Version(name=name, root=str(root), files=(str(file),))


def a_bench(folder: Path, trouble: str = "pass", timeout_s: float = 60.0) -> Bench:
    case = Case(workload="attention", device="cpu", seq_len=16, heads=1, head_dim=8)
    references = folder / "references"
    references.mkdir()
    return Bench(
        base=a_side(folder, "base"),
        candidate=a_side(folder, "candidate", trouble),
        cells=(Cell(case=case, impl="mine"), Cell(case=case, impl="other")),
        rules=Rules(),
        settings=Settings(device="cpu", threads=1, timeout_s=timeout_s),
        references=references,
        cpus=(min(os.sched_getaffinity(0)),),
        rng=random.Random(0),
    )


def test_a_round_times_all_variants_alike_leaves_no_process_and_notices_edits(
    tmp_path, monkeypatch
):
    processes: list[int] = []
    prepare = rounds._prepare

    def prepared(bench, running, variants):
        found = prepare(bench, running, variants)
        server = running._servers["base"][1].process.pid
        processes.extend([server, *children_of(server)])
        return found

    monkeypatch.setattr(rounds, "_prepare", prepared)
    bench = a_bench(tmp_path)
    found = measure_round(bench, PLAN, 0)
    assert not found.failures
    assert {cell: set(of) for cell, of in found.samples.items()} == {
        0: {"base", "candidate", "null"},
        1: {"base", "candidate", "null", "planted"},
    }
    for of in found.samples.values():
        assert len({(len(samples), len(samples[0])) for samples in of.values()}) == 1
        assert all(ns > 0 for samples in of.values() for batches in samples for ns in batches)
    assert found.slowed == 1
    assert found.facts["cpu"] == min(os.sched_getaffinity(0))
    assert len(processes) == 4
    wait_until_gone(processes)
    for version in (bench.base, bench.candidate):
        assert [path.name for path in Path(version.root).rglob("*")] == ["mine.py"]
    file = Path(bench.candidate.files[0])
    file.write_text(file.read_text() + "\n# edited meanwhile\n")
    with pytest.raises(match="candidate"):
        measure_round(bench, PLAN, 1)


def test_a_cell_of_the_control_alone_is_timed_in_base_and_slowed(tmp_path):
    found = measure_round(a_bench(tmp_path), RoundPlan(stage="confirm", cells=(), slowed=0), 0)
    assert {cell: set(of) for cell, of in found.samples.items()} == {0: {"base", "planted"}}


GARBAGE = """
    if CALLS > 6:
        for descriptor in range(3, 64):
            try: os.write(descriptor, b"garbage\\n")
            except OSError: pass"""


@pytest.mark.parametrize(
    ("trouble", "code", "reason"),
    [
        ("if CALLS > 6: os.kill(os.getpid(), 11)", "crashed", "killed by signal 11 (SIGSEGV)"),
        ("if CALLS > 6: raise RuntimeError('no more')", "error", "sample: RuntimeError: no more"),
        ("if CALLS == 1: raise MemoryError('full')", "oom", "build and check: full"),
        ("if CALLS == 1: print('so long'); os._exit(7)", "crashed", "exit code 7"),
        ("if CALLS > 6: time.sleep(3600)", "timeout", "no answer for 2"),
        ("return torch.zeros_like(q_BHLD)", "incorrect", "o is off by"),
        (STALE, "incorrect", "o is off by"),
        (MEMO, "incorrect", "it returns a cached result: a call takes"),
        ("time.perf_counter_ns = lambda: 0", "incorrect", "it replaces the clock"),
        (GARBAGE, "crashed", "it writes to a file descriptor"),
    ],
)
def test_what_fails_costs_its_cell_and_has_its_code(tmp_path, monkeypatch, trouble, code, reason):
    monkeypatch.setattr(rounds, "PATIENCE_S", 2.0 if code == "timeout" else 30.0)
    found = measure_round(a_bench(tmp_path, trouble), PLAN, 0)
    assert not found.samples
    assert not found.facts.get("grown")
    assert list(found.failures) == [0]
    assert (found.failures[0].variant, found.failures[0].code) == ("candidate", code)
    assert found.failures[0].reason.startswith(reason)


def test_one_slow_call_after_its_inputs_changed_proves_nothing(tmp_path):
    found = measure_round(a_bench(tmp_path, HICCUP), PLAN, 0)
    assert (found.failures, set(found.samples)) == ({}, {0, 1})


@pytest.mark.parametrize(("null", "blamed"), [(30.0, False), (1.0, True)])
def test_what_the_base_does_as_well_against_itself_is_not_held_against_the_candidate(null, blamed):
    """One of the two processes of the base is enough to doubt the reading."""
    ratios = {"base": 1.0, "candidate": 50.0, "null": null}

    class Answers:
        def ask(self, variant, request, kind):
            return kind(ratios[variant])

    samples: Any = dict.fromkeys(ratios, ((1000,),))
    answers: Any = Answers()
    with pytest.raises(ProcessError) if blamed else nullcontext() as caught:
        rounds._verify(answers, 0, samples)
    if caught is not None:
        assert (caught.value.failure.code, caught.value.cell) == ("incorrect", 0)


def test_a_round_is_vetoed_by_counters_beyond_their_limits():
    assert rounds.why_vetoed({}) is None
    assert rounds.why_vetoed({"stolen": 0.1, "foreign": 0.5, "withheld": 0.1}) is None
    assert rounds.why_vetoed({"stolen": 0.11})
    assert rounds.why_vetoed({"foreign": 0.51})
    assert rounds.why_vetoed({"withheld": 0.11})


def test_a_failure_outside_of_any_cell_blames_none_and_late_foreign_imports_are_refused(tmp_path):
    bench = a_bench(
        tmp_path, f"import sys; sys.path.append({str(tmp_path / 'base')!r}); import kin"
    )
    (tmp_path / "base" / "kin.py").write_text("")
    with pytest.raises(UsageError, match=r"imports kin from the other side"):
        measure_round(bench, PLAN, 0)
    graph = Settings(device="cpu", threads=1, timer="graph")
    with pytest.raises(RoundError, match="--timer graph is not for cpu"):
        measure_round(replace(bench, settings=graph), PLAN, 0)


def test_no_process_outlives_a_runner_that_is_killed(tmp_path):
    """The kernel ends them all with their parent, in the middle of a call if need be."""
    script = tmp_path / "runner.py"
    script.write_text(
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_gate_rounds import *\n"
        "bench = a_bench(Path(sys.argv[2]), 'if CALLS > 6: time.sleep(3600)')\n"
        "measure_round(bench, PLAN, 0)\n"
    )
    folder = tmp_path / "sides"
    folder.mkdir()
    root = Path(__file__).resolve().parent.parent
    runner = subprocess.Popen([sys.executable, str(script), str(root), str(folder)])
    try:
        server = first(lambda: children_of(runner.pid))
        members = first(lambda: found if len(found := children_of(server[0])) == 3 else [])
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    wait_until_gone([*server, *members])


def children_of(process: int) -> list[int]:
    try:
        return [
            int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def first(what, patience_s: float = 60.0):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("it never came")


def wait_until_gone(processes: list[int]) -> None:
    first(lambda: not any(alive(process) for process in processes))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended; whoever adopted it is slow to take note
