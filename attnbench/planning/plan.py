"""What a sweep varies, and from its cells to ordered groups, with the reason for each skip."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from attnbench.base.parameters import base_name, meant, read_name, read_parameters
from attnbench.base.registry import Registry, require
from attnbench.base.units import parse_names, parse_sizes
from attnbench.errors import UsageError
from attnbench.schema.axes import AXES, KEYWORDS
from attnbench.schema.case import Case, Device, parse_mask, parse_position
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.theory.caches import CACHES
from attnbench.theory.projections import PROJECTIONS
from attnbench.theory.traits import TRAITS, impossible, work

# A process serves this many groups, so that its start-up (seconds) is shared but no cell lives
# in a process with a long past.
GROUPS_PER_JOB = 10
# On a CPU, up to so many multiply-adds (about a second), the lengths of a case share their rounds.
SHORT = 2.0**34


@dataclass(frozen=True, init=False)
class Axes:
    """What one sweep multiplies out: `Axes(seq_lens=(128, 256), impls="naive,sdpa")`.

    `values` are those of the axes that are given, by keyword; the others follow, or have their
    defaults. A text is read as by the axis' flag. `impls` None means all. Widths E without
    `head_dims` keep the heads, and D = E/H; with `head_dims` and without `heads` they keep D, and
    H = E/D. `threads` are those of a CPU; `ALL_THREADS` stands for as many as torch takes by
    itself. `count` is how often `step`, where that has a name, makes each call.

    Raises:
        UnknownNameError: there is no such axis.
        UsageError: a text that its axis does not take.
    """

    workload: str
    impls: tuple[str, ...] | None
    values: Mapping[str, tuple[Any, ...]]
    count: int
    step: str

    def __init__(
        self,
        workload: str = "attention",
        impls: str | Iterable[str] | None = None,
        count: int = 1,
        step: str = "",
        **axes: Any,
    ) -> None:
        known = ("workload", *KEYWORDS, "impls")
        require("axis", axes, known, "how to measure goes into settings={…}")
        given = {n: _listed(x, KEYWORDS[n].read) for n, x in axes.items() if x is not None}
        names = None if impls is None else _listed(impls, partial(parse_names, flag="--impls"))
        own = {"workload": workload, "impls": names, "values": given, "count": count, "step": step}
        self.__dict__.update(own)

    def having(self, **axes: Any) -> Self:
        """The same with other values of some axes."""
        own = {name: value for name, value in vars(self).items() if name != "values"}
        return type(self)(**{**own, **self.values, **axes})


def _listed(value: Any, read: Callable[[str], Iterable[Any]]) -> tuple[Any, ...]:
    value = read(value) if isinstance(value, str) else value
    values = (value,) if isinstance(value, (int, float)) else tuple(value)
    return tuple(None if each == "default" else each for each in values)  # of scales


# A case with the implementations to measure in it.
Entry = tuple[Case, tuple[str, ...]]
Group = tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cells that share a process, group by group; all cells of a group are interleaved.

    A group holds what will be compared with each other: every implementation of a case, and the
    cases that differ in nothing but the position encoding, the projection, the cache, how many
    tokens a step of decoding takes, or whether their tokens are padded or packed. Jobs of another
    `process` (the first, the second in which each cell is measured) share nothing with it. In a
    race timing ends at `timed_until`, and all else at `until`, by `time.perf_counter`.
    """

    groups: tuple[Group, ...]
    process: int = 0
    timed_until: float = math.inf
    until: float = math.inf

    @property
    def cases(self) -> tuple[Entry, ...]:
        """Every case with its implementations, in order."""
        return tuple(itertools.chain.from_iterable(self.groups))

    def cells(self) -> list[Cell]:
        """Every cell of the group, in order."""
        return [Cell(case=case, impl=impl) for case, impls in self.cases for impl in impls]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells in order, the groups to measure, and the rows that are decided without it.

    `passes` are the cells to measure in the first fresh process of each, in the second, and so
    on: all of them, unless a run is resumed. `not_here` says why implementations that nobody named
    can run in none of the cases; they have no cells. `joined` is as in `groups_of`.
    """

    cells: tuple[Cell, ...]
    jobs: tuple[Job, ...]
    decided: tuple[Record, ...] = ()
    passes: tuple[tuple[Cell, ...], ...] = ()
    not_here: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False


def make_plan(
    cells: Iterable[Cell],
    reasons: dict[tuple[str, str], str | None],
    *,
    processes: int = 1,
    done: Container[tuple[tuple[str, str], int]] = (),
    mismatches: Mapping[str, str | None] | None = None,
    unnamed: Container[str] = (),
) -> Plan:
    """Order the cells, group those to be measured, and decide the others.

    `reasons` maps a cell's key to why its implementation cannot take its case, or None, and
    `mismatches` the id of a case to why it is not what was asked for. Each cell is measured in as
    many fresh `processes`; `done` has the keys and processes that were already. Of implementations
    that are `unnamed`, which are there by default, those that can run nowhere are left out.
    """
    unique = {cell.key: cell for cell in cells}
    able = {cell.impl for cell in unique.values() if not reasons.get(cell.key)}
    idle = [c for c in unique.values() if c.impl in unnamed and c.impl not in able and able]
    not_here = {cell.impl: str(reasons[cell.key]) for cell in idle}
    unique = {key: cell for key, cell in unique.items() if cell.impl not in not_here}
    decided, wanted = [], []
    for cell in unique.values():
        senseless = impossible(cell.case) or (mismatches or {}).get(cell.case.case_id)
        against = reasons.get(cell.key)
        if senseless:
            decided.append(Record(cell=cell, status="skipped", reason=senseless))
        elif against:
            decided.append(Record(cell=cell, status="unsupported", reason=against))
        else:
            wanted.append(cell)
    return Plan(
        cells=tuple(unique.values()),
        jobs=tuple(jobs_of(wanted)),
        decided=tuple(decided),
        passes=tuple(
            tuple(cell for cell in wanted if (cell.key, process) not in done)
            for process in range(processes)
        ),
        not_here=not_here,
    )


_TOGETHER = {name: getattr(Case(), name) for name, axis in AXES.items() if axis.beside}


def groups_of(cells: Iterable[Cell], *, joined: bool = False) -> list[Group]:
    """The cells by what is compared with each other, as `Job` has it.

    `joined` puts short calls that differ in length alone into one group: how time grows with n is
    then seen within each round, whatever the core's speed and other work are meanwhile.
    """
    by_case: dict[str, tuple[Case, list[str]]] = {}
    for cell in cells:
        by_case.setdefault(cell.case.case_id, (cell.case, []))[1].append(cell.impl)
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for case, impls in by_case.values():
        alike = replace(case.unpadded, **_TOGETHER).to_json()
        call = TRAITS.get(case.workload).unit == "call" and case.seq_len == case.kv_len
        if joined and case.device == "cpu" and call and work(case) <= SHORT:
            alike |= {"seq_len": None, "kv_len": None}
        groups.setdefault(tuple(map(str, alike.items())), []).append((case, tuple(impls)))
    return [tuple(group) for group in groups.values()]


def reads_cache(case: Case) -> bool:
    """Whether it is a step of decoding, or the core is given more keys than queries."""
    return case.workload == "decode" or case.seq_len < case.kv_len


def jobs_of(cells: Iterable[Cell], *, joined: bool = False) -> Iterator[Job]:
    """Groups of one workload, pass, dtype and number of threads share processes.

    Those that read a cache have processes of their own. In each the small ones come first.
    """
    similar: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups_of(cells, joined=joined):
        case = group[0][0]
        alike = case.workload, case.pass_, case.dtype, case.threads, reads_cache(case)
        similar.setdefault(alike, []).append(group)
    for own in similar.values():
        own.sort(key=lambda group: work(group[0][0]))
        count = -(-len(own) // GROUPS_PER_JOB)
        for first in range(count):  # dealt out one by one: each process gets small and large ones
            yield Job(groups=tuple(own[first::count]))


def sharded(plan: Plan, number: int, count: int) -> Plan:
    """The part `number`, from 1 on, of `count` that make up the plan.

    They depend on the plan alone. Each group is in one of them, and they are about equally much
    work; what is decided is in the first.

    Raises:
        UsageError: the plan has fewer groups than that.
    """
    groups = [group for job in plan.jobs for group in job.groups]
    if number > len(groups):
        raise UsageError(
            f"--shard {number}/{count}: nothing is left for it; the plan has {len(groups)} groups"
            f" of cells that stay together, and so at most {len(groups)} shards"
        )
    loads, decided = [0.0] * count, plan.decided if number == 1 else ()
    own = {record.cell.key for record in decided}
    costs = {group: sum(len(impls) * weight(case) for case, impls in group) for group in groups}
    for group in sorted(groups, key=costs.__getitem__, reverse=True):
        least = loads.index(min(loads))
        loads[least] += costs[group]
        if least == number - 1:
            own |= {cell.key for cell in Job(groups=(group,)).cells()}
    cells, *passes = (
        tuple(cell for cell in every if cell.key in own) for every in (plan.cells, *plan.passes)
    )
    jobs = tuple(jobs_of(passes[0]))
    return replace(plan, cells=cells, jobs=jobs, decided=decided, passes=tuple(passes))


def weight(case: Case) -> float:
    """Roughly how long a cell takes beside others, in multiply-adds: any as long as of 10⁸."""
    return 1e8 + work(case)


def expand(axes: Axes, device: Device, all_threads: int = 1) -> Iterator[Case]:
    """The cases of one sweep, each once; `all_threads` is what torch takes by itself.

    A workload with a width has E = H·D unless that is given; one without heads is of one head as
    wide as it is, so that no two of its cases are the same network. One that is causal by nature
    has no mask `full`.
    """
    traits, follower = TRAITS.get(axes.workload), _follows(axes)
    choices: dict[str, Sequence[Any]] = {}
    for axis in sorted(AXES.values(), key=lambda axis: axis.order[1]):
        if axis.applies(axes.workload):
            default = (None if axis.field == follower else axis.default,)
            choices[axis.field] = axes.values.get(axis.keyword) or default
    for name in _PARAMETRIC.keys() & choices.keys():
        choices[name] = spelled(choices[name], _PARAMETRIC[name])
    threads = [n or all_threads for n in choices["threads"]]
    choices["threads"] = threads if device == "cpu" else (1,)  # on a GPU they change no time
    seen: set[str] = set()
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        if "width" in chosen:
            chosen |= _sized(chosen)
        if not traits.heads:
            chosen |= {"heads": 1, "head_dim": chosen["width"]}
        hides = traits.causal and chosen["mask"] == "full"
        chosen["mask"] = parse_mask("causal" if hides else chosen["mask"])
        chosen["position"] = parse_position(chosen.get("position", "none"))
        chosen["pass_"] = chosen.pop("pass")
        chosen = {name: value for name, value in chosen.items() if value is not None}
        case = Case(workload=axes.workload, device=device, **chosen)
        if case.case_id not in seen:
            seen.add(case.case_id)
            yield case


def steps_of(sweeps: Iterable[Axes], device: Device, all_threads: int) -> dict[str, dict[str, int]]:
    """How often each step makes each call: its name, and the ids of cases."""
    found: dict[str, dict[str, int]] = {}
    for axes in (axes for axes in sweeps if axes.step):
        varied = [axis for name, axis in KEYWORDS.items() if len(axes.values.get(name, ())) > 1]
        for case in expand(axes, device, all_threads):
            row = case.to_json()
            words = filter(None, (axis.text(row) for axis in varied))
            calls = found.setdefault(" ".join([axes.step, *words]), {})
            calls[case.case_id] = calls.get(case.case_id, 0) + axes.count
    return found


def _follows(axes: Axes) -> str | None:
    """Which of `heads` and `head_dim` follows from the width: the one that is not given."""
    given = axes.values.keys() & {"heads", "head_dims"}
    if "widths" not in axes.values or len(given) == 2:
        return None
    return "heads" if "head_dims" in given else "head_dim"


def _sized(chosen: dict[str, Any]) -> dict[str, int]:
    """Width, heads and head dim, each from the other two where it is not given.

    Of a width that does not divide the whole part is taken: `mismatch` says so.
    """
    width, heads, head_dim = (chosen[name] for name in ("width", "heads", "head_dim"))
    return {
        "width": width or heads * head_dim,
        "heads": heads or max(1, width // head_dim),
        "head_dim": head_dim or max(1, width // heads),
    }


def mismatch(axes: Axes, case: Case) -> str | None:
    """Why this case of `axes` is not what was asked for: a width that does not divide, padding."""
    longest, keys = max(case.mask.lengths, default=0), case.kv_len
    if case.workload == "attention" and longest > keys:
        return f"mask {case.mask.text} has items of {longest} keys, of which there are {keys}"
    if not TRAITS.get(axes.workload).heads:
        return None
    known, flag = {
        "head_dim": (case.heads, "heads (--heads)"),
        "heads": (case.head_dim, "dims a head (--head-dims)"),
        None: (1, ""),
    }[_follows(axes)]
    if (case.width or 0) % known == 0:
        return None
    return f"width {case.width} (--widths) is not a multiple of {known} {flag}"


def named(asked: Iterable[str], catalogue: Catalogue, flag: str = "--impls") -> list[str]:
    """What was asked for as cells name it, each once; `performer:features=64..256` is three.

    What several files register, and `mine` asks for, is as many.

    Raises:
        UnknownNameError: a name that the catalogue does not have.
        UsageError: a parameter that makes no sense.
    """
    known = {info.name: info for info in catalogue.implementations}
    names = []
    for text in asked:
        if not (texts := meant(text, known)):
            require("implementation", [base_name(text)], known, flag)
        for one in (one for each in texts for one in _doubled(each, "--impls")):
            name = base_name(one, known)
            parameters = known[name].parameters
            names.append(read_parameters(one, name, parameters, "implementation", "--impls")[0])
    return list(dict.fromkeys(names))


# The axes whose values are names of a registry, with parameters.
_PARAMETRIC: dict[str, Registry[Any]] = {"cache": CACHES, "projection": PROJECTIONS}


def spelled(asked: Iterable[str], registry: Registry[Any]) -> list[str]:
    """Caches or projections as cases name them, each once; `paged:page=16..64` is three.

    Raises:
        UnknownNameError: a name that the registry does not have.
        UsageError: a parameter that makes no sense.
    """
    every = (one for text in asked for one in _doubled(text, registry.flag))
    return list(dict.fromkeys(read_name(one, registry)[0] for one in every))


def _doubled(text: str, flag: str) -> Iterator[str]:
    """`x:a=1..4:b=2` as `x:a=1:b=2`, `x:a=2:b=2`, `x:a=4:b=2`."""
    found = re.search(r"\d+\.\.\d+", text)
    if not found:
        yield text
        return
    for size in parse_sizes(found[0], flag):
        yield from _doubled(text[: found.start()] + str(size) + text[found.end() :], flag)


def check_names(sweeps: Iterable[Axes], catalogue: Catalogue, others: Iterable[str] = ()) -> None:
    """Implementations and workload are in the catalogue, or in `others`; the workload has the axes.

    Raises:
        UnknownNameError: one is not; the message gives the nearest.
        UsageError: the options contradict each other, or nothing is left to run.
    """
    known = list(dict.fromkeys([*(info.name for info in catalogue.implementations), *others]))
    for axes in sweeps:
        strange = [base_name(text) for text in axes.impls or () if not meant(text, known)]
        require("workload", [axes.workload], catalogue.workloads, "--workload")
        require("implementation", strange, known, "--impls")
        for name, registry in _PARAMETRIC.items():
            spelled(axes.values.get(AXES[name].keyword, ()), registry)
        for axis in (axis for name, axis in KEYWORDS.items() if name in axes.values):
            if not axis.applies(axes.workload):
                raise UsageError(
                    f"{axis.flag} does not apply to --workload {axes.workload}; it does to"
                    f" {', '.join(axis.of or ())}"
                )


def implementations(axes: Axes, catalogue: Catalogue, own: Iterable[Collection[str]]) -> list[str]:
    """The implementations of a sweep: those asked for, else all that serve its workload exactly.

    `own`, the names that each of the user's files registered, join as in `chosen`.
    """
    if axes.impls is not None:
        return named(chosen(axes.impls, own), catalogue)
    serving = [
        info.name
        for info in catalogue.implementations
        if axes.workload in info.workloads and not info.approximates
    ]
    return list(dict.fromkeys([*serving, *itertools.chain(*own)]))


def chosen(asked: Collection[str], own: Iterable[Collection[str]]) -> list[str]:
    """The implementations asked for by name, and all of each file of which none is asked for.

    `own` are the names that each of the user's files registered. Asking for `a:mine`
    does not ask for `b:mine`.
    """
    bare = {f":{base_name(text).rpartition(':')[2]}" for text in asked}
    left = (
        names
        for names in own
        if not any(meant(text, names) for text in asked)
        and not any(name.endswith(tuple(bare)) for name in names)
    )
    return [*dict.fromkeys(asked), *itertools.chain(*left)]


def overridden(sweeps: Sequence[Axes], given: Mapping[str, Any]) -> tuple[Axes, ...]:
    """The sweeps of a preset, with every axis that was given (not None) in place of their own.

    A workload that was asked for leaves its sweeps alone, or the first where no sweep has it. An
    axis that only some of the workloads have applies to these.
    """
    if given.get("workload"):
        wanted = given["workload"]
        own = [axes for axes in sweeps if axes.workload == wanted]
        sweeps = own or [sweeps[0].having(workload=wanted)]
    asked = {name: v for name, v in given.items() if v is not None and name != "workload"}
    missing = [{n for n, x in KEYWORDS.items() if not x.applies(axes.workload)} for axes in sweeps]
    nowhere = set.intersection(*missing)  # what no workload has stays, to be refused
    return tuple(
        axes.having(**{name: v for name, v in asked.items() if name not in names - nowhere})
        for axes, names in zip(sweeps, missing, strict=True)
    )
