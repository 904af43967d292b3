"""Clocks: how long one block of calls takes, on the host and on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Times blocks of calls."""

    def block(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """Run `call` `calls` times; return (time_us, e2e_us), each for the whole block.

        `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from the
        first call until every result is there.
        """

    @property
    def resolution_us(self) -> float:
        """The smallest difference the clock can tell, in microseconds."""


class HostClock:
    """perf_counter_ns around a bare loop: for CPU, where a call returns when it is done."""

    def block(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """Host time of the block, twice: on CPU the result is there when the call returns."""
        begin = time.perf_counter_ns()
        for _ in repeat(None, calls):
            call()
        elapsed_us = (time.perf_counter_ns() - begin) / 1000
        return elapsed_us, elapsed_us

    @property
    def resolution_us(self) -> float:
        """As the operating system reports it."""
        return time.get_clock_info("perf_counter").resolution * 1e6


class CudaClock:
    """A pair of events around the block on the current stream; host time until both are done."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def block(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """Stream time between the events, and host time until the last result is there."""
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        self._begin.record()
        for _ in repeat(None, calls):
            call()
        self._end.record()
        self._end.synchronize()
        elapsed_us = (time.perf_counter_ns() - begin) / 1000
        return self._begin.elapsed_time(self._end) * 1000, elapsed_us

    @property
    def resolution_us(self) -> float:
        """CUDA documents about half a microsecond for event times."""
        return 0.5


def clock_for(device: str) -> Clock:
    """The clock of a device: `cpu` or `cuda`."""
    return CudaClock() if device == "cuda" else HostClock()
