"""Rounds of the gate on a real GPU: three fresh processes, forked before CUDA begins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from attnbench.base.stats import median
from attnbench.execution.process import Settings
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.run.rounds import BATCH_US, measure_round
from attnbench.gate.server.sampling import slowed_by_sleep
from attnbench.measure.clock import clock_for
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from tests.test_gate_rounds import a_bench, of_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_all_variants_are_timed_on_the_gpu(tmp_path):
    case = Case(workload="attention", device="cuda", seq_len=512, heads=4, head_dim=64)
    bench = replace(
        a_bench(tmp_path),
        cells=(Cell(case=case, impl="mine"), Cell(case=case, impl="other")),
        settings=of_both(Settings(device="cuda", timeout_s=120.0)),
        cpus=None,
    )
    found = measure_round(bench, RoundPlan(stage="screen", cells=(0, 1), slowed=1), 0)
    assert not found.failures
    assert set(found.samples[0]) == {"base", "candidate", "null"}
    assert set(found.samples[1]) == {"base", "candidate", "null", "planted"}
    assert all(min(map(min, taken)) > 0 for of in found.samples.values() for taken in of.values())


def test_a_call_of_some_microseconds_is_slowed_by_the_share():
    x = torch.randn(1 << 20, device="cuda")
    call = partial(torch.mul, x, 2.0, out=torch.empty_like(x))
    clock = clock_for("cuda")
    calls = math.ceil(BATCH_US / clock.batch(call, 100).time_us)
    slowed = slowed_by_sleep(call, calls, 0.1, clock)
    ratios = [slowed() / clock.batch(call, calls).time_us for _ in range(41)]
    assert median(ratios) - 1 == pytest.approx(0.1, rel=0.2)
