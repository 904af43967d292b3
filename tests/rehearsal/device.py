"""A simulated H100 with its host, in microseconds: streams, events, graphs, L2, memory.

Nothing here knows torch. The host issues work and goes on, each stream works in order, and waiting
for the device joins the two clocks. Its times are exact: measured ones can be held against them.
For sweeps the GPU can be slower by a factor and their sequences shorter: a case then takes about as
long as the full one would, and a CPU can still compute its values.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

SLOWER = float(os.environ.get("ATTNBENCH_REHEARSAL_SLOWER", "1"))
NAME, CAPABILITY, MHZ = "NVIDIA H100 (simulated)", (9, 0), 1755
MEMORY_BYTES, CACHE_BYTES = 79 << 30, round((50 << 20) / SLOWER)
MEMORY_BYTES_PER_US, CACHE_BYTES_PER_US = 2.9e6 / SLOWER, 6e6 / SLOWER
# Large kernels reach so many; products of two sequences are shorter by the square.
FLOPS_PER_US = {
    dtype: tflops * 1e6 / SLOWER**2
    for dtype, tflops in {"bfloat16": 600, "float16": 600, "float32": 45, "float64": 25}.items()
}
TICK_US = 1.0  # of event times
KERNEL_US, OP_US = 2.0, 4.0  # the shortest kernel; what torch takes to issue one
READ_US, SYNC_US, EVENT_US, REPLAY_US, DRIVER_US = 0.05, 2.0, 0.5, 6.0, 100.0
NEAR_US, FAR_US = 0.15, 0.3  # how long a load takes from the L2 and from memory
DEEPEST = 1024  # launches that may wait on the device before the host has to

Buffers = Sequence[tuple[int, int]]  # addresses and bytes


class Stream:
    """A queue: when what was given to it so far will be done."""

    ready_us = 0.0
    capturing: Graph | None = None


class Event:
    """A mark in a stream, with the time at which the device reached it."""

    at_us = math.inf


class Graph:
    """What was captured: to be done at each replay, with nothing between for the host to do."""

    def __init__(self) -> None:
        self.nodes = list[Callable[[], None]]()


class Device:
    """The GPU, its host's clock and its allocator."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.default = self.current = Stream()
        self.lasted_us: deque[float] = deque(maxlen=1 << 16)  # kernel by kernel
        self.live = self.peak = self.reserved = self.driver_calls = 0
        self._addresses = itertools.count(1)
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._held = 0  # bytes in it
        self._free: dict[tuple[int, int], list[int]] = {}  # addresses, by bytes and graph
        self._waiting: deque[float] = deque()

    def launch(
        self, us: float = KERNEL_US, *, reads: Buffers = (), writes: Buffers = (), loads: int = 0
    ) -> None:
        """Issue a kernel: it lasts `us`, or as long as its traffic or `loads` in a row take."""
        self.host_us += OP_US

        def run() -> None:
            near = bool(reads) and self._cached.get(reads[0][0], 0) >= reads[0][1]
            walk_us = loads * (NEAR_US if near else FAR_US)
            begin_us = max(self.current.ready_us, self.host_us)
            lasts_us = max(us, self._traffic_us(reads, writes), walk_us)
            self.current.ready_us = begin_us + lasts_us
            self.lasted_us.append(lasts_us)

        if self.current.capturing:
            self.current.capturing.nodes.append(run)
            return
        while self._waiting and self._waiting[0] <= self.host_us:
            self._waiting.popleft()
        if len(self._waiting) >= DEEPEST:  # the queue is full: the host waits for a place in it
            self.host_us = max(self.host_us, self._waiting.popleft())
        run()
        self._waiting.append(self.current.ready_us)

    def _traffic_us(self, reads: Buffers, writes: Buffers) -> float:
        """What is in the L2 is read from there; what fits into it is there afterwards."""
        near = far = 0
        for place, (address, nbytes) in enumerate((*reads, *writes)):
            read = place < len(reads)
            hit = self._cached.get(address, 0) >= nbytes if read else nbytes <= CACHE_BYTES
            near, far = near + nbytes * hit, far + nbytes * (not hit)
            self._held += nbytes - self._cached.pop(address, 0)
            self._cached[address] = nbytes
            while self._held > CACHE_BYTES:  # the least recently used ones leave
                self._held -= self._cached.popitem(last=False)[1]
        return near / CACHE_BYTES_PER_US + far / MEMORY_BYTES_PER_US

    def evict(self) -> None:
        """Empty the L2."""
        self._cached.clear()
        self._held = 0

    def wait(self, until_us: float | None = None) -> None:
        """Let the host wait until then, or until everything is done."""
        if self.current.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        done_us = max(self.current.ready_us, self.default.ready_us)
        self.host_us = max(self.host_us, done_us if until_us is None else until_us) + SYNC_US

    def record(self, event: Event) -> None:
        """Mark the stream's present end; in a graph, that of each replay."""
        self.host_us += EVENT_US

        def run() -> None:
            event.at_us = max(self.current.ready_us, self.host_us)

        graph = self.current.capturing
        graph.nodes.append(run) if graph else run()

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        """Between two marks, in whole ticks."""
        if max(begin.at_us, end.at_us) > self.host_us:
            raise RuntimeError("CUDA error: device not ready")
        return (end.at_us // TICK_US - begin.at_us // TICK_US) * TICK_US / 1000

    def replay(self, graph: Graph) -> None:
        """All nodes, one after another on the device, for one launch of the host."""
        self.host_us += REPLAY_US
        for node in graph.nodes:
            node()

    def allocate(self, nbytes: int) -> tuple[int, Callable[[], None]]:
        """An address, where as many bytes were last freed; and what frees them.

        What a graph asks for lies elsewhere.
        """
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        if self.live > self.reserved:
            self.reserved = self.live
            self.driver_calls += 1
            self.host_us += DRIVER_US
        free = self._free.setdefault((nbytes, id(self.current.capturing)), [])
        address = free.pop() if free else next(self._addresses)

        def give_back() -> None:
            self.live -= nbytes
            free.append(address)

        return address, give_back
