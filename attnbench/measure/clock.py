"""Clocks: how long one call takes, on the host and on the device, with cold or warm caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, Protocol, cast, get_args

import torch

from attnbench.machine import host
from attnbench.measure.gpu import SmClock, shared_sm_clock
from attnbench.measure.graph import Captured, capture, external_event

_TIMES_THE_CACHE = 2.0
_ASSUMED_CACHE_BYTES = 64 << 20  # where neither driver nor system tells
# Elements in a row. Long enough that the sums, the only bytes written, are few; short enough that
# CUDA's reduction gives each row to one thread block and so needs no scratch memory.
_ROW = 1 << 16


class Flush:
    """Evicts the last cache of a device by reading a buffer of twice its size.

    A call only reads, and writes 4 bytes for every 256 KiB it has read: hardly a dirty line is
    left to be written back while something else is timed. It allocates nothing and may be
    captured in a CUDA graph. On CUDA it is enqueued on the current stream and not waited for.
    """

    def __init__(self, device: str) -> None:
        """Allocate the buffer; a cache of unknown size is taken to have 64 MiB."""
        wanted = (last_cache_bytes(device) or _ASSUMED_CACHE_BYTES) * _TIMES_THE_CACHE
        rows = -(-int(wanted) // (_ROW * 4))
        # Ones, not zeros: on CPU pages that nobody has written to are all the same page of
        # zeros, and reading it would evict nothing.
        self._data = torch.ones(rows, _ROW, dtype=torch.float32, device=device)
        self._sums = torch.empty(rows, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Read all of the buffer."""
        torch.sum(self._data, dim=1, out=self._sums)

    @property
    def nbytes(self) -> int:
        """Size of what a call reads."""
        return self._data.nbytes


def last_cache_bytes(device: str) -> int | None:
    """Bytes of the L2 of the GPU, or of the last caches of the cores we may use; None if unknown.

    Cores in groups have a last cache for each group, which are added up.
    """
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size) or None
    found = {}
    for cpu in host.affinity() or [0]:  # where that is unknown, as if there were one such cache
        level, (shared, size) = max(host.data_caches(cpu).items(), default=(0, (None, 0)))
        if shared is not None:  # else it might be counted once for each CPU
            found[level, shared] = size
    return sum(found.values()) or None


# Bound here, before any implementation is loaded: one that replaces the clock changes no time.
now_ns = time.perf_counter_ns

L2 = Literal["cold", "warm"]
Timer = Literal["host", "events", "graph"]
Call = Callable[[], Any]

# CUDA documents about half a microsecond for event times.
_EVENT_RESOLUTION_US = 0.5


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Calls timed by one reading of the clock; all times are microseconds per call, as means.

    `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from a call to
    its result, without the flush. CUDA alone: `enqueue_us`, the host time to issue one call (one
    that is not below `time_us` says that the host, not the device, sets the pace), and `sm_mhz`,
    the clock of the multiprocessors right after the batch; None where not known. A time is
    negative if the clock behind it stepped back: that is for the caller to judge.
    """

    time_us: float
    e2e_us: float
    enqueue_us: float | None = None
    sm_mhz: float | None = None


class Clock(Protocol):
    """Times batches of calls."""

    l2: L2
    timer: Timer

    def batch(self, call: Call, calls: int) -> Batch:
        """Time `calls` calls. A clock that steps back gives negative times, and hides nothing."""

    def release(self, call: Call) -> None:
        """Forget whatever is kept for this callable."""

    @property
    def resolution_us(self) -> float:
        """The smallest difference the clock can tell, in microseconds."""


class HostClock:
    """perf_counter_ns, for CPU, where a call returns when it is done.

    Warm: around a bare loop. Cold: around each call, behind a flush that is not timed.
    """

    timer: Timer = "host"
    resolution_us = time.get_clock_info("perf_counter").resolution * 1e6

    def __init__(self, l2: L2 = "warm") -> None:
        self.l2 = l2
        self._flush = Flush("cpu") if l2 == "cold" else None

    def batch(self, call: Call, calls: int) -> Batch:
        """Host time per call, twice: on CPU the result is there when the call returns."""
        if self._flush is None:
            begin = now_ns()
            for _ in repeat(None, calls):
                call()
            elapsed_ns = now_ns() - begin
        else:
            elapsed_ns = 0
            for _ in repeat(None, calls):
                self._flush()
                begin = now_ns()
                call()
                elapsed_ns += now_ns() - begin
        elapsed_us = elapsed_ns / 1000 / calls
        return Batch(time_us=elapsed_us, e2e_us=elapsed_us)

    def release(self, call: Call) -> None:
        """Nothing is kept."""


class CudaClock:
    """A pair of events on the current stream, used again and again.

    Warm: around all calls of the batch. Cold: around each call, behind a flush; each call then
    starts on a device that has nothing else to do, and the host issues it while the flush still
    runs. A host that needs longer for that than the flush lasts keeps the stream waiting, and
    stream time has the wait in it: an `enqueue_us` above the duration of the flush says so, and a
    GraphClock gives the time without. `e2e_us` comes from one call that is waited for.
    """

    timer: Timer = "events"
    resolution_us = _EVENT_RESOLUTION_US  # of one pair; a cold batch takes the mean of many

    def __init__(self, l2: L2 = "cold", sm_clock: SmClock | None = None) -> None:
        self.l2 = l2
        self._flush = Flush("cuda") if l2 == "cold" else None
        self._sm_clock = sm_clock
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def batch(self, call: Call, calls: int) -> Batch:
        """Stream time between the events, time to issue a call, and time until one is done.

        A warm batch of one call gives all of them; else one call more is made for `e2e_us`.
        """
        torch.cuda.synchronize()
        together = calls if self._flush is None else 1  # calls between two events
        stream_ms, issue_ns, waited_ns = 0.0, 0, 0
        for _ in repeat(None, calls // together):
            if self._flush is not None:
                self._flush()
            self._begin.record()
            begin = now_ns()
            for _ in repeat(None, together):
                call()
            issued = now_ns()
            self._end.record()
            self._end.synchronize()
            waited_ns += now_ns() - begin
            issue_ns += issued - begin
            stream_ms += self._begin.elapsed_time(self._end)
        sm_mhz = self._sm_clock.sample_mhz() if self._sm_clock else None
        alone = calls == 1 and self._flush is None
        return Batch(
            time_us=stream_ms * 1000 / calls,
            e2e_us=waited_ns / 1000 if alone else _end_to_end_us(call, self._flush),
            enqueue_us=issue_ns / 1000 / calls,
            sm_mhz=sm_mhz,
        )

    def release(self, call: Call) -> None:
        """Nothing is kept."""


class GraphClock:
    """Replays of a CUDA graph in which the calls, the flushes and the events are nodes.

    The host then has no part in stream time: `enqueue_us` is the time to launch the graph, per
    call. `e2e_us` is host time from the launch of a graph of one call until it is done. The
    graphs of a callable hold the memory it works in until `release`. See `capture` for what
    cannot be captured.
    """

    timer: Timer = "graph"
    resolution_us = _EVENT_RESOLUTION_US

    def __init__(self, l2: L2 = "cold", sm_clock: SmClock | None = None) -> None:
        """Raise CaptureError where this torch has no events for graphs."""
        external_event()
        self.l2 = l2
        self._flush = Flush("cuda") if l2 == "cold" else None
        self._sm_clock = sm_clock
        self._kept: dict[tuple[int, int], Captured] = {}

    def batch(self, call: Call, calls: int) -> Batch:
        """Capture, unless that is done, replay, and read the events; raises CaptureError."""
        kept = self._kept.get(_identity(call))
        if kept is None or kept.calls != calls:
            self.release(call)
            alone = calls > 1 or self._flush is not None
            kept = capture(call, calls, flush=self._flush, alone=alone)
            self._kept[_identity(call)] = kept
        torch.cuda.synchronize()
        begin = now_ns()
        kept.graph.replay()
        issued = now_ns()
        torch.cuda.synchronize()
        e2e_us = (now_ns() - begin) / 1000
        sm_mhz = self._sm_clock.sample_mhz() if self._sm_clock else None
        if kept.alone is not None:
            e2e_us = _end_to_end_us(kept.alone.replay, self._flush)
        return Batch(
            time_us=kept.stream_us(),
            e2e_us=e2e_us,
            enqueue_us=(issued - begin) / 1000 / calls,
            sm_mhz=sm_mhz,
        )

    def release(self, call: Call) -> None:
        """Free the graphs of this callable, and the memory they hold."""
        kept = self._kept.pop(_identity(call), None)
        if kept is not None:
            kept.reset()


def _identity(call: Call) -> tuple[int, int]:
    """The same for the same callable: a bound method is a new object at each access."""
    return id(getattr(call, "__self__", None)), id(getattr(call, "__func__", call))


def _end_to_end_us(call: Call, flush: Flush | None) -> float:
    """Host time from a call on an idle device until its result is there."""
    torch.cuda.synchronize()
    if flush is not None:
        flush()
        torch.cuda.synchronize()
    begin = now_ns()
    call()
    torch.cuda.synchronize()
    return (now_ns() - begin) / 1000


# By device and timer; the first timer of a device is its default.
_CLOCKS: dict[str, dict[str, Callable[[L2], Clock]]] = {
    "cpu": {"host": HostClock},
    "cuda": {
        "events": lambda l2: CudaClock(l2, shared_sm_clock()),
        "graph": lambda l2: GraphClock(l2, shared_sm_clock()),
    },
}
_DEFAULT_L2: dict[str, L2] = {"cpu": "warm", "cuda": "cold"}


def clock_for(device: str, *, l2: str | None = None, timer: str | None = None) -> Clock:
    """The clock of a device, `cpu` or `cuda`.

    `l2` is cold or warm: cold on cuda and warm on cpu unless given. `timer` is host on cpu,
    events or graph on cuda: events unless given. Raises ValueError for anything else, and
    CaptureError where torch is too old for graph.
    """
    if device not in _CLOCKS:
        raise ValueError(f"no clock for the device {device!r}: cpu or cuda")
    clocks = _CLOCKS[device]
    if l2 not in (None, *get_args(L2)):
        raise ValueError(f"--l2 {l2} is unknown: {' or '.join(get_args(L2))}")
    if timer not in (None, *get_args(Timer)):
        raise ValueError(f"--timer {timer} is unknown: {', '.join(get_args(Timer))}")
    if timer not in (None, *clocks):
        raise ValueError(f"--timer {timer} is not for {device}, which has {' and '.join(clocks)}")
    return clocks[timer or next(iter(clocks))](cast(L2, l2 or _DEFAULT_L2[device]))
