"""How a worker measures: clock, rule, what it watches; opened once for a request."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from attnbench.measure.clock import Clock, clock_for
from attnbench.measure.nvml import GpuSensor, must_discard
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.schema.messages import Measure


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything about measuring that is the same for all cells of a request.

    `sensor` is what the GPU says of itself, None on CPU; `energy` asks for joules a call.
    """

    device: str
    rule: StoppingRule
    clock: Clock
    watch: Watch
    seed: int = 0
    sensor: GpuSensor | None = None
    energy: bool = False

    @classmethod
    def of(cls, request: Measure, device: str) -> Setup:
        """Open clock and sensor for a request of the runner.

        Raises:
            ValueError: the clock does not exist on the device.
            CaptureError: this torch cannot time what is inside a CUDA graph.
        """
        clock = clock_for(device, l2=request.l2, timer=request.timer)
        sensor = GpuSensor.open() if device == "cuda" else None
        return cls(
            device=device,
            rule=StoppingRule(
                precision=request.precision,
                min_time_s=request.min_time_s,
                max_time_s=request.max_time_s,
            ),
            clock=clock,
            watch=Watch(sensor=sensor, must_discard=must_discard) if sensor else Watch(),
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
