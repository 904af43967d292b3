"""What crosses between a runner and its workers: frozen typed values, one line of JSON each."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from typing import Any, Literal, NamedTuple

import msgspec

from attnbench.base.parameters import Parameter
from attnbench.schema.case import Case, Device
from attnbench.schema.profile import Profile as CellProfile
from attnbench.schema.record import Cell, Record, Status


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A request or an event; its class is its tag."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told first: the files it loads, its threads, its limit of memory."""

    device: str
    threads: int | None = None
    memory_limit: str = "90%"
    files: tuple[str, ...] = ()
    replace: bool = False
    root: str | None = None
    other_root: str | None = None


class ImplementationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must know of an implementation.

    `approximates`: it computes something else than attention, by a definition of its own.
    `unavailable` says why it cannot run here.
    """

    name: str
    family: str
    parameters: dict[str, Parameter]
    doc: str
    file: str
    time: str | None
    memory: str | None
    flops_law: str | None
    workloads: tuple[str, ...]
    devices: tuple[str, ...]
    passes: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    gqa: bool
    value_dims: bool
    compiles: bool
    approximates: bool
    unavailable: str | None


class Catalogue(_Message, frozen=True, kw_only=True):
    """Answers `Describe`: what there is, by name with a line of doc, and the machine.

    `devices` maps each to why it cannot be used, or None; `environment` is empty where `device`
    cannot.
    """

    device: Device
    devices: dict[str, str | None]
    environment: dict[str, Any]
    implementations: tuple[ImplementationInfo, ...]
    families: dict[str, str]
    workloads: dict[str, str]
    positions: dict[str, str]
    projections: dict[str, str]
    caches: dict[str, str]
    masks: dict[str, str]


class Describe(_Message, frozen=True):
    """Ask for the catalogue; `auto` is a GPU if there is one."""

    device: str


class AskReasons(_Message, frozen=True):
    """Ask why each implementation cannot take each case."""

    cases: tuple[Case, ...]
    names: tuple[str, ...]


class AskNeeds(_Message, frozen=True):
    """Ask how much memory each implementation needs in each case, before it is measured."""

    cases: tuple[Case, ...]
    names: tuple[str, ...]


class MeasureCeilings(_Message, frozen=True):
    """Ask what the device can do at most, and a CPU with so many threads."""

    device: str
    dtypes: tuple[str, ...]
    threads: int


class Diagnose(_Message, frozen=True):
    """Ask for the self-tests of measuring."""

    device: str


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around attention in a model, as its config.json has it.

    `inner` is how many features an MLP has inside, or each of its `experts`, of which every token
    gets `chosen`; `vocab` how many logits the head gives. Either is 0 where it is not timed, and
    `notes` say why.
    """

    layers: int
    inner: int = 0
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu-tanh", "relu"] = "silu"
    experts: int = 1
    chosen: int = 1
    vocab: int = 0
    notes: tuple[str, ...] = ()


class Measure(_Message, frozen=True, kw_only=True):
    """Ask for a record of every cell of these groups: cases with their implementations.

    To `prune` is to skip what is larger than a cell that ran out of memory, such as those of `oom`.
    With `race_s` the cells of a case race: those `kept` come first and stay until their ratio is
    known well; others are dropped if one call of theirs is far slower, and timed no further once
    they are decided. Timing ends after `race_s` seconds, all else after `limit_s`.
    `reference_s` is how long the references of a case may take: of one that takes longer a part is
    checked. Of a `model` its MLP and head are timed beside each layer.
    """

    groups: tuple[tuple[tuple[Case, tuple[str, ...]], ...], ...]
    seed: int
    precision: float
    min_time_s: float
    max_time_s: float
    l2: str | None = None
    timer: str | None = None
    energy: bool = False
    prune: bool = True
    race_s: float | None = None
    limit_s: float | None = None
    reference_s: float | None = None
    kept: tuple[str, ...] = ()
    model: ModelSizes | None = None
    oom: tuple[Cell, ...] = ()


class Profile(_Message, frozen=True):
    """Ask which kernels each cell of these cases runs, in a process that times nothing."""

    cases: tuple[tuple[Case, tuple[str, ...]], ...]
    seed: int


class Trace(_Message, frozen=True, kw_only=True):
    """Ask where the time and the memory of a cell go, in a process that times nothing else.

    `file` is where the trace is written, gzipped JSON that Perfetto opens.
    """

    case: Case
    impl: str
    seed: int
    file: str
    label: str


class CheckItem(msgspec.Struct, frozen=True):
    """One check of the battery; `draw` says how inputs are drawn where not as usual."""

    case: Case
    impl: str
    draw: dict[str, Any] = {}


class Check(_Message, frozen=True):
    """Ask which results are right."""

    items: tuple[CheckItem, ...]
    seed: int


Asked = Describe | AskReasons | AskNeeds | MeasureCeilings | Diagnose
Request = Asked | Measure | Profile | Trace | Check


class Ready(_Message, frozen=True):
    """The worker has loaded everything; `own` are the names that each of the user's files has."""

    warnings: tuple[str, ...]
    own: tuple[tuple[str, ...], ...]


class Failed(_Message, frozen=True):
    """The worker cannot serve; `usage` says that the user's files or options are to blame."""

    message: str
    usage: bool


class Reasons(_Message, frozen=True):
    """Answers `AskReasons`: for each implementation, case by case, why not, or None."""

    reasons: dict[str, tuple[str | None, ...]]


class Needs(_Message, frozen=True):
    """Answers `AskNeeds`: for each implementation, case by case, bytes; and how many are free."""

    needs: dict[str, tuple[int | None, ...]]
    free: int | None


class Facts(_Message, frozen=True):
    """Answers `MeasureCeilings` (see `measure.ceilings`) and `Diagnose` (`worker.diagnosis`)."""

    facts: dict[str, Any]


class Testing(_Message, frozen=True):
    """What a self-test tests, in words, before it begins."""

    test: str


class CellMeasured(_Message, frozen=True):
    """A cell of the case of this index in the request is done."""

    index: int
    record: Record

    @property
    def key(self) -> tuple[int, str]:
        """Index and implementation."""
        return self.index, self.record.cell.impl


class _Of(_Message, frozen=True):
    index: int
    impl: str

    @property
    def key(self) -> tuple[int, str]:
        """Index and implementation."""
        return self.index, self.impl


class CellProfiled(_Of, frozen=True):
    """The kernels of a cell of the case of this index in the request are known, or why not."""

    metrics: dict[str, Any]


class CellTraced(_Message, frozen=True, kw_only=True):
    """Answers `Trace`: the profile of an ok cell, else why there is none."""

    impl: str
    status: Status
    reason: str | None = None
    profile: CellProfile | None = None

    @property
    def key(self) -> tuple[int, str]:
        """Index and implementation: there is one case."""
        return 0, self.impl


class ItemChecked(_Of, frozen=True):
    """An item of this index in the request is checked."""

    status: Status
    reason: str | None = None
    metrics: dict[str, Any] = {}


class Done(_Message, frozen=True):
    """The request is served."""


Result = CellMeasured | CellProfiled | CellTraced | ItemChecked
Event = Ready | Failed | Testing | Catalogue | Reasons | Needs | Facts | Result | Done


LATE_S = 15.0  # a race may end so much after its limit, where a call is at work
_LAYOUT = struct.Struct("<qqqqqd32s")
NOBODY = -1


class Sign(NamedTuple):
    """What was last written: a step counter, the case and implementation indices, the stage.

    `begun` is of how many implementations code has run in this process, `printed` how many bytes of
    standard error there were when it came to this cell. After `limit_s` seconds without another
    sign the process is to be ended.
    """

    step: int
    case: int
    impl: int
    begun: int
    printed: int
    limit_s: float
    stage: str


class Heartbeat:
    """One mapped file, of a descriptor, written by the worker and read by the runner."""

    def __init__(self, descriptor: int) -> None:
        if not os.fstat(descriptor).st_size:
            os.write(descriptor, _LAYOUT.pack(0, NOBODY, NOBODY, 0, 0, math.inf, b"start-up"))
        self._map = mmap.mmap(descriptor, _LAYOUT.size)
        self._step = 0
        self._begun: set[str] = set()
        self._at, self._printed = (NOBODY, NOBODY), 0  # bytes

    def write(
        self, case: int, impl: int, stage: str, name: str | None = None, limit_s: float = math.inf
    ) -> None:
        """Note: now at this case (index in the group), this implementation, this stage.

        `name` is of the implementation whose code is about to run, for `limit_s` seconds at most.
        """
        self._step += 1
        self._begun |= {name} if name else set()
        if self._at != (case, impl):
            self._at = case, impl
            with contextlib.suppress(OSError):  # someone closed it
                self._printed = os.fstat(2).st_size
        sign = self._step, case, impl, len(self._begun), self._printed, limit_s
        self._map[:] = _LAYOUT.pack(*sign, stage.encode()[:32])

    def beat(self) -> None:
        """Note: still at the same, and alive."""
        self._step += 1
        self._map[:8] = self._step.to_bytes(8, "little")

    def read(self) -> Sign:
        """What the worker noted last."""
        *numbers, stage = _LAYOUT.unpack(self._map[:])
        return Sign._make([*numbers, stage.rstrip(b"\0").decode(errors="replace")])

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
