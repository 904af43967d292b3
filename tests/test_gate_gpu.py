"""Rounds of the gate on a real GPU: three fresh processes, forked before CUDA begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbench.execution.process import Settings
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.run.rounds import measure_round
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from tests.test_gate_rounds import a_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_all_arms_take_their_turns_on_the_gpu(tmp_path):
    case = Case(workload="attention", device="cuda", seq_len=512, heads=4, head_dim=64)
    bench = replace(
        a_bench(tmp_path),
        cells=(Cell(case=case, impl="mine"), Cell(case=case, impl="other")),
        settings=Settings(device="cuda", timeout_s=120.0),
        cpus=None,
    )
    found = measure_round(bench, RoundPlan(stage="screen", cells=(0, 1), slowed=1), 0)
    assert not found.failures
    assert set(found.samples[0]) == {"base", "candidate", "null"}
    assert set(found.samples[1]) == {"base", "candidate", "null", "planted"}
    assert all(min(map(min, taken)) > 0 for of in found.samples.values() for taken in of.values())
