"""A user's file that spoils the clocks of its process, as ATTNBENCH_CLOCK_FAULT says.

`cpu:standstill`, say: of the processor's or the wall's clock one reading in 400 repeats the one
before it, or lags behind (`partial`); or all readings from one in 4000 on have stepped back by 5 ms
(`back`) or jumped ahead by an hour (`jump`), once or twice in a process.
"""

import os
import random
import time
from types import SimpleNamespace

from attnbench.api import attention
from attnbench.measure import clock, engine, sampling, watch

ONE_IN = {"standstill": 400, "partial": 400, "back": 4000, "jump": 4000}
BACK_NS, JUMP_NS = 5_000_000, 3_600_000_000_000
FAULTS = tuple(f"{which}:{kind}" for kind in ONE_IN for which in ("cpu", "wall"))


class Faulty:
    """A clock in ns that fails now and then, by a sequence of its own."""

    def __init__(self, read_ns, kind, seed=0):
        self._read_ns, self._kind, self._random = read_ns, kind, random.Random(seed)
        self._last_ns, self._offset_ns = read_ns(), 0

    def __call__(self):
        """Read it."""
        now_ns = self._read_ns() + self._offset_ns
        if self._random.randrange(ONE_IN[self._kind]) == 0:
            if self._kind == "standstill":
                now_ns = self._last_ns
            elif self._kind == "partial":
                now_ns -= int(self._random.random() * (now_ns - self._last_ns))
            else:
                step_ns = -BACK_NS if self._kind == "back" else JUMP_NS
                self._offset_ns += step_ns
                now_ns += step_ns
        self._last_ns = now_ns
        return now_ns


if fault := os.environ.get("ATTNBENCH_CLOCK_FAULT"):
    which, kind = fault.split(":")
    name = {"cpu": "cpu_ns", "wall": "now_ns"}[which]
    faulty = Faulty(getattr(clock, name), kind, seed=os.getpid())
    for module in (clock, watch):
        setattr(module, name, faulty)
    if which == "wall":  # what bounds the time that is spent on samples
        times = SimpleNamespace(perf_counter=lambda: faulty() / 1e9, process_time=time.process_time)
        for bounded in (engine, sampling):
            setattr(bounded, "time", times)  # noqa: B010


@attention("of-clock-faults", dtypes=("float64",))
def none(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    """Never measured (the sweeps are in float32): a file of a user's registers something."""
    return q_BHLD
