"""A gate run as data: what it promises and what it measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from attnbench.base.stats import median
from attnbench.errors import UsageError
from attnbench.schema.record import Cell, Status

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=0, le=2.0**63)]
Probability = Annotated[float, Meta(gt=0, lt=1)]
Rounds = Annotated[int, Meta(ge=1, le=10_000)]

# The slowdown to be found unless --threshold says otherwise: a shared CPU is noisier than a GPU.
DEFAULT_THRESHOLD = {"cpu": 0.10, "cuda": 0.05}
# What may grow by which share, unless --growth says otherwise.
GROWTH = {"flops": 0.01, "memory": 0.01}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The promise of one gate run. All shares: 0.1 is 10 %.

    `threshold`: a slowdown of this size is found. Its third is the `margin`: what is smaller is
    never reported as a regression. `alpha`: how often a run of identical versions may report one,
    given independent rounds and a bias within the margin. `beta`: how often a cell that is
    slower by the threshold may pass the screen, and how often its confirmation. `growth`: how
    far counted `flops` and `memory` may grow; a single number in older runs, where more was
    `regressed` and ended the run. `screen_rounds`: rounds of all cells; `looks`: after how
    many rounds of its confirmation a cell is decided, at most, each time anew. `budget_s`: wall
    time after which no round begins. `fail_removed`: what only the base has is a finding.

    Raises:
        UsageError: a value that cannot be right, named by its flag.
    """

    threshold: float = 0.10
    alpha: Probability = 0.01
    beta: Probability = 0.01
    growth: Mapping[str, float] | float = field(default_factory=lambda: dict(GROWTH))
    screen_rounds: Rounds = 8
    looks: Annotated[tuple[Rounds, ...], Meta(min_length=1)] = (8, 12, 16, 24, 32, 48)
    budget_s: float = 300.0
    fail_removed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and 0.001 <= self.threshold <= 1):
            raise UsageError(f"--threshold {self.threshold:.4g} is not a share from 0.1% to 100%")
        for name, share in GROWTH.items():
            if not (math.isfinite(share := self.allowed(name)) and share >= 0):
                raise UsageError(f"--growth {name}={share:.4g} is not a share of 0% or more")
        if not (math.isfinite(self.budget_s) and self.budget_s >= 1):
            raise UsageError(f"--budget {self.budget_s:g} s is not a time of at least 1 s")
        if any(later <= earlier for earlier, later in itertools.pairwise(self.looks)):
            raise ValueError(f"looks must ascend, not {self.looks}")

    def allowed(self, resource: str) -> float:
        """By which share `flops` or `memory` may grow."""
        of = self.growth if isinstance(self.growth, Mapping) else {resource: self.growth}
        return of.get(resource, GROWTH[resource])

    @property
    def margin(self) -> float:
        """A slowdown below it is no regression, however surely it is there."""
        return self.threshold / 3


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A test that uses pytest's fixture `benchmark`: a cell of `pytest --attnbench-gate`.

    `impl` is its node id, which stands where that of other cells names the implementation.
    """

    impl: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"impl": self.impl}


GateCell = Cell | Benchmark
VersionName = Literal["base", "candidate"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter other than our own: what people call it, its path, what is installed in it."""

    name: str
    python: str
    python_version: str
    torch: str
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`torch 2.11.0, Python 3.11.7 (old/bin/python)`."""
        return f"torch {self.torch}, Python {self.python_version} ({self.name})"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One of the two versions of the code, and what runs it.

    `root` is the folder it lies in, `files` the implementation files there (absolute), `ref` what
    was asked for (None: the working tree as it is), `commit` its full id, `dirty` whether
    anything came on top of it, `changes` what. `environment` runs it, or if None this installation.
    """

    name: VersionName
    root: str
    files: tuple[str, ...]
    ref: str | None = None
    commit: str | None = None
    dirty: bool = False
    changes: str = ""
    environment: Environment | None = None

    @property
    def is_file(self) -> bool:
        """Whether it is a file by itself, of no repository (`--against`)."""
        return self.ref is not None and self.commit is None


# The metrics of a record that repeat exactly, by name (`exact.ROWS`); None is unknown.
ExactMetrics = Mapping[str, Count | Amount | str | None]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of a cell of one version before anything was timed.

    `status` is that of a record, or `absent`: the version has no such implementation. Where it is
    ok, `reason` says how it failed before it was tried again, if it did.
    """

    status: Status | Literal["absent"]
    reason: str | None = None
    metrics: ExactMetrics = field(default_factory=dict)


Stage = Literal["screen", "confirm"]
# What is timed in a round. `null`, the A/A control, is the base once more in a process of its own,
# in which nothing may be found; `planted`, the positive control, is that process slowed by the
# threshold, which must be found.
Variant = Literal["base", "candidate", "null", "planted"]
# The samples of a variant in the order they were taken; of each its batches, in ns a call.
Batch = Annotated[int, Meta(gt=0, le=2**63 - 1)]
Sample = Annotated[tuple[Batch, ...], Meta(min_length=1)]
Samples = Annotated[tuple[Sample, ...], Meta(min_length=1)]
CellNumber = Annotated[int, Meta(ge=0)]


class Failure(Struct, frozen=True, kw_only=True):
    """Why a cell has no time in a round, and in which variant's process that was."""

    variant: Variant
    code: Status
    reason: str

    @property
    def process(self) -> str:
        """The variant, as people call it."""
        return {"null": "A/A control", "planted": "slowed"}.get(self.variant, self.variant)

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


class RoundFacts(TypedDict, total=False):
    """What else is known of a round.

    The `cpu` it was pinned to; by how many bytes each process has grown while a cell was timed;
    shares of the round's wall time that others took; `counted_despite`, a reason to discard it
    that was passed over.
    """

    cpu: int | None
    grown: Mapping[str, Mapping[str, int]]
    stolen: float
    foreign: float
    withheld: float
    counted_despite: str


class Round(Struct, frozen=True, kw_only=True):
    """The raw data of one round. Cells are numbered as the run lists them.

    `cpu` has the CPU time of the same batches, in ns a call: that of the process, but their time
    where it waited by itself. A cell whose CPU time is not what its calls take (a GPU, several
    threads) is not in it.

    `failures` are of the cells that have no samples. `discarded` says why the round counts for
    nothing: a reason from counters of the system, never from its times. `spent_s` is the wall time.
    """

    stage: Stage
    samples: Mapping[CellNumber, Mapping[Variant, Samples]]
    failures: Mapping[CellNumber, Failure] = {}
    discarded: str | None = None
    facts: RoundFacts = {}
    spent_s: Amount = 0.0
    cpu: Mapping[CellNumber, Mapping[Variant, Samples]] = {}

    def log_ratio(self, cell: int, above: Variant) -> float | None:
        """ln(time of `above` / time of the base) in a cell; None if not timed.

        The round's one observation: the median over pairs of samples, which were taken one soon
        after the other, at whatever speed the machine had then. Of each sample the fastest batch
        counts, less what other work took from it.
        """
        pairs = self.pairs(cell, above)
        return median(pairs) if pairs else None

    def pairs(self, cell: int, above: Variant) -> list[float]:
        """ln(time of `above` / time of the base) of each pair of samples; none if not timed."""
        of = self.samples.get(cell, {})
        if above not in of or "base" not in of:
            return []
        own = [[min(sample) for sample in self.own_ns(cell, each)] for each in (above, "base")]
        return [math.log(one / other) for one, other in zip(*own, strict=True)]

    def mean_log_ratio(self, cell: int, above: Variant) -> float:
        """ln(mean over all batches of `above` / that of the base) in a cell, which was timed.

        It shows what fast batches hide: a call that is slow now and then. Nothing is called a
        regression by it, since more of what goes on beside it is in it, too.
        """
        one, other = (fmean(itertools.chain(*self.own_ns(cell, of))) for of in (above, "base"))
        return math.log(one / other)

    def own_ns(self, cell: int, of: Variant) -> list[list[int]]:
        """The samples of a variant in a cell, each batch less what other work took from it.

        Wall time is above what a call takes by all that others took, CPU time by what they left
        in the caches: the lesser of the two.
        """
        samples = self.samples[cell][of]
        cpu = self.cpu.get(cell, {}).get(of, samples)
        return [list(map(min, *both)) for both in zip(samples, cpu, strict=True)]

    @property
    def slowed(self) -> int | None:
        """The cell of the positive control in this round, if any."""
        return next((cell for cell, of in self.samples.items() if "planted" in of), None)


@dataclass(frozen=True, kw_only=True)
class GateRun:
    """Everything a verdict rests on: `gate.json`.

    `checks` holds by cell number and version what `Checked` says. `environment` are facts of the
    machine and of the candidate's libraries, `base_environment` those of the base where another
    interpreter runs it. `spent` maps parts of the run to wall seconds. `over_budget` says that time
    ran out before all was decided, `at_finding` that the run ended at something wrong, which more
    rounds could not change.
    """

    rules: Rules
    base: Version
    candidate: Version
    cells: tuple[GateCell, ...]
    checks: Mapping[CellNumber, Mapping[VersionName, Checked]]
    rounds: tuple[Round, ...]
    environment: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    base_environment: Mapping[str, Any] = field(default_factory=dict)
    spent: Mapping[str, Amount] = field(default_factory=dict)
    over_budget: bool = False
    at_finding: bool = False
