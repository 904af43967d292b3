"""The slowdown that the gate injects, on a real GPU, whose kernels and sleeps no fake times."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from attnbench.base.stats import median
from attnbench.gate.run.rounds import BATCH_US
from attnbench.gate.server.sampling import slowed_by_sleep
from attnbench.measure.clock import clock_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_call_of_some_microseconds_is_slowed_by_the_share():
    x = torch.randn(1 << 20, device="cuda")
    call = partial(torch.mul, x, 2.0, out=torch.empty_like(x))
    clock = clock_for("cuda")
    calls = math.ceil(BATCH_US / clock.batch(call, 100).time_us)
    slowed = slowed_by_sleep(call, calls, 0.1, clock)
    ratios = [slowed() / clock.batch(call, calls).time_us for _ in range(41)]
    assert median(ratios) - 1 == pytest.approx(0.1, rel=0.2)
