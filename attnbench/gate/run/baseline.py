"""The present code against a stored run: less sure than a paired run by design, and it says so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, variance
from typing import Any

from attnbench.analysis.times import Interval, side
from attnbench.base.stats import quotient_interval
from attnbench.errors import ExitCode, StoreError, UsageError
from attnbench.execution.runner import LocalRunner, Settings
from attnbench.execution.session import FINGERPRINT, Listener, Request, differing, sweep
from attnbench.execution.store import Run, load_run
from attnbench.gate.decide.exact import checked, compare, verdict_of
from attnbench.gate.decide.outcome import Controls, Outcome, Row
from attnbench.gate.decide.rules import Rules, Verdict, counted
from attnbench.schema.record import SCHEMA, Cell, Record

# Facts that change a time: those that a resumed run must share, and what rules the clock.
FACTS = (
    *FINGERPRINT, "governor", "smt", "cpu_capability", "blas", "interop_threads", "thread_env",
    "thp", "platform",
)  # fmt: skip
CAVEAT = (
    "a stored baseline cannot show what a paired run does: what the machine did between the two"
    " runs is in every ratio, so two runs of the same code may differ by more than the threshold;"
    " --base REF measures both sides in turns"
)


@dataclass(frozen=True, kw_only=True)
class BaselineRequest:
    """What `attnbench gate --baseline RUN` asks for.

    `files` take the place of the stored run's implementation files, where given. `advisory`:
    another machine is warned of, not refused.
    """

    run: Path
    rules: Rules = field(default_factory=Rules)
    files: tuple[str, ...] | None = None
    output: Path = Path("results")
    name: str | None = None
    advisory: bool = False


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The outcome, the folder of the run that was measured for it, and what differed here."""

    outcome: Outcome
    path: Path
    differing: tuple[str, ...] = ()


def compare_with_stored(request: BaselineRequest, listener: Listener) -> Compared:
    """Measure the cells of a stored run anew, as it was set up, and hold the two side by side.

    Raises:
        StoreError: there is no such run, or its plan is damaged.
        UsageError: this is not the machine of the stored run (unless `advisory`), nothing of
            what it measured is here any more, or its files do not load. Nothing was measured.
    """
    stored = load_run(request.run)
    cells, settings = _plan(stored)
    if request.files is not None:
        settings = replace(settings, files=request.files)
    with LocalRunner(settings) as runner:
        catalogue = runner.catalogue()
    lines = _differing(stored, catalogue["environment"])
    _refuse_or_warn(request, lines, listener)
    known = {row["name"] for row in catalogue["implementations"]}
    present = tuple(cell for cell in cells if cell.impl in known)
    if not present:
        names = ", ".join(dict.fromkeys(cell.impl for cell in cells)) or "no cell"
        raise UsageError(f"{request.run} measured {names}: nothing of it is here (--baseline)")
    path = sweep(
        Request(
            sweeps=(),
            cells=present,
            settings=settings,
            output=request.output,
            name=request.name,
            options={"command": "gate", "baseline": stored.run_id},
        ),
        listener,
    )
    assert path is not None, "no dry run was asked for"
    outcome = judge(cells, stored.records, load_run(path).records, request.rules)
    return Compared(outcome=outcome, path=path, differing=tuple(lines))


def _plan(stored: Run) -> tuple[list[Cell], Settings]:
    """The cells and the settings of a run.

    Raises:
        StoreError: `run.json` has none.
    """
    try:
        cells = [Cell.from_json(row) for row in stored.info["plan"]]
        told = stored.info["settings"]
        return cells, Settings(**(told | {"files": tuple(told["files"])}))
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as err:
        raise StoreError(
            f"{stored.path / 'run.json'} has no plan to measure again"
            f" ({type(err).__name__}: {err}); name a run of attnbench sweep (--baseline)"
        ) from err


def _differing(stored: Run, now: Mapping[str, Any]) -> list[str]:
    lines = differing(stored.info.get("environment", {}), now, FACTS)
    if stored.info["schema"] != SCHEMA:
        lines.append(f"the schema of its records was {stored.info['schema']}, is {SCHEMA}")
    return lines


def _refuse_or_warn(request: BaselineRequest, lines: list[str], listener: Listener) -> None:
    if not lines:
        return
    fact = f"{request.run} was not measured on this machine as it is: {'; '.join(lines)}"
    if not request.advisory:
        raise UsageError(
            f"{fact} (--baseline); measure both sides here with --base REF, or compare"
            " nevertheless with --advisory"
        )
    listener.warned(fact)


def judge(
    cells: Sequence[Cell], before: Sequence[Record], now: Sequence[Record], rules: Rules
) -> Outcome:
    """Verdicts on `cells` from the records of two runs; what has no record is absent."""
    base, candidate = _by_key(before), _by_key(now)
    unique = {cell.key: cell for cell in cells}
    rows = [_row(cell, base.get(key), candidate.get(key), rules) for key, cell in unique.items()]
    exit_code, words = _conclusion(rows)
    return Outcome(
        rows=tuple(rows),
        controls=Controls(),
        exit_code=exit_code,
        words=f"{words}; {CAVEAT}",
    )


def _by_key(records: Sequence[Record]) -> dict[tuple[str, str], Record]:
    return {record.cell.key: record for record in records}


def _row(cell: Cell, base: Record | None, candidate: Record | None, rules: Rules) -> Row:
    sides = checked(base), checked(candidate)
    decided = verdict_of(*sides)
    if decided is not None:
        return Row(cell=cell, verdict=decided[0], reason=decided[1])
    assert base is not None, "where a side has no record, that decides"
    assert candidate is not None, "where a side has no record, that decides"
    exact = compare(*sides, rules.growth)
    ratio, interval = times_ratio(candidate, base)
    verdict, reason = timed_verdict(interval, rules)
    if exact.failures:
        told = [reason] if verdict == "regressed" else []
        verdict, reason = "regressed", "; ".join([*told, *exact.failures])
    low, high = interval or (None, None)
    return Row(
        cell=cell, verdict=verdict, reason=reason, ratio=ratio, low=low, high=high,
        notes=exact.notes,
    )  # fmt: skip


def times_ratio(above: Record, below: Record) -> tuple[float, Interval | None]:
    """Reported time of `above` / that of `below`, two runs that never took turns; 95 %, or None.

    Of one process a side: of the medians, with the intervals of both. Of several: of the geometric
    means of the processes' medians, with Welch's t on their logarithms: B. L. Welch, "The
    generalization of 'Student's' problem", Biometrika 34 (1947).
    """
    over, under = side(above), side(below)
    if min(len(over.processes_us), len(under.processes_us)) > 1:
        return _welch(over.processes_us.values(), under.processes_us.values())
    alone = len(over.processes_us) == len(under.processes_us) == 1
    interval = quotient_interval(over.interval_us, under.interval_us) if alone else None
    return over.median_us / under.median_us, interval


def _welch(over: Collection[float], under: Collection[float]) -> tuple[float, Interval]:
    from scipy.stats import t

    logs = [[math.log(us) for us in times_us] for times_us in (over, under)]
    parts = [variance(values) / len(values) for values in logs]
    middle, error = mean(logs[0]) - mean(logs[1]), math.sqrt(sum(parts))
    half = 0.0
    if error:
        pairs = zip(parts, logs, strict=True)
        freedom = error**4 / sum(part**2 / (len(values) - 1) for part, values in pairs)
        half = float(t.ppf(0.975, freedom)) * error
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


def timed_verdict(interval: Interval | None, rules: Rules) -> tuple[Verdict, str]:
    """The verdict on one ratio of times: only what its whole interval says."""
    if interval is None:
        return "inconclusive", "too few processes or samples for an interval"
    low, high = interval
    ends = f"{low:.3f}–{high:.3f} x the stored time"
    if low > 1 + rules.threshold:
        return "regressed", f"the whole interval, {ends}, lies beyond the threshold"
    if high < 1 - rules.margin:
        return "improved", f"the whole interval, {ends}, lies below 1 by more than the margin"
    if high < 1 + rules.threshold:
        return "ok", f"the whole interval, {ends}, lies below the threshold"
    return "inconclusive", f"the threshold lies within the interval, {ends}"


def _conclusion(rows: Sequence[Row]) -> tuple[ExitCode, str]:
    of = Counter(row.verdict for row in rows)
    words = counted(of.elements())
    if of["incorrect"] or of["regressed"]:
        return ExitCode.FINDING, words
    if set(of) <= {"not comparable"}:
        return ExitCode.USAGE, "nothing is comparable"
    return ExitCode.INCONCLUSIVE if of["inconclusive"] else ExitCode.OK, words
