"""What the gate and the processes of a round say to each other: one line of JSON each."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from attnbench.gate.decide.data import Benchmark
from attnbench.schema.record import Status

CellT = TypeVar("CellT")


class Suite(Struct, frozen=True, kw_only=True):
    """The tests of a session of pytest: where it was started, and with which arguments.

    Both name the working tree by its absolute path. What processes write for themselves alone is
    in `scratch`.
    """

    tests: tuple[Benchmark, ...]
    folder: str
    arguments: tuple[str, ...]
    scratch: str


class VariantConfig(Struct, Generic[CellT], frozen=True, kw_only=True):
    """The first message to the process of a variant: its code imports nothing of `other_root`.

    `cpu` is what it is pinned to. Where cells are tests, they are those of `suite`, and `files`
    those that hold them; `listing` asks for all that the command line selects in this version.
    """

    files: tuple[str, ...]
    root: str
    other_root: str
    cells: dict[int, CellT]
    device: str
    threads: int | None
    seed: int
    cpu: int | None
    suite: Suite | None = None
    listing: bool = False


class Preparing(Struct, frozen=True, tag=True):
    """A process begins to build and check a cell."""

    cell: int


class CellFailed(Struct, frozen=True, tag=True):
    """A cell, or what was asked of it, failed."""

    code: Status
    reason: str


class Prepared(Struct, frozen=True, tag=True):
    """All cells are warm, but for those that failed; what the loaded files hold; tests by id."""

    failures: dict[int, CellFailed]
    digests: dict[str, str]
    tests: tuple[str, ...] = ()


class Refused(Struct, frozen=True, tag=True):
    """The files cannot be loaded as one version."""

    reason: str


class EnterCell(Struct, frozen=True, tag="enter"):
    """Ask for a test to be run up to what it times, once that before it has ended."""

    cell: int


class TakeSample(Struct, frozen=True, tag="sample"):
    """Ask for batches of so many calls, slowed by a share where `slowdown` is given.

    `untimed` asks for a call before them, since the caches are another's.
    """

    cell: int
    calls: int
    batches: int
    untimed: bool = True
    slowdown: float | None = None


class VerifyCell(Struct, frozen=True, tag="verify"):
    """Ask whether the result is right once the inputs changed, and how long that call takes.

    Of a test: whether it passes, with what stands in it after what it times.
    Beyond `remembered` times `fastest_us`, the fastest timed call, it is tried more than once.
    """

    cell: int
    fastest_us: float
    remembered: float


class ReadCounters(Struct, frozen=True, tag="counters"):
    """Ask for the counters of the process."""


RoundRequest = EnterCell | TakeSample | VerifyCell | ReadCounters


class CellEntered(Struct, frozen=True, tag=True):
    """Answers `EnterCell`: what the test times is warm."""


class SampleTaken(Struct, frozen=True, tag=True):
    """Answers `TakeSample`: nanoseconds a call of each batch, and the memory held after them.

    That is what the process has in RAM, and its tensors on a GPU.
    `cpu_ns` is the CPU time of the same calls, as `Round.cpu` has it; empty where that is not
    what they took (a GPU, several threads).
    """

    ns: tuple[int, ...]
    held_bytes: int
    cpu_ns: tuple[int, ...] = ()


class CellVerified(Struct, frozen=True, tag=True):
    """Answers `VerifyCell`: the time of a call whose inputs changed / that of the fastest."""

    changed_ratio: float


class CountersRead(Struct, frozen=True, tag=True):
    """Answers `ReadCounters`: processor time, and why a GPU's times cannot be trusted, if so."""

    cpu_ns: int
    discarded: str | None


Preparation = Preparing | Prepared | Refused
RoundAnswer = Preparation | CellFailed | CellEntered | SampleTaken | CellVerified | CountersRead
