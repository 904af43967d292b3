"""A simulated GPU with its host, in microseconds: streams, events, graphs, caches, memory, faults.

Nothing here knows torch. The host issues work and goes on; each stream does its own in order; who
waits for the device joins the two clocks. What is asked of it must be right to the last digit, so
that times that were measured can be held against it.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.rehearsal.profiles import Profile

READ_US = 0.05  # what the host takes to look at its clock
SYNC_US, EVENT_US, REPLAY_US = 2.0, 0.5, 6.0
NEAR_US, FAR_US = 0.15, 0.3  # how long a load takes from the L2 and from memory
NEVER_US = 1e12
DEEPEST = 1024  # launches that may wait on the device before the host has to


class LostError(RuntimeError):
    """As torch raises for an error that no later call of the process survives."""


class OutOfMemoryError(RuntimeError):
    """More than the device has."""


@dataclass
class Stream:
    """A queue: when what was given to it so far will be done."""

    ready_us: float = 0.0
    capturing: Graph | None = None


@dataclass
class Event:
    """A mark in a stream, with the time at which the device reached it."""

    at_us: float | None = None


@dataclass
class Graph:
    """What was captured: to be done at each replay, with nothing between for the host to do."""

    nodes: list[Callable[[], None]] = field(default_factory=list)
    failed: str | None = None


@dataclass(frozen=True)
class Kernel:
    """What ran: its launch by number and host time, and its begin and end on the device."""

    name: str
    launch: int
    issued_us: float
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Block:
    """Memory that the allocator has handed out."""

    address: int
    nbytes: int
    pool: tuple[int, int]


@dataclass
class Device:
    """One GPU. `faults` are names of what goes wrong, see `tests.rehearsal.__main__`."""

    profile: Profile
    faults: frozenset[str] = frozenset()
    host_us: float = 0.0
    default: Stream = field(default_factory=Stream)
    kernels: deque[Kernel] = field(default_factory=lambda: deque(maxlen=1 << 18))
    launches: int = 0
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=1 << 10))  # of the host, when
    lost: bool = False
    attached: bool = False  # a profiler, which makes launches slower
    busy_us: float = 0.0
    hang: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.current = self.default
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._held = 0  # bytes in it
        self._addresses = itertools.count(1)
        self._free: dict[tuple[int, int], list[Block]] = {}
        self._waiting: deque[float] = deque()
        self._seen: set[str] = set()
        self.live = self.peak = self.reserved = self.device_allocs = self.retries = self.ooms = 0
        self.dead_captures = 0

    # The host.

    def read_clock(self) -> float:
        """Microseconds on the host's clock; looking takes a moment."""
        self.host_us += READ_US
        return self.host_us

    def first_use(self, what: str, seconds: float) -> None:
        """The host waits, once, for something to be loaded, planned or compiled."""
        if what not in self._seen:
            self._seen.add(what)
            self.host_us += seconds * 1e6

    # Work.

    @property
    def slowness(self) -> float:
        """How many times as long a kernel takes as on a cool device."""
        return 1.4 if "throttle" in self.faults and self.busy_us > 2e6 else 1.0

    def launch(
        self,
        name: str,
        duration_us: Callable[[], float],
        *,
        reads: Iterable[tuple[int, int]] = (),
        writes: Iterable[tuple[int, int]] = (),
        flops_us: float = 0.0,
        rows: int = 0,
    ) -> None:
        """Issue a kernel. `reads` and `writes` are buffers, by address and bytes.

        It lasts `duration_us`, or as long as its FLOPs and its traffic take, whichever is longest;
        or as `rows` that are read one after another.
        """
        self._alive()
        self.host_us += (1.2 if self.attached else 1.0) * self.profile.op_us
        reads, writes = tuple(reads), tuple(writes)
        self.launches += 1
        number, issued_us = self.launches, self.host_us

        def run() -> None:
            near = bool(reads) and self._cached.get(reads[0][0], 0) >= reads[0][1]
            walk_us = rows * (NEAR_US if near else FAR_US)
            traffic_us = self._traffic_us(reads, writes)
            lasts = self.slowness * max(duration_us(), flops_us, traffic_us, walk_us)
            begin = max(self.current.ready_us, self.host_us)
            self.current.ready_us = begin + lasts
            self.busy_us += lasts
            self.kernels.append(Kernel(name, number, issued_us, begin, begin + lasts))

        self._issue(run)

    def _issue(self, run: Callable[[], None]) -> None:
        graph = self.current.capturing
        if graph is not None:
            graph.nodes.append(run)
            return
        while self._waiting and self._waiting[0] <= self.host_us:
            self._waiting.popleft()
        if len(self._waiting) >= DEEPEST:  # the queue is full: the host waits for a place in it
            self.host_us = max(self.host_us, self._waiting.popleft())
        run()
        self._waiting.append(self.current.ready_us)

    def _traffic_us(
        self, reads: tuple[tuple[int, int], ...], writes: tuple[tuple[int, int], ...]
    ) -> float:
        """What is in the L2 is read from there; what fits into it is there afterwards."""
        near = far = 0
        for address, nbytes in reads:
            if self._cached.get(address, 0) >= nbytes:
                near += nbytes
            else:
                far += nbytes
            self._touch(address, nbytes)
        for address, nbytes in writes:
            fits = nbytes <= self.profile.cache_bytes
            near, far = near + nbytes * fits, far + nbytes * (not fits)
            self._touch(address, nbytes)
        return near / self.profile.cache_gbps / 1e3 + far / self.profile.memory_gbps / 1e3

    def _touch(self, address: int, nbytes: int) -> None:
        """The least recently used buffers leave; one larger than the cache leaves nothing."""
        self._held -= self._cached.pop(address, 0)
        left = self.profile.cache_bytes - nbytes
        while self._cached and self._held > max(left, 0):
            self._held -= self._cached.popitem(last=False)[1]
        if left >= 0:
            self._cached[address] = nbytes
            self._held += nbytes

    def evict(self) -> None:
        """Nothing is in the L2 any more."""
        self._cached.clear()
        self._held = 0

    def sleep(self, cycles: int) -> None:
        """A kernel that spins for so many cycles, which do not slow down with the clock's load."""
        self.launch("spin_kernel", lambda: self.profile.kernel_us + cycles / self.profile.mhz)

    # Waiting.

    def _alive(self) -> None:
        if self.lost:
            raise LostError("CUDA error: an illegal memory access was encountered")

    def _may_wait(self) -> None:
        if self.current.capturing is not None:
            self.current.capturing.failed = "operation not permitted when stream is capturing"
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def synchronize(self) -> None:
        """Wait until everything is done."""
        self._alive()
        self._may_wait()
        self.waits.append(self.host_us)
        self._join(self.current.ready_us)
        self._join(self.default.ready_us)

    def _join(self, until_us: float) -> None:
        if until_us - self.host_us > NEVER_US:
            self.hang()
        self.host_us = max(self.host_us, until_us)
        self.host_us += SYNC_US

    def record(self, event: Event) -> None:
        """Mark the stream's present end."""
        self._alive()
        stream = self.current
        self.host_us += EVENT_US

        def run() -> None:
            event.at_us = max(self.current.ready_us, self.host_us)  # at a replay: its stream

        stream.capturing.nodes.append(run) if stream.capturing else run()

    def wait_event(self, event: Event) -> None:
        """Wait until the device has reached it."""
        self._alive()
        self._may_wait()
        if event.at_us is None:
            raise RuntimeError("the event was not recorded")
        self._join(event.at_us)

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        """Between two marks, in whole ticks."""
        if begin.at_us is None or end.at_us is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if max(begin.at_us, end.at_us) > self.host_us:
            raise RuntimeError("CUDA error: device not ready")
        tick = self.profile.tick_us
        return (math.floor(end.at_us / tick) - math.floor(begin.at_us / tick)) * tick / 1000

    # Graphs.

    def begin_capture(self, graph: Graph, stream: Stream) -> None:
        """From now on work of the stream becomes nodes."""
        if stream is self.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self.dead_captures:
            raise RuntimeError("a capture that failed before holds the allocator's pool")
        graph.nodes.clear()
        stream.capturing = graph

    def end_capture(self, stream: Stream) -> None:
        """A capture that failed leaves the process damaged, as torch's does."""
        graph, stream.capturing = stream.capturing, None
        assert graph is not None
        if "capture" in self.faults:
            graph.failed = "operation failed due to a previous error during capture"
        if graph.failed is not None:
            self.dead_captures += 1
            raise RuntimeError(f"CUDA error: {graph.failed}")

    def replay(self, graph: Graph) -> None:
        """All nodes, one after another on the device, for one launch of the host."""
        self._alive()
        self.host_us += REPLAY_US
        for node in graph.nodes:
            node()

    # Memory.

    def allocate(self, nbytes: int) -> Block:
        """Where so many bytes lie: where the last of as many lay that are free again.

        What a capture asks for comes from a pool of its own. Raises OutOfMemoryError where the
        device has no more.
        """
        if self.live + nbytes > self.profile.memory_bytes:
            self.ooms += 1
            gib = nbytes / 2**30
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {gib:.2f} GiB.")
        if self.live + nbytes > self.reserved:
            if self.reserved + nbytes > self.profile.memory_bytes:
                self.retries += 1  # cached blocks are given back first, which waits for the device
                self._join(self.current.ready_us)
                self.reserved = self.live
            self.reserved += nbytes
            self.device_allocs += 1
            self.host_us += 100.0
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        pool = id(self.current.capturing or self), nbytes
        free = self._free.setdefault(pool, [])
        return (
            free.pop() if free else Block(address=next(self._addresses), nbytes=nbytes, pool=pool)
        )

    def free(self, block: Block) -> None:
        """Give bytes back to the allocator, which keeps them."""
        self.live -= block.nbytes
        self._free[block.pool].append(block)

    def empty_cache(self) -> None:
        """Give back to the device what nothing uses."""
        self.reserved = self.live
