"""From options and catalogue to ordered groups of cells, with the reason for each skip."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.case import Case, Device, Position, parse_mask, parse_position
from attnbench.errors import UsageError
from attnbench.record import Cell, Record
from attnbench.registry import Registry, unknown

# A process serves this many heats, so that its start-up (seconds) is shared but no cell lives
# in a process with a long past.
HEATS_PER_GROUP = 10


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What one sweep multiplies out. None means "as the axis it follows", or all of them."""

    workload: str = "attention"
    passes: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)
    batch_sizes: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = (4,)
    kv_heads: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...] = (512,)
    kv_lens: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] = (64,)
    value_dims: tuple[int, ...] | None = None
    masks: tuple[str, ...] = ("full",)
    positions: tuple[str, ...] = ("none",)
    widths: tuple[int, ...] | None = None
    caches: tuple[str, ...] | None = None
    new_tokens: tuple[int, ...] | None = None
    impls: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named list of sweeps, and the time budget of a cell that goes with them."""

    doc: str
    sweeps: tuple[Axes, ...]
    min_time_s: float
    max_time_s: float


# A case with the implementations to measure in it.
Entry = tuple[Case, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that share a process, heat by heat; all cells of a heat take turns.

    A heat holds what will be compared with each other: every implementation of a case, and the
    cases that differ in nothing but the position encoding or the cache.
    """

    heats: tuple[tuple[Entry, ...], ...]

    @property
    def cases(self) -> tuple[Entry, ...]:
        """Every case with its implementations, in order."""
        return tuple(itertools.chain.from_iterable(self.heats))

    def cells(self) -> Iterator[Cell]:
        """Every cell of the group, in order."""
        for case, impls in self.cases:
            for impl in impls:
                yield Cell(case=case, impl=impl)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells in order, the groups to measure, and the rows that are decided without it.

    `passes` are the cells to measure in the first fresh process of each, in the second, and so
    on: all of them, unless a run is resumed.
    """

    cells: tuple[Cell, ...]
    groups: tuple[Group, ...]
    decided: tuple[Record, ...] = field(default=())
    passes: tuple[tuple[Cell, ...], ...] = field(default=())


_POWERS = tuple(128 << i for i in range(5))
_DECODE_CACHES = ("rerun", "none", "concat", "static")

PRESETS: Registry[Preset] = Registry("preset", "--preset")
PRESETS.add(
    "quick",
    Preset(
        doc="a few minutes on two CPU cores: attention to n = 2048, decode to context 1024",
        sweeps=(
            Axes(
                seq_lens=_POWERS,
                heads=(4, 8),
                batch_sizes=(1, 2),
                positions=("none", "rope"),
                impls=("naive", "naive-heads", "sdpa", "sdpa-math", "chunked"),
            ),
            Axes(
                workload="decode",
                seq_lens=_POWERS[:4],
                caches=_DECODE_CACHES,
                impls=("naive", "sdpa"),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.15,
    ),
)
_GPU_IMPLS = ("naive", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "chunked")
PRESETS.add(
    "gpu",
    Preset(
        doc="one large GPU in under 8 minutes: bf16 to n = 16384, decode to context 131072",
        sweeps=(
            Axes(
                dtypes=("bfloat16",),
                passes=("forward", "both"),
                seq_lens=tuple(512 << i for i in range(6)),
                heads=(16,),
                head_dims=(64, 128),
                masks=("full", "causal"),
                impls=_GPU_IMPLS,
            ),
            Axes(
                dtypes=("bfloat16",),
                passes=("both",),
                seq_lens=(2048, 8192),  # two shapes alone: each compilation takes a while
                heads=(16,),
                head_dims=(128,),
                masks=("causal",),
                impls=("flex", "naive-compiled"),
            ),
            Axes(
                workload="decode",
                dtypes=("bfloat16",),
                seq_lens=tuple(2048 << i for i in range(7)),
                heads=(16,),
                kv_heads=(4,),
                head_dims=(128,),
                caches=("concat", "static"),
                impls=("naive", "sdpa"),
            ),
            Axes(
                workload="decode",
                dtypes=("bfloat16",),
                seq_lens=(512, 2048, 8192),
                heads=(16,),
                kv_heads=(4,),
                head_dims=(128,),
                caches=("rerun", "none"),
                impls=("sdpa",),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.25,
    ),
)


def expand(axes: Axes, device: Device) -> Iterator[Case]:
    """The cases of one sweep, each once.

    `decode` is causal by nature, has width H·D unless given, and no key/value length of its own.
    """
    choices: dict[str, tuple[Any, ...]] = {
        "pass_": axes.passes,
        "dtype": axes.dtypes,
        "mask": axes.masks,
        "position": tuple(parse_position(text) for text in axes.positions),
        "head_dim": axes.head_dims,
        "value_dim": axes.value_dims or (0,),
        "batch": axes.batch_sizes,
        "heads": axes.heads,
        "kv_heads": axes.kv_heads or (0,),
        "seq_len": axes.seq_lens,
    }
    if axes.workload == "decode":
        choices["width"] = axes.widths or (0,)
        choices["cache"] = axes.caches or ("static",)
        choices["new_tokens"] = axes.new_tokens or (8,)
    else:
        choices["kv_len"] = axes.kv_lens or (0,)
    seen: set[str] = set()
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        if axes.workload == "decode":
            chosen["width"] = chosen["width"] or chosen["heads"] * chosen["head_dim"]
            chosen["mask"] = "causal" if chosen["mask"] == "full" else chosen["mask"]
        chosen["mask"] = parse_mask(chosen["mask"])
        case = Case(workload=axes.workload, device=device, **chosen)
        if case.case_id not in seen:
            seen.add(case.case_id)
            yield case


def check_names(sweeps: Iterable[Axes], catalogue: dict[str, Any]) -> None:
    """Every name in the sweeps is one that the catalogue knows.

    Raises:
        UnknownNameError: one is not; the message gives the nearest.
        UsageError: the options contradict each other, or nothing is left to run.
    """
    known = [row["name"] for row in catalogue["implementations"]]
    for axes in sweeps:
        _known("workload", "--workload", [axes.workload], catalogue["workloads"])
        _known("implementation", "--impls", axes.impls or [], known)
        _known("cache", "--caches", axes.caches or [], catalogue["caches"])
        positions = [parse_position(text).name for text in axes.positions]
        _known("position encoding", "--positions", positions, catalogue["positions"])
        if axes.workload == "decode" and axes.kv_lens:
            raise UsageError("--kv-lens does not apply to --workload decode: the context is n")
        if axes.workload != "decode" and (axes.caches or axes.widths or axes.new_tokens):
            raise UsageError(
                "--caches, --widths and --new-tokens do not apply to"
                f" --workload {axes.workload}; they are decode's"
            )


def _known(kind: str, flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    valid = list(known)
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid, flag)


def make_plan(
    cells: Iterable[Cell],
    reasons: dict[tuple[str, str], str | None],
    *,
    processes: int = 1,
    done: Container[tuple[tuple[str, str], int]] = (),
) -> Plan:
    """Order the cells, group those to be measured, and decide the others.

    `reasons` maps a cell's key to why its implementation cannot take its case, or None. Each is
    measured in as many fresh `processes`; `done` has the keys and processes that were already.
    """
    unique = {cell.key: cell for cell in cells}
    decided, wanted = [], []
    for cell in unique.values():
        impossible = cell.case.impossible()
        against = reasons.get(cell.key)
        if impossible:
            decided.append(Record(cell=cell, status="skipped", reason=impossible))
        elif against:
            decided.append(Record(cell=cell, status="unsupported", reason=against))
        else:
            wanted.append(cell)
    return Plan(
        cells=tuple(unique.values()),
        groups=tuple(grouped(wanted)),
        decided=tuple(decided),
        passes=tuple(
            tuple(cell for cell in wanted if (cell.key, process) not in done)
            for process in range(processes)
        ),
    )


def grouped(cells: Iterable[Cell]) -> Iterator[Group]:
    """Heats of one workload, pass and dtype share processes, the small ones first in each."""
    by_case: dict[str, tuple[Case, list[str]]] = {}
    for cell in cells:
        by_case.setdefault(cell.case.case_id, (cell.case, []))[1].append(cell.impl)
    heats: dict[str, list[Entry]] = {}
    for case, impls in by_case.values():
        alike = replace(case, position=Position(), cache=None)
        heats.setdefault(alike.case_id, []).append((case, tuple(impls)))
    kinds: dict[tuple[str, str, str], list[tuple[Entry, ...]]] = {}
    for heat in heats.values():
        case = heat[0][0]
        kinds.setdefault((case.workload, case.pass_, case.dtype), []).append(tuple(heat))
    for kind in kinds.values():
        kind.sort(key=lambda heat: work(heat[0][0]))
        count = -(-len(kind) // HEATS_PER_GROUP)
        for first in range(count):  # dealt out in turn: each process gets small and large ones
            yield Group(heats=tuple(kind[first::count]))


def work(case: Case) -> float:
    """Rough number of multiply-adds of a case: for ordering and for the time still to go."""
    return float(case.batch * case.heads * case.seq_len * case.kv_len * case.head_dim)


def with_overrides(axes: Axes, overrides: dict[str, Any]) -> Axes:
    """The sweep with every axis that was given on the command line replaced."""
    return replace(axes, **{name: value for name, value in overrides.items() if value is not None})
