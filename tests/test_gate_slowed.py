"""The slowdown that the positive control injects on a GPU, on a simulated one: as promised."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from attnbench.gate.run.rounds import BATCH_US
from attnbench.gate.server.sampling import slowed_by_sleep
from attnbench.measure.clock import CudaClock
from tests import fakegpu


class Gpu(fakegpu.FakeGpu):
    """The time of a kernel is another in each run, by half a microsecond; events tick in one.

    Until it is `steady`.
    """

    def __init__(self) -> None:
        super().__init__(tick_us=1.0)
        self._rng: random.Random | None = random.Random(0)

    def steady(self) -> None:
        self.tick_us, self._rng = 0.0, None

    def launch(self, name: str, *, device_us: float, host_us: float) -> None:
        def issue(cost_us: float) -> None:
            off_us = self._rng.uniform(-0.5, 0.5) if self._rng else 0.0
            super(Gpu, self).launch(name, device_us=device_us + off_us, host_us=cost_us)

        issue(host_us) if self.nodes is None else self.nodes.append(issue)

    def sleep(self, cycles: int) -> None:
        """A kernel takes 1.5 to 2.5 us to start, and the host 4 to issue it."""
        self.launch("spin", device_us=2.0 + cycles / self.cycles_per_us, host_us=4.0)


@pytest.mark.parametrize("host_us", [4.0, 60.0])
@pytest.mark.parametrize("own_us", [10.0, 15.3, 2700.0])
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_an_injected_slowdown_is_the_share_on_the_mean_of_a_batch(
    monkeypatch, host_us, own_us, share
):
    gpu = Gpu()
    fakegpu.install(monkeypatch, gpu)
    clock, calls = CudaClock(), max(1, math.ceil(BATCH_US / own_us))
    call = partial(gpu.launch, "call", device_us=own_us, host_us=host_us)
    slowed = slowed_by_sleep(call, calls, share, clock)
    gpu.steady()
    own = clock.batch(call, calls).time_us
    for _ in range(3):  # whichever of the calls is followed by the sleep
        assert slowed() / own - 1 == pytest.approx(share, rel=0.1)
