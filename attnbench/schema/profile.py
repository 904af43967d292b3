"""A profile: where the time and the memory of one cell go, as JSON with a schema number.

Times are microseconds of one call, counts are of one call (means: not always whole), bytes and
FLOPs of one call. Unknown is null, never 0. A call of `decode` generates several tokens; nothing
here is divided by them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from attnbench.base.files import read, reading, write_whole
from attnbench.base.jsontext import decode, encode, sealed, unsealed
from attnbench.schema.case import Case
from attnbench.schema.record import Cell

SCHEMA = 2
FILE, TRACE = "profile.json", "trace.json.gz"

Ceiling = Literal["matmul", "memory"]
# What to know before reading on; figures in `Note.figures`, sentences where they are shown.
NoteCode = Literal[
    "profiler-cost",  # profiled calls took `ratio` times the unprofiled ones
    "compiled",  # compiled code: the dispatcher is not asked for FLOPs and bytes of its ops
    "no-costs",  # the pass that learns FLOPs and bytes raised: `error`
    "kernels-lost",  # the GPU's profiler lost kernels of the calls, or saw none
    "few-calls",  # only `calls` calls fitted into the budget of `events` events
    "disturbed",  # other work: profiled calls had their core for `share` of their time
    "threads",  # `threads` threads computed: times are those of the thread that calls
    "memory-differs",  # traced and measured workspace: `traced_bytes`, `measured_bytes`
    "suspect",  # the `op` reached `share` of the `ceiling`, which was measured twice
    "prediction-differs",  # traced and predicted workspace: `traced_bytes`, `predicted_bytes`
]


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """What one call spends under one name: an op of torch on CPU, a kernel on CUDA.

    `self_us` is without the ops called inside, the mean over the profiled calls, of which half lie
    from `low_us` to `high_us`. `flops` and `bytes` (read plus written, each tensor once) come
    from the sizes of its tensors; null for an op without a formula, or whose work is done by the
    ops inside. `share` is the least time that the measured ceiling of the machine allows, over
    `self_us`; `ceiling` is the one that binds, both null where neither applies (no FLOPs, and data
    that fit into the cache).
    `allocated_bytes` is all that it allocated, freed again or not.
    """

    name: str
    count: float
    self_us: float
    low_us: float | None = None
    high_us: float | None = None
    flops: float | None = None
    bytes: float | None = None
    share: float | None = None
    ceiling: Ceiling | None = None
    allocated_bytes: int | None = None

    @property
    def tflops(self) -> float | None:
        """FLOPs over self time, in TFLOP/s."""
        return self.flops / self.self_us / 1e6 if self.flops and self.self_us else None

    @property
    def gbps(self) -> float | None:
        """Bytes over self time, in GB/s (10⁹ bytes)."""
        return self.bytes / self.self_us / 1e3 if self.bytes and self.self_us else None


class Unprofiled(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a call without a profiler, taken in the same process: beside or before the profiler.

    A sample is the fastest of a few batches of `calls` calls in a row, since other work only adds
    to a time. `low_us` and `high_us` are the 95 % interval of their median; null where they are too
    few. `timer` is host, or events on a GPU; `l2` cold or warm.
    """

    median_us: float
    low_us: float | None
    high_us: float | None
    samples: int
    calls: int
    timer: str
    l2: str


class Live(msgspec.Struct, frozen=True):
    """A point of the memory timeline: bytes alive right after a change.

    `t_us` counts from the begin of the call, by the clock of a pass with memory profiling, which is
    slower than the others. `live_bytes` is above what was alive before the call. `op` is who
    allocated or freed; null for a free outside of any op, where Python lets go of a tensor.
    """

    t_us: float
    live_bytes: int
    op: str | None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What one call has allocated at once, above what was alive before it.

    `peak_bytes` is the traced peak, reached in `peak_op`; `outputs_bytes` what the call returns.
    Three figures of one workspace, peak without outputs: `traced_bytes` by the profiler's events,
    `measured_bytes` as a sweep's record has it, `predicted_bytes` from sizes alone.
    """

    timeline: tuple[Live, ...]
    peak_bytes: int | None
    peak_op: str | None
    outputs_bytes: int | None
    traced_bytes: int | None
    measured_bytes: int | None
    predicted_bytes: int | None


class Note(msgspec.Struct, frozen=True):
    """What to know before reading on, as a code with its figures."""

    code: NoteCode
    figures: dict[str, float | int | str] = {}


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time and the memory of one cell go.

    `case` is that of `Case.to_json`. `label` names the version in a comparison: the implementation,
    and its commit or environment where these are compared. `environment` are facts of the machine
    as `run.json` has them, `ceilings` what it can do at most (`measure.ceilings`).

    `profiled_us` is the mean time of a call under the profiler, over `calls` calls. On CPU each of
    these stands for a few in a row: every op has the least of its times in them, since other work
    adds to one now and to another then, so that all of them add up to a little less.
    `ops` are sorted by self time, longest first. `gaps_us` is time of a profiled call in which no
    op ran (CPU: Python, autograd's engine), or no kernel (CUDA: `gaps` gaps between kernels); on
    CUDA `launch_us` is the median from a launch on the host to the begin of its kernel.
    `trace` is the file beside this one, null
    where none was kept, with `trace_events` events. `commands` are those of other profilers for
    this cell, by their names (`nsys`, `ncu`): empty on CPU.
    """

    schema: Literal[2] = 2
    case: dict[str, Any]
    impl: str
    label: str
    environment: dict[str, Any]
    ceilings: dict[str, Any]
    time: Unprofiled
    profiled_us: float
    calls: int
    ops: tuple[Op, ...]
    gaps_us: float
    gaps: int | None = None
    launch_us: float | None = None
    memory: Memory
    trace: str | None = None
    trace_events: int | None = None
    notes: tuple[Note, ...] = ()
    commands: dict[str, str] = {}

    @property
    def cell(self) -> Cell:
        """The case and the implementation."""
        return Cell(case=Case.from_json(self.case), impl=self.impl)

    @property
    def self_us(self) -> float:
        """Sum of the self times of all ops."""
        return sum(op.self_us for op in self.ops)

    @property
    def outside_us(self) -> float:
        """Unprofiled time outside ops: Python, dispatch, launch gaps.

        Below 0 where the profiler's own cost inside the ops is larger than that.
        """
        return self.time.median_us - self.self_us


def write_profile(folder: Path, profile: Profile) -> Path:
    """Write it as `profile.json` into an existing folder; return the file.

    Raises:
        StoreError: it cannot be written.
    """
    file = folder / FILE
    write_whole(file, sealed(msgspec.json.format(encode(profile), indent=1).decode()) + "\n")
    return file


def read_profile(path: Path) -> Profile:
    """A profile from its folder or its file.

    Raises:
        StoreError: there is none, or it is damaged or of another schema.
    """
    file = path / FILE if path.is_dir() else path
    whose = f", or not a profile of schema {SCHEMA}"
    with reading(file, whose, "; make one with: attnbench profile IMPL"):
        return decode(unsealed(read(file)), Profile)
