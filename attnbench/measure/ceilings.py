"""What this machine can do at most, measured: the ceilings that every time is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import torch

from attnbench.base.stats import robust_least
from attnbench.machine.facts import free_bytes, last_cache_bytes
from attnbench.measure.clock import Clock, clock_for

MIB = 2**20
T = TypeVar("T")
Name = TypeVar("Name", str, int)

# The next width is tried while a product of this one is over sooner than WIDE_ENOUGH_US: then it
# is too small to keep the device busy. Few processors multiply float16 fast, so it starts narrow.
_WIDTHS = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192)}
_NARROW: dict[tuple[str, str], tuple[int, ...]] = {("cpu", "float16"): (512, 1024, 2048, 4096)}
WIDE_ENOUGH_US = 2000.0

LEAST_ROUNDS, MOST_ROUNDS = 3, 40
MATMUL_US = 60_000.0  # of each width
STREAM_US = 250_000.0
LAUNCH_US = 20_000.0
# A cache that evicts what was used longest ago has nothing left of a longer buffer that is read
# again and again. That of a GPU evicts otherwise: there, what is left must hardly count.
_LEAST_STREAM = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
AGREE = 0.05  # among the three least times, else other work may have slowed them all
MOST_BUDGETS = 2.0  # spent where they do not agree
# Calls are timed in batches of this length: events of a GPU may tell times to a µs alone.
_BATCH_US = {"cpu": 0.0, "cuda": 1000.0}
LAUNCH_BATCH_US = 500.0
# Some 25 kernels, whose launches a spin of 3 ms hides on a host that issues one in 80 µs. Batches
# of 300 had 1.6 to 2.7 µs a kernel in three runs on one kind of machine.
HIDDEN_BATCH_US = 50.0
MOST_CALLS = 1000  # in a batch

_TILE = 4096  # elements of the random pattern that fills the buffers


def measure_ceilings(
    device: str, dtypes: Iterable[str], *, clock: Clock | None = None
) -> dict[str, Any]:
    """The device's ceilings as plain JSON; one that cannot be measured is null.

    `matmul_tflops` by dtype; `copy_gbps` (bytes read plus written) and `read_gbps`, from buffers
    several times the last cache; `launch_us`, the time of a call that does next to nothing, and on
    CUDA `launch_cold_us`, that of a cold one; `cache_bytes`, the last cache; `measured`, when. Each
    rate is the high end of interleaved rounds: what else the machine does can only lower it.
    """
    clock = clock or clock_for(device, l2="warm")
    cache_bytes = _known(partial(last_cache_bytes, device))
    with torch.no_grad():
        ceilings = {
            "matmul_tflops": {dtype: _matmul_tflops(clock, device, dtype) for dtype in dtypes},
            "copy_gbps": None,
            "read_gbps": None,
            "launch_us": _known(partial(_launch_us, clock, device)),
            "cache_bytes": cache_bytes,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if device == "cuda":
            cold_us = _known(lambda: _launch_us(clock_for(device, l2="cold"), device))
            ceilings["launch_cold_us"] = cold_us
        size = stream_bytes(device, cache_bytes, _known(partial(free_bytes, device)))
        if size is not None:
            ceilings |= _known(partial(_stream_gbps, clock, device, size)) or {}
    if device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _known(torch.cuda.empty_cache)  # what is measured next finds the memory free
    return ceilings


def stream_bytes(device: str, cache_bytes: int | None, free: int | None) -> int | None:
    """Size of each of two buffers that stream from memory; None if none is far past the cache.

    Four times the last cache, 64 MiB where it is unknown, at least 64 MiB and on CUDA 1 GiB, at
    most 1 GiB, and both together at most a quarter of the free memory.
    """
    wanted = max(_LEAST_STREAM[device], 4 * (64 * MIB if cache_bytes is None else cache_bytes))
    size = min(wanted, 1024 * MIB, wanted if free is None else free // 8)
    size -= size % (4 * _TILE)
    return size if size >= max(2 * (cache_bytes or 0), 16 * MIB) else None


def _known(measure: Callable[[], T]) -> T | None:
    """What `measure` returns; None where torch cannot do it or memory does not suffice."""
    try:
        return measure()
    except (RuntimeError, MemoryError):
        return None


def _matmul_tflops(clock: Clock, device: str, dtype: str) -> float | None:
    """The best rate of square matmuls, 2·width³ FLOPs each, in TFLOP/s.

    With each width a half and a quarter of it: short products more often find a moment without
    other work, long ones lose less to it.
    """

    def least_us(width: int) -> dict[int, float]:
        calls = {}
        for wide in (width // 4, width // 2, width):
            a = torch.randn(wide, wide, device=device).to(getattr(torch, dtype))
            calls[wide] = partial(torch.mm, a, a, out=torch.empty_like(a))
        return _least_us(clock, calls, MATMUL_US, _BATCH_US[device])

    rates = []
    for width in _NARROW.get((device, dtype), _WIDTHS[device]):
        least = _known(partial(least_us, width)) or {}
        rates += [2 * wide**3 / time_us / 1e6 for wide, time_us in least.items()]
        if least.get(width, math.inf) >= WIDE_ENOUGH_US:
            break
    return max(rates, default=0.0) or None


def _stream_gbps(clock: Clock, device: str, size: int) -> dict[str, float | None]:
    """Rates of copying and of reading buffers of `size` bytes, in GB/s (10⁹ bytes).

    Reading is the best of four reductions of float32, which all reach the memory's rate.
    """
    # Pages that were never written may all be the same page of zeros, which a cache holds.
    source = torch.rand(_TILE, device=device).repeat(size // (4 * _TILE))
    target = torch.empty_like(source).copy_(source)
    rows = source.view(-1, _TILE)
    row_out, out = torch.empty(len(rows), device=device), torch.empty((), device=device)
    reads: dict[str, Callable[[], Any]] = {
        "sum": partial(torch.sum, source, 0, out=out),
        "amax": partial(torch.amax, source, 0, out=out),
        "norm": partial(torch.linalg.vector_norm, source, out=out),
        "row sums": partial(torch.sum, rows, 1, out=row_out),
    }
    copy: dict[str, Callable[[], Any]] = {"copy": partial(target.copy_, source)}
    least = _least_us(clock, copy | reads, STREAM_US, _BATCH_US[device])
    read_us = min(least[name] for name in reads)
    return {
        "copy_gbps": 2 * size / least["copy"] / 1e3 or None,
        "read_gbps": size / read_us / 1e3 or None,
    }


def _launch_us(clock: Clock, device: str) -> float | None:
    """Time of the cheapest op, one element added in place, called back to back, in µs.

    On CUDA stream time per kernel: the device's time to start one, the host's to issue it being
    hidden as it is for the cells. By a cold clock the pair of events around each call is in it.
    """
    one = torch.zeros((), device=device)
    batch_us = HIDDEN_BATCH_US if device == "cuda" else LAUNCH_BATCH_US
    time_us = _least_us(clock, {"": partial(one.add_, one)}, LAUNCH_US, batch_us)[""]
    return None if math.isinf(time_us) else time_us


def _least_us(
    clock: Clock, calls: Mapping[Name, Callable[[], Any]], budget_us: float, batch_us: float
) -> dict[Name, float]:
    """The low end of each call's times in µs, over interleaved rounds; infinite if none was seen.

    Each batch lasts about `batch_us`, at least one call. The rounds end when the budget is spent
    and the least times agree, or some budgets later.
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    spent_us = 0.0
    for done in range(1, MOST_ROUNDS + 1):
        for name, call in calls.items():
            least_us = robust_least(times[name] or [math.inf])
            each = min(MOST_CALLS, max(1, math.ceil(batch_us / least_us)))
            batch = clock.batch(call, each)
            spent_us += batch.e2e_us * each
            if batch.time_us > 0:  # else the clock stepped back, or saw nothing
                times[name].append(batch.time_us)
        least = [sorted(found)[:3] for found in times.values()]
        agree = all(len(x) == 3 and x[-1] <= (1 + AGREE) * x[0] for x in least)
        needed_us = budget_us if agree else MOST_BUDGETS * budget_us
        if done >= LEAST_ROUNDS and spent_us >= needed_us:
            break
    return {name: robust_least(found or [math.inf]) for name, found in times.items()}
