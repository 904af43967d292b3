"""Clocks: how long one call takes, on the host and on the device, with cold or warm caches."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from typing import Any, Literal, Protocol, cast

import torch

from attnbench.base.sample import ALONE, Batch
from attnbench.base.stats import median
from attnbench.machine.facts import last_cache_bytes

# Bound here, before any implementation is loaded: one that replaces the clock changes no time.
now_ns = time.perf_counter_ns
cpu_ns = time.thread_time_ns

L2 = Literal["cold", "warm"]
Timer = Literal["host", "events", "graph"]
Call = Callable[[], Any]

# What reading both clocks may take at most, between the one and the other.
READING_NS = 20_000
# Event times are documented as good to about 0.5 µs; before Hopper they are multiples of 1.024 µs.
_EVENT_RESOLUTION_US = 1.024
# A kernel spins for so many times what issuing was seen to take, at most so long. Where issuing is
# at most such a share of a call's time, it need not be hidden.
_COVER, _MOST_SPIN_US, NEGLIGIBLE = 1.5, 3000.0, 1e-3
# Of the host's part in cold calls: more than twice the median and so much is an interruption.
_INTERRUPTED_US = 20.0
_TRIAL_CYCLES = 100_000  # well above the few µs that starting a kernel takes, on any GPU
LEAST_STEP_US = 20.0  # on CUDA: what is shorter loses itself in its pair of events
_WARM_UPS = 3  # before a capture, as torch's documentation on graphs does


class Clock(Protocol):
    """Times batches of calls.

    A call may have `steps`, callables that one after the other make it, as a generation has. By a
    cold clock each step finds a cold cache, on CUDA if it takes `LEAST_STEP_US` or more.
    """

    l2: L2
    timer: Timer
    resolution_us: float  # the smallest difference the clock can tell
    broken: bool = False  # beyond use, like the process: the rest is for a fresh one

    def batch(self, call: Call, calls: int) -> Batch:
        """Time `calls` calls. A clock that steps back gives negative times, and hides nothing."""

    def release(self, call: Call) -> None:
        """Forget whatever is kept for this callable: nothing, unless a clock says otherwise."""
        del call


class Flush:
    """Evicts the last cache of a device by reading a buffer of twice its size.

    On CUDA it is enqueued on the current stream and not waited for, and allocates nothing. On a CPU
    it evicts code, too, which in a program each layer uses again: small ops bring it back.
    """

    # Elements in a row. Long enough that the sums, the only bytes written, leave hardly a dirty
    # line to be written back while something else is timed; short enough that CUDA's reduction
    # gives each row to one thread block and so needs no scratch memory.
    _ROW = 1 << 16

    def __init__(self, device: str) -> None:
        # A cache of unknown size is taken to have 64 MiB.
        rows = -(-2 * (last_cache_bytes(device) or 64 << 20) // (self._ROW * 4))
        # Ones, not zeros: on CPU pages that nobody has written to are all the same page of
        # zeros, and reading it would evict nothing.
        self._data = torch.ones(rows, self._ROW, dtype=torch.float32, device=device)
        self._sums = torch.empty(rows, dtype=torch.float32, device=device)
        self.nbytes = self._data.nbytes
        self._small = torch.ones(1, 2, 32, 32) if device == "cpu" else None

    def __call__(self) -> None:
        """Read all of the buffer."""
        torch.sum(self._data, dim=1, out=self._sums)
        if self._small is not None:
            x_1HLD = torch.nn.functional.rms_norm(self._small, self._small.shape[-1:])
            torch.nn.functional.silu(x_1HLD @ x_1HLD)
            torch.softmax(x_1HLD @ x_1HLD.mT, -1) @ x_1HLD
            torch.nn.functional.scaled_dot_product_attention(x_1HLD, x_1HLD, x_1HLD)


class HostClock(Clock):
    """perf_counter_ns, for CPU, where a call returns when it is done.

    Warm: around a bare loop. Cold: around each call or step, behind a flush that is not timed.
    """

    timer: Timer = "host"
    resolution_us = time.get_clock_info("perf_counter").resolution * 1e6

    def __init__(self, l2: L2 = "warm") -> None:
        self.l2 = l2
        self._flush = Flush("cpu") if l2 == "cold" else None

    def batch(self, call: Call, calls: int) -> Batch:
        """Host time per call, twice: on CPU the result is there when the call returns.

        Processor time says what the call took from its core if one thread computes, and does not
        give the core away by itself. A batch in which it is longer than the time has no time: a
        clock stood still, stepped back or jumped.
        """
        waits, readings = _waits(), 1
        if self._flush is None:
            cpu_begin, begin = cpu_ns(), now_ns()
            for _ in repeat(None, calls):
                call()
            elapsed_ns, worked_ns = now_ns() - begin, cpu_ns() - cpu_begin
        else:
            steps = steps_of(call)
            elapsed_ns, worked_ns, readings = 0, 0, calls * len(steps)
            for step in chain.from_iterable(repeat(steps, calls)):
                self._flush()
                getattr(step, "behind_flush", _nothing)()
                cpu_begin, begin = cpu_ns(), now_ns()
                step()
                elapsed_ns += now_ns() - begin
                worked_ns += cpu_ns() - cpu_begin
        knows = torch.get_num_threads() == 1 and waits is not None and _waits() == waits
        # One thread works no longer than the clock on the wall says: either of the two is wrong.
        if knows and worked_ns * ALONE > elapsed_ns + READING_NS * readings:
            elapsed_ns = min(elapsed_ns, 0)
        elapsed_us, worked_us = elapsed_ns / 1000 / calls, worked_ns / 1000 / calls
        return Batch(
            time_us=elapsed_us,
            e2e_us=elapsed_us,
            cpu_us=min(elapsed_us, worked_us) if knows and worked_us > 0 else None,
        )


def _nothing() -> None:
    """What a step finds in the caches without a `behind_flush` of its own."""


def steps_of(call: Call) -> Sequence[Call]:
    """What a call consists of: itself, if not of steps."""
    return getattr(call, "steps", (call,))


def _waits() -> int | None:
    """How often this thread has given its core away so far; None where that is not counted."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS_WAITS else None


_COUNTS_WAITS = hasattr(resource, "RUSAGE_THREAD")  # not on macOS


class CudaClock(Clock):
    """Events on the current stream, used again and again.

    Warm: around all calls of the batch. Cold: around each call, behind a flush. The device must be
    busy until the host has issued what is between two events, else it waits for the host, and
    stream time has the wait in it. Where a flush is too short for that, a kernel spins behind it,
    as nvbench's blocks; `hidden_us` is what was hidden so. It spins for 3 ms at most: a call issued
    in 2 ms is hidden, and at 2 µs a launch or more fits CUDA's queue of 1024. A host that takes
    longer may show in the time, unlike in a GraphClock's.

    A host that is interrupted while it issues a call keeps the device waiting, too. Of cold calls
    those are left out that it took far longer to issue than most. Where most are not issued before
    the device begins them none is: the host may have waited for the device, and its time would be
    the device's. Nor is any of a batch with one pair of events, warm or of one call: it is too
    brief for most samples to be hit, and their median counts.
    """

    timer: Timer = "events"
    resolution_us = _EVENT_RESOLUTION_US  # of one pair; a cold batch takes the mean of many

    def __init__(self, l2: L2 = "cold") -> None:
        self.l2 = l2
        self._flush = Flush("cuda") if l2 == "cold" else None
        self._front, self._begin, self._end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )

    def batch(self, call: Call, calls: int) -> Batch:
        """Stream time between the events, time to issue a call, and time until one is done.

        One call more is made first, on an idle device: it tells `e2e_us`, and how long issuing
        takes. Where that is next to nothing of its time, it is all of a batch of one call.
        """
        alone, ahead_us = self._alone(call)
        issue_us = alone.enqueue_us or 0.0
        steps: Sequence[Call] = (call,)
        if self._flush and alone.time_us >= LEAST_STEP_US * len(steps_of(call)):
            steps = steps_of(call)
        if calls == len(steps) == 1 and issue_us <= NEGLIGIBLE * alone.time_us:
            return alone
        together = calls if self._flush is None else 1  # calls or steps between two events
        issue_us /= len(steps)
        least_us = together * issue_us
        spin_us = min(_COVER * least_us - ahead_us, _MOST_SPIN_US)
        cycles = math.ceil(spin_us * self._cycles_per_us()) if spin_us > 0 else 0
        pairs: list[tuple[float, ...]] = []  # what each pair of events says, after the host's time
        exposed = 0  # pairs whose call the device reached before all of it was issued
        for step in chain.from_iterable(repeat(steps, calls // together)):
            first = now_ns()
            submitted_us = self._submit_front(cycles)
            begin = now_ns()
            for _ in repeat(None, together):
                step()
            issue_us = (now_ns() - begin) / 1000
            self._end.record()
            host_us = (now_ns() - first) / 1000
            self._end.synchronize()
            ahead_us = _between_us(self._front, self._begin) - submitted_us
            exposed += ahead_us < issue_us
            # Held back by what holds the device back, the host waits for it: for a result, or with
            # a full launch queue. That is no issuing.
            if ahead_us >= least_us or issue_us >= least_us + ahead_us / 2:
                issue_us = min(issue_us, least_us)
            hidden_us = max(0.0, min(ahead_us, issue_us))
            stream_us = _between_us(self._begin, self._end)
            pairs.append((host_us, stream_us, issue_us, hidden_us))
        most_us = math.inf
        if exposed < len(pairs) / 2:
            most_us = 2 * median(pair[0] for pair in pairs) + _INTERRUPTED_US
        kept = [pair for pair in pairs if pair[0] <= most_us]  # more than half of them
        _, *sums = map(sum, zip(*kept, strict=True))
        each = len(kept) * together / len(steps)  # calls in the sums
        stream_us, issue_us, hidden_us = (us / each for us in sums)
        return Batch(
            time_us=stream_us,
            e2e_us=alone.e2e_us,
            enqueue_us=issue_us,
            hidden_us=hidden_us,
            left_out=len(pairs) - len(kept),
        )

    def _submit_front(self, cycles: int) -> float:
        """Issue what stands in front of a call, up to the event; return the host's time, in µs.

        The device is idle before it.
        """
        self._front.record()
        begin = now_ns()
        if self._flush is not None:
            self._flush()
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        self._begin.record()
        return (now_ns() - begin) / 1000

    def _alone(self, call: Call) -> tuple[Batch, float]:
        """One call that is waited for; and how long before it a flush keeps the device busy."""
        torch.cuda.synchronize()
        submitted_us = self._submit_front(cycles=0)
        torch.cuda.synchronize()
        ahead_us = _between_us(self._front, self._begin) - submitted_us
        self._begin.record()
        begin = now_ns()
        call()
        issued = now_ns()
        self._end.record()
        torch.cuda.synchronize()
        e2e_us, issue_us = (now_ns() - begin) / 1000, (issued - begin) / 1000
        time_us = _between_us(self._begin, self._end)
        return Batch(time_us=time_us, e2e_us=e2e_us, enqueue_us=issue_us, hidden_us=0.0), ahead_us

    def _cycles_per_us(self) -> float:
        """How fast the device counts while it spins, which changes with its clock."""
        sleep = torch.cuda._sleep
        sleep(1)  # type: ignore[no-untyped-call]  # loads the kernel
        self._front.record()
        sleep(_TRIAL_CYCLES)  # type: ignore[no-untyped-call]
        self._begin.record()
        self._begin.synchronize()
        return _TRIAL_CYCLES / _between_us(self._front, self._begin)


def _between_us(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return 1000 * begin.elapsed_time(end)  # type: ignore[no-any-return]


class CaptureError(RuntimeError):
    """The callable, or this torch, cannot be timed with `--timer graph`; says why in one line."""


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """The graphs of a callable and the events around its timed parts; the call is kept alive."""

    call: Call
    calls: int
    graph: torch.cuda.CUDAGraph
    alone: torch.cuda.CUDAGraph  # one call without events
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]


class GraphClock(Clock):
    """Replays of a CUDA graph in which the calls, the flushes and the events are nodes.

    The host then has no part in stream time: `enqueue_us` is the time to launch the graph, per
    call. `e2e_us` is host time from the launch of a graph of one call until it is done. The
    graphs of a callable hold the memory it works in until `release`.

    A call must not wait for the device, copy to pageable host memory, decide by values on the
    device (`.item()`, `nonzero`), or enqueue on a stream that does not wait for the current one.
    A backward pass runs on the stream of its forward, which must therefore not be the default one.
    """

    timer: Timer = "graph"
    resolution_us = _EVENT_RESOLUTION_US

    def __init__(self, l2: L2 = "cold") -> None:
        """Raise CaptureError where this torch has no events for graphs."""
        _external_event()
        self.l2 = l2
        self._flush = Flush("cuda") if l2 == "cold" else None
        self._kept: dict[tuple[int, int], _Captured] = {}

    def batch(self, call: Call, calls: int) -> Batch:
        """Capture, unless that is done, replay, and read the events.

        Raises CaptureError; out of memory, and what the call raises without a capture, pass.
        """
        kept = self._kept.get(_identity(call))
        if kept is None or kept.calls != calls:
            self.release(call)
            kept = self._kept[_identity(call)] = self._capture(call, calls)
        torch.cuda.synchronize()
        begin = now_ns()
        kept.graph.replay()
        enqueue_us = (now_ns() - begin) / 1000 / calls
        torch.cuda.synchronize()
        return Batch(
            time_us=sum(begin.elapsed_time(end) for begin, end in kept.pairs) * 1000 / calls,
            e2e_us=_end_to_end_us(kept.alone.replay, self._flush),
            enqueue_us=enqueue_us,
            hidden_us=enqueue_us,
        )

    def release(self, call: Call) -> None:
        """Free the graphs of this callable, and the memory they hold."""
        kept = self._kept.pop(_identity(call), None)
        for graph in (kept.graph, kept.alone) if kept is not None else ():
            graph.reset()

    def _capture(self, call: Call, calls: int) -> _Captured:
        """Cold: each call behind a flush and between events of its own.

        Warm: one pair around all, behind a call that is not timed. And one in a graph of its own.
        """
        outer = stream = torch.cuda.current_stream()
        if outer == torch.cuda.default_stream():  # which cannot capture
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(outer)
        failure: BaseException | None = None
        # Around all that follows: a capture that fails leaves torch on the capture's stream.
        with torch.cuda.stream(stream):
            for _ in repeat(None, _WARM_UPS):
                if self._flush is not None:
                    self._flush()
                call()
            torch.cuda.synchronize()
            together = calls if self._flush is None else 1  # calls between two events
            steps = steps_of(call) if self._flush else (call,)
            count = calls // together * len(steps)
            pairs = [(_external_event(), _external_event()) for _ in range(count)]
            graph = torch.cuda.CUDAGraph()
            alone = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    for (begin, end), step in zip(pairs, cycle(steps), strict=False):
                        # What was measured before may have left other things in the cache.
                        (self._flush or call)()
                        begin.record()
                        for _ in repeat(None, together):
                            step()
                        end.record()
                # Never replayed at the same time: they may share memory.
                with torch.cuda.graph(alone, pool=graph.pool(), stream=stream):
                    call()
            except Exception as err:
                # Torch's allocator still takes the capture for running, and its random numbers may.
                self.broken = True
                failure = _explained(err)
        if failure is not None:  # raised here, it does not hold on to the frames of its cause
            raise failure
        outer.wait_stream(stream)
        return _Captured(call=call, calls=calls, graph=graph, alone=alone, pairs=pairs)


def _external_event() -> torch.cuda.Event:
    """An event that a graph records anew at each replay; CaptureError where torch has none."""
    try:
        return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    except TypeError:
        raise CaptureError(
            f"--timer graph needs events that a graph can record (Event(external=True)), which "
            f"torch {torch.__version__} does not have; use --timer events"
        ) from None


def _explained(err: BaseException) -> BaseException:
    """The error to raise for a capture that failed: named after what broke it first."""
    while err.__context__ is not None:  # ending a broken capture raises again
        err = err.__context__
    if isinstance(err, torch.cuda.OutOfMemoryError):
        return err.with_traceback(None)
    text = " ".join(str(err).split())[:200]
    return CaptureError(
        f"--timer graph: the call cannot be captured in a CUDA graph "
        f"({type(err).__name__}: {text}); use --timer events"
    )


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
    "cuda": {"events": CudaClock, "graph": GraphClock},
}
_DEFAULT_L2: dict[str, L2] = {"cpu": "warm", "cuda": "cold"}


def clock_for(device: str, *, l2: str | None = None, timer: str | None = None) -> Clock:
    """The clock of a device, `cpu` or `cuda`.

    `l2` is cold or warm: cold on cuda and warm on cpu unless given. `timer` is host on cpu,
    events or graph on cuda: events unless given. Raises CaptureError
    where torch is too old for graph.
    """
    clocks = _CLOCKS[device]
    return clocks[timer or next(iter(clocks))](cast(L2, l2 or _DEFAULT_L2[device]))
