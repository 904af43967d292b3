"""Two measurements of one machine, cell by cell: which changed, beyond what such runs differ by."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from scipy import special

from attnbench.analysis import apart
from attnbench.analysis.apart import ALPHA, FREEDOM, Key, Shift, Spread, Times, residuals, scale
from attnbench.analysis.compare.sources import Source, of_entry, of_run, read
from attnbench.analysis.history.entries import FILE, read_file
from attnbench.errors import AttnbenchError, StoreError
from attnbench.machine.environment import Environment, asked
from attnbench.schema.case import Case
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_info, load_run

Verdict = Literal["slower", "faster", "no change seen", "not comparable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

LEAST_SHIFT = math.log(1.01)  # a shift of all cells below this is not worth a verdict
UNEQUAL = 0.3  # what a neighbour adds to the time of a group differs by so much from cell to cell
MOST_RUNS = 20  # of history: the latest
HOW_CELL = ("l2", "timer")  # of a cell, beside the facts of its run that are asked for


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one cell from the first source to the second.

    `ratio` is time after / before once what all cells did together is taken off, [`low`, `high`]
    where it lies with 99.5 %, `shift` what was taken off: time after = before · `ratio` · `shift`.
    None where the times cannot be compared, for `reason`.
    """

    key: Key
    label: str
    impl: str
    case: Case | None = None
    verdict: Verdict
    reason: str = ""
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    shift: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """All shared cells of two sources of one machine; `shift` and `spread` are what was assumed."""

    rows: tuple[Row, ...]
    ratios: tuple[apart.RatioChange, ...]
    shift: Shift
    spread: Spread

    @property
    def all_moved(self) -> bool:
        """Whether all cells moved together further than runs of equal code do."""
        bound = self.spread.shift_bound
        return bound is not None and abs(self.shift.run) > max(bound, LEAST_SHIFT)


def compare(before: Source, after: Source, noise: Spread) -> Compared:
    """Every cell that both have; `noise` is what is known of runs of equal code on this machine.

    A cell changed where its residual lies beyond a quantile of Student's t times its scale. The
    square of that is a mean of squares: of the typical residual of this pair, drawn towards that
    of history, times the cell's own factor, which counts as `FREEDOM` residuals, and of the
    residuals of the other cells of its group (a moderated t, Smyth 2004, as in `apart.spread`).
    The errors of both times and part of its group's own shift are added. So where a neighbour
    slowed cells unequally, the intervals of those that met it are wide, and only theirs.
    """
    new, shared = after.times, before.times.keys() & after.cells
    old = {k: x for k, x in before.times.items() if k in shared and not _how(before, after, k)}
    ratios = tuple(one for one in apart.ratio_changes(new, old, noise.ratios) if one.verdict)
    gone = {change.impl for change in ratios if change.verdict in ("slower", "faster")}
    steady = {key for key in old if key[1] not in gone} or old.keys()
    shift = apart.common_shift(new, {key: old[key] for key in old if key in steady})
    left = residuals(new, old, shift)
    alike = [left[key] for key in left if key in steady]
    squares = FREEDOM * noise.typical**2 + len(alike) * scale(alike) ** 2
    typical = math.sqrt(squares / (FREEDOM + len(alike)))
    halves = _halves(new, old, left, shift, noise, typical)
    rows = []
    for key in (k for k in after.cells if k in before.cells):
        a, b = before.cells[key], after.cells[key]
        row = Row(
            key=key, label=b.label, impl=b.impl, case=b.case, verdict="not comparable",
            reason=_reason_against(before, after, key),
            before_us=a.time.time_us if a.time else None,
            after_us=b.time.time_us if b.time else None,
        )  # fmt: skip
        if not row.reason:
            middle, half = left[key], halves[key]
            changed: Verdict = "slower" if middle > 0 else "faster"
            verdict: Verdict = changed if abs(middle) > half else "no change seen"
            ratio, low, high = (math.exp(middle + off) for off in (0.0, -half, half))
            moved = math.exp(shift.of(new[key], old[key]))
            row = replace(row, verdict=verdict, ratio=ratio, low=low, high=high, shift=moved)
        rows.append(row)
    return Compared(rows=tuple(rows), ratios=ratios, shift=shift, spread=noise)


def _halves(
    new: Times, old: Times, left: Mapping[Key, float], shift: Shift, noise: Spread, typical: float
) -> dict[Key, float]:
    """Half the width of each cell's interval, as ln."""
    groups: dict[Any, list[Key]] = defaultdict(list)
    for key in left:
        groups[new[key].group, old[key].group].append(key)
    found = {}
    for names, keys in groups.items():
        moved = shift.groups.get(names, 0.0)
        for key in keys:
            # Cells without a group, of one test each, met moments of their own.
            others = [left[k] ** 2 for k in keys if k != key and left[k] and names[0]]
            freedom = FREEDOM + len(others)
            own = noise.factors.get(key, 1.0) * typical  # 1 where it has no history
            square = (FREEDOM * own**2 + sum(others)) / freedom
            square += new[key].error ** 2 + old[key].error ** 2 + (UNEQUAL * moved) ** 2
            found[key] = float(special.stdtrit(freedom, 1 - ALPHA / 2)) * math.sqrt(square)
    return found


def _reason_against(before: Source, after: Source, key: Key) -> str:
    """Why the two times of a cell cannot be compared, or nothing."""
    for where in (before, after):
        cell = where.cells[key]
        if cell.time is None:
            return f"no time in {where.name}: {cell.reason}"
        if cell.unsteady:
            return f"the error of its time in {where.name} has no bound: {cell.unsteady}"
        if cell.time.group in where.busy:
            return f"most cells measured with it in {where.name} have an error without a bound"
    return _how(before, after, key)


def _how(before: Source, after: Source, key: Key) -> str:
    """By what the two times of a cell were measured differently, or nothing."""
    a, b = before.cells[key].metrics, after.cells[key].metrics
    runs = before.environment, after.environment
    how = [(name, *(facts.get(name) for facts in runs)) for name in asked("timed")]
    how += [(name, a.get(name), b.get(name)) for name in HOW_CELL]
    return next((f"{name}: {y}, was {x}" for name, x, y in how if x != y), "")


def earlier(sources: Sequence[Source], folders: Sequence[Path]) -> list[list[Times]]:
    """The history of the machine of these sources without themselves, by code, in order of time.

    Runs, also those that `attnbench history` keeps in a line, or of pytest-benchmark's files those
    beside, measured alike on the same machine, the latest `MOST_RUNS`. Where no commit is recorded,
    runs of equal versions of attnbench, torch and Python, with equal kernel files, count as of one
    code: what changed unrecorded widens the spread of its own cells.
    """
    first = sources[0]
    own = {(source.name, source.created) for source in sources}
    beside = sorted(_beside(first, folders), key=lambda source: source.created or "")
    machine = Environment(first.environment)
    here = (s for s in beside if machine.same_machine(Environment(s.environment)))
    # A run may lie in a folder and stand in a history.
    once = {(s.name, s.created): s for s in here if _like(s) == _like(first)}
    alike = [source for name, source in once.items() if name not in own]
    by_code: dict[Any, list[Times]] = defaultdict(list)
    for source in alike[-MOST_RUNS:]:
        kernels = source.run.info.get("files") if source.run else None
        versions = (source.environment.get(name) for name in asked("code"))
        by_code[source.code, *versions, str(kernels)].append(source.times)
    return list(by_code.values())


def _like(source: Source) -> list[Any]:
    return [source.settings.get(name) for name in asked("noise")]


def _beside(first: Source, folders: Sequence[Path]) -> Iterator[Source]:
    """What lies beside a source, and in `folders`, and can be read."""
    machine = Environment(first.environment)
    if first.path.is_file():
        paths = sorted(first.path.parent.glob("*.json"))
    else:
        every = dict.fromkeys(p.resolve() for p in (first.path.parent, *folders))
        paths = [run.path for folder in every for run in RunFolder.all_in(SWEEP, folder)]
        for folder in every:
            with contextlib.suppress(StoreError):
                yield from map(of_entry, read_file(folder / FILE))
    for path in dict.fromkeys(path.resolve() for path in paths):
        try:
            if path.is_file():
                yield read(str(path), path.parent)
            # Reading the head alone first spares the records of other machines' runs.
            elif machine.same_machine(Environment(load_info(path).get("environment") or {})):
                yield of_run(load_run(path))
        except AttnbenchError:
            continue  # what is damaged is no history; comparing it says why
