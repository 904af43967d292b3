"""The clock of a GPU's multiprocessors, from two counters on the device itself.

The driver's own reading (NVML) is an average of the past; a kernel of 20 us sees the clock as it
is on the stream now.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

_PLAUSIBLE_MHZ = (100.0, 5000.0)
_KERNEL_MODULE = "attnbench.measure.smkernel"


class SmClock:
    """Reads the clock by a tiny kernel; None for good once that has failed, and `problem` says why.

    `launch` enqueues a kernel that writes (cycles, nanoseconds) of one spin to its argument.
    """

    def __init__(
        self,
        launch: Callable[[torch.Tensor], None] | None,
        counters: torch.Tensor | None,
        problem: str | None = None,
    ) -> None:
        self._launch = launch
        self._counters = counters
        self.problem = problem

    @classmethod
    def open(cls) -> SmClock:
        """Compile the kernel and try it once; never raises."""
        try:
            launch = importlib.import_module(_KERNEL_MODULE).launch
            counters = torch.zeros(2, dtype=torch.int64, device="cuda")
        except Exception as err:  # no triton, no device, no compiler: all end the same way
            return cls(None, None, _because(err))
        clock = cls(launch, counters)
        clock.sample_mhz()
        return clock

    def sample_mhz(self) -> float | None:
        """Enqueue the kernel on the current stream, wait for it, and return the clock in MHz."""
        if self.problem is not None or self._launch is None or self._counters is None:
            return None
        try:
            self._launch(self._counters)
            torch.cuda.synchronize()
            cycles, ns = self._counters.tolist()
            mhz = cycles / ns * 1000
        except Exception as err:  # a reading that fails must not cost the cell it stands beside
            self.problem = _because(err)
            return None
        if not _PLAUSIBLE_MHZ[0] <= mhz <= _PLAUSIBLE_MHZ[1]:
            self.problem = f"no SM clock from in-stream counters: {mhz:.6g} MHz is implausible"
            return None
        return float(mhz)


@functools.cache
def shared_sm_clock() -> SmClock | None:
    """The SM clock of this process, opened at the first use; None where it does not work."""
    clock = SmClock.open()
    return clock if clock.problem is None else None


def _because(err: Exception) -> str:
    text = " ".join(str(err).split())[:200]
    return f"no SM clock from in-stream counters: {type(err).__name__}: {text}"
