"""The cells of a run as the fits take them: replicates of a time, declared laws, labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis import times
from attnbench.analysis.scaling.results import Axis
from attnbench.base.stats import interval_rank, median
from attnbench.errors import UsageError
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.theory.law import Law, parse
from attnbench.theory.traits import TRAITS

Floats = NDArray[np.float64]
_SEED = 20_260


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with the replicates of its time; `doubt` says why there are none.

    `kind` numbers all that makes cells alike but their sizes.
    """

    record: Record
    kind: int
    times_us: tuple[float, ...] = ()
    doubt: str | None = None


def measured(run: Run) -> list[Measured]:
    """Every record of the run. Those that failed or are suspect have a doubt and no times."""
    environment = run.info.get("environment") or {}
    ceilings = limits.ceilings_of(environment)
    kinds: dict[tuple[Any, ...], int] = {}
    found = []
    for record in run.records:
        case = record.cell.case
        alike = (
            record.cell.impl, case.workload, case.pass_, case.device, case.dtype, case.mask.text,
            case.position.text, case.projection, case.cache, case.new_tokens, case.scale,
        )  # fmt: skip
        kind = kinds.setdefault(alike, len(kinds))
        times_us, doubt = _times_or_doubt(record, environment, ceilings)
        found.append(Measured(record=record, kind=kind, times_us=times_us, doubt=doubt))
    return found


def describes(environment: dict[str, Any], record: Record) -> bool:
    """Whether the run's environment is that of the record's device."""
    device = record.cell.case.device
    return bool(environment.get("device", device) == device)


def _times_or_doubt(
    record: Record, environment: dict[str, Any], ceilings: limits.Ceilings
) -> tuple[tuple[float, ...], str | None]:
    if record.status != "ok":
        return (), f"{record.status}: {record.reason}"
    observed = tuple(times.observations_us(record))
    if not times.are_times(observed):
        return (), "not a valid time (0 or NaN)"
    flops = record.metrics.get("flops_executed")
    flops = record.metrics.get("flops_useful") if flops is None else flops
    bytes_min = record.metrics.get("bytes_min")
    if not flops and not bytes_min:
        return observed, None  # no work that a limit could be applied to
    here = describes(environment, record)
    suspect = limits.suspect(
        device_name=environment.get("device_name") if here else None,
        dtype=record.cell.case.dtype,
        matmul_precision=environment.get("matmul_precision") if here else None,
        time_us=median(observed),
        flops=flops,
        bytes_min=bytes_min,
        measured=ceilings if here else limits.Ceilings(),
    )
    return ((), f"suspect: {suspect}") if suspect else (observed, None)


class Laws:
    """Declared laws by implementation; text that cannot be parsed is a problem and no law."""

    def __init__(self, run: Run) -> None:
        rows = run.info.get("implementations") or []
        self._rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows if "name" in row}
        self._known: dict[tuple[Any, ...], Law | None] = {}
        self.problems: dict[str, str] = {}

    def time(self, impl: str, case: Case) -> Law | None:
        """How time grows; per token where the workload's times are."""
        return self._law(impl, "time", case)

    def flops(self, impl: str, case: Case) -> Law | None:
        """How FLOPs grow: as `flops_law`, or else as time."""
        declared = (self._rows.get(impl) or {}).get("flops_law")
        return self._law(impl, "flops_law" if declared else "time", case)

    def memory(self, impl: str, case: Case) -> Law | None:
        """How the workspace grows."""
        return self._law(impl, "memory", case)

    def _law(self, impl: str, field: str, case: Case) -> Law | None:
        """In the case's workload. A window may need less than is declared for all pairs."""
        windowed = case.mask.before is not None
        key = impl, field, case.workload, case.cache, case.projection, windowed
        if key not in self._known:
            text, law = (self._rows.get(impl) or {}).get(field), None
            try:
                core = parse(str(text)) if text else None
            except UsageError as err:
                self.problems[impl] = f"{field}: {err}"
                core = None
            if core:
                traits = TRAITS.get(case.workload)
                law = (traits.memory if field == "memory" else traits.time)(core, case)
            self._known[key] = law.upper() if law and windowed else law
        return self._known[key]


def kind_words(case: Case) -> list[str]:
    """Mask, position encoding, projection and cache, unless they are the plain ones."""
    words = [text for text in (case.mask.text, case.position.text) if text not in ("full", "none")]
    return words + [text for text in (case.projection, case.cache) if text]


def same_text(case: Case, axis: Axis) -> str:
    """As `attention forward B=1 H=2 D=64 float32`: all but what varies along the axis."""
    of_heads, of_dims = ("heads", "heads at fixed width"), ("d", "heads at fixed width")
    own_keys, grouped = case.kv_len != case.seq_len, case.kv_heads != case.heads
    # Each size with the axes along which it varies.
    sizes: list[tuple[str, tuple[str, ...]]] = [
        (f"n={case.seq_len}", ("n",)),
        (f"S={case.kv_len}" * own_keys, ("n",)),
        (f"B={case.batch}", ("batch",)),
    ]
    if TRAITS.get(case.workload).heads:
        sizes += [
            (f"H={case.heads}", of_heads),
            (f"G={case.kv_heads}" * grouped, of_heads),
            (f"D={case.head_dim}", of_dims),
            (f"V={case.value_dim}" * (case.value_dim != case.head_dim), of_dims),
            (f"E={case.width}" if case.width else "", ("d", "heads")),
        ]
    else:
        sizes.append((f"E={case.model_width}", ("d",)))
    words = [case.workload, case.pass_, *(text for text, varies in sizes if axis not in varies)]
    words += [f"H·D={case.heads * case.head_dim}"] if axis == "heads at fixed width" else []
    words += [f"H/G={case.heads // case.kv_heads}"] if axis in of_heads and grouped else []
    words += [case.dtype, *kind_words(case)]
    words += [f"T={case.new_tokens}"] if case.new_tokens else []
    words += [f"scale={case.scale:g}"] if case.scale is not None else []
    return " ".join(filter(None, words))


class Replicates:
    """Many sets of replicates, sorted, those of equal count together in one array.

    A set is treated as empty if one of its replicates is not above 0, or not finite.
    """

    def __init__(self, many: Sequence[tuple[float, ...]]) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for index, times_us in enumerate(many):
            if times_us:
                members[len(times_us)].append(index)
        self.size = len(many)
        self.alike: dict[int, tuple[NDArray[np.int64], Floats]] = {}
        for count, where in members.items():
            values = np.array([many[i] for i in where], dtype=np.float64)
            fine = ((values > 0) & (values < np.inf)).all(axis=1)
            self.alike[count] = np.array(where)[fine], np.sort(values[fine], axis=1)

    def intervals(self) -> tuple[Floats, Floats, Floats]:
        """Median, low and high of each set; NaN where it is empty, or has no interval.

        As `stats.processes_interval`: order statistics from six replicates on, below that
        Student's t on the logarithms.
        """
        middle, low, high = (np.full(self.size, np.nan) for _ in range(3))
        for count, (where, ordered) in self.alike.items():
            middle[where] = np.median(ordered, axis=1)
            rank = interval_rank(count)
            if rank is not None:
                low[where], high[where] = ordered[:, rank - 1], ordered[:, -rank]
            elif count > 1:
                logs = np.log(ordered)
                half = special.stdtrit(count - 1, 0.975) * logs.std(axis=1, ddof=1) / np.sqrt(count)
                low[where] = np.exp(logs.mean(axis=1) - half)
                high[where] = np.exp(logs.mean(axis=1) + half)
        return middle, low, high

    def drawn_medians(self, draws: int, cycle: int, *, seed: int = 0) -> Floats:
        """Medians of bootstrap samples of each set: sets × draws; NaN where a set is empty.

        Sets whose indices agree modulo `cycle` share their random numbers, so that the sets of one
        series are independent. The k-th smallest of R numbers drawn with replacement from R ordered
        ones is the ⌊R·U⌋-th of those, where U is the k-th smallest of R uniform numbers, that is,
        of distribution Beta(k, R − k + 1): one random number makes the median of a draw, or two if
        R is even.
        """
        found = np.full((self.size, draws), np.nan)
        for count, (where, ordered) in self.alike.items():
            lower, upper = _ranks(count, cycle, draws, seed)
            turn = where % cycle
            found[where] = np.take_along_axis(ordered, lower[turn], axis=1)
            if count % 2 == 0:
                found[where] = (found[where] + np.take_along_axis(ordered, upper[turn], axis=1)) / 2
        return found


@lru_cache(maxsize=8)
def _ranks(count: int, cycle: int, draws: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Indices of the middle value of each draw, or of the two middle ones: cycle × draws each."""
    random = np.random.default_rng((_SEED, seed, count))
    middle = (count + 1) // 2
    first = random.beta(middle, count - middle + 1, (cycle, draws))
    rest = max(1, count - middle)
    second = 1 - (1 - first) * random.random((cycle, draws)) ** (1 / rest)
    return tuple(np.minimum((count * u).astype(np.int64), count - 1) for u in (first, second))
