"""Where a measured cell stands between the machine's limits: the columns of the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attnbench.machine.limits import Ceilings, ceilings_of, peak_tflops, peaks_of
from attnbench.schema.case import Case

Bound = Literal["compute", "memory", "launch"]
HOST_BOUND = 0.95  # of the time, spent by the host on issuing the call: the device waits for it


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """One cell against its machine, all per unit (a call; a token for decode); None is unknown.

    The model is the roofline of Williams, Waterman and Patterson (CACM 2009) with a third limit,
    that every kernel must be started. `flops_executed` are the useful ones where an implementation
    does not declare them. `compute_us`, `memory_us` and `launch_us` are the least times of the
    executed FLOPs at the rate of a large matmul, of the least traffic at that of a large read, and
    of starting the kernels one after another.
    """

    time_us: float | None
    flops_executed: int | None
    bytes_min: int | None
    enqueue_us: float | None
    arithmetic_intensity: float | None
    compute_us: float | None
    memory_us: float | None
    launch_us: float | None
    peak_tflops_measured: float | None
    peak_tflops_datasheet: float | None
    memory_gbps_datasheet: float | None
    ceilings: Ceilings

    @property
    def read_gbps_measured(self) -> float | None:
        """What a large read reached."""
        return self.ceilings.read_gbps

    @property
    def copy_gbps_measured(self) -> float | None:
        """What a large copy reached, reading and writing together."""
        return self.ceilings.copy_gbps

    @property
    def launch_us_measured(self) -> float | None:
        """Time of the cheapest op."""
        return self.ceilings.launch_us

    @property
    def fraction_of_compute_peak(self) -> float | None:
        """Executed FLOP rate / the rate of a large matmul."""
        return _ratio(self.compute_us, self.time_us)

    @property
    def fraction_of_memory_peak(self) -> float | None:
        """Rate of the least traffic / the rate of a large read."""
        return _ratio(self.memory_us, self.time_us)

    @property
    def bound(self) -> Bound | None:
        """The limit that takes longest; launch too where issuing takes as long as running.

        Unknown unless all three are known: the missing one might be the longest.
        """
        if not self.time_us:
            return None
        if launch_bound(self.enqueue_us, self.time_us):
            return "launch"
        compute, memory, launch = self.compute_us, self.memory_us, self.launch_us
        if compute is None or memory is None or launch is None:
            return None
        times: dict[Bound, float] = {"compute": compute, "memory": memory, "launch": launch}
        return max(times, key=lambda name: times[name])


def cell_limits(
    case: Case, metrics: Mapping[str, Any], time_us: float | None, environment: Mapping[str, Any]
) -> CellLimits:
    """Compare one cell with the machine of `environment`; all is unknown on another device."""
    here = environment if environment.get("device", case.device) == case.device else {}
    ceilings, known = ceilings_of(here), peaks_of(here.get("device_name"))
    useful, executed = metrics.get("flops_useful"), metrics.get("flops_executed")
    executed = useful if executed is None else executed
    traffic, peak = metrics.get("bytes_min"), ceilings.matmul_tflops.get(case.dtype)
    kernels = metrics.get("kernel_count")  # of one call, which makes all the tokens of a decode
    launch_us = ceilings.launch_us
    return CellLimits(
        time_us=time_us,
        flops_executed=executed,
        bytes_min=traffic,
        enqueue_us=metrics.get("enqueue_us"),
        arithmetic_intensity=_ratio(useful, traffic),
        compute_us=_ratio(executed, peak, per=1e-6),
        memory_us=_ratio(traffic, ceilings.read_gbps, per=1e-3),
        launch_us=None
        if kernels is None or launch_us is None
        else kernels / (case.new_tokens or 1) * launch_us,
        peak_tflops_measured=peak,
        peak_tflops_datasheet=peak_tflops(here, case.dtype),
        memory_gbps_datasheet=1e3 * known[1].memory_tbps if known else None,
        ceilings=ceilings,
    )


def launch_bound(enqueue_us: float | None, time_us: float | None) -> bool:
    """Whether the host takes as long to issue a call as the device to run it; False if unknown.

    Both per unit; `time_us` is the reported time.
    """
    return bool(enqueue_us is not None and time_us and enqueue_us >= HOST_BOUND * time_us)


def _ratio(amount: float | None, other: float | None, per: float = 1.0) -> float | None:
    """Quotient × `per`; None where either is unknown, or the divisor is nothing."""
    return None if amount is None or not other else amount / other * per
