"""What files of pytest-benchmark prove about two versions of the code; and what they do not."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnbench.base import units
from attnbench.base.stats import median
from attnbench.errors import ExitCode, UsageError
from attnbench.gate.decide.benchmark_files import FLAG, Bench, BenchmarkFile, read_files
from attnbench.gate.decide.replicates import Order, judge
from attnbench.gate.decide.rules import VERDICTS, Rules, Verdict, counted

SINGLE = (
    "one file a side is one process a side: two processes of the same code differ by several"
    " percent, and nothing in the files tells that from a change, nor rules one out; give several"
    " files a side, each of a fresh process, written in turns"
)
BATCHES = (
    "the files of the two sides were not written in turns: what the machine did between them looks"
    " like a change; therefore regressed means beyond the whole threshold here, and ok holds"
    " if the machine's speed changed by less than the margin"
)


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """The verdict on one benchmark.

    `ratio` is candidate / base of the processes' fastest rounds, with its 95 % interval over
    processes; in `wins` of `rounds` pairs the candidate was slower beyond the margin. The pairs
    are of neighbours in time, or where there are none, of each file of a side with each of the
    other.
    """

    name: str
    verdict: Verdict
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    wins: int | None = None
    rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class FileOutcome:
    """All verdicts, the worst first, how the process must end, and what the files do not show."""

    rows: tuple[FileRow, ...]
    exit_code: ExitCode
    words: str
    caveats: tuple[str, ...] = ()


def compare_files(
    base: Sequence[Path], candidate: Sequence[Path], rules: Rules, *, advisory: bool = False
) -> FileOutcome:
    """Verdicts from files of both sides, at most `rules.alpha` of false alarms over all of them.

    Each file is one process, and so one observation a benchmark: its fastest round. Files that
    were written in turns are paired, and judged by an exact sign test; others by the exact
    Mann-Whitney test, beyond the threshold instead of the margin, as no turns cancel drift.

    Raises:
        UsageError: a file that is none, or files of different machines (unless `advisory`).
    """
    before, now = read_files(base), read_files(candidate)
    lines = _differing([*before, *now])
    if lines and not advisory:
        raise UsageError(
            f"the files are of different machines: {'; '.join(lines)} ({FLAG}); write both sides"
            " on one, or compare nevertheless with --advisory"
        )
    names = list(dict.fromkeys(n for file in (*before, *now) for n in file.benches))
    shared = sum(_has(before, name) and _has(now, name) for name in names)
    level = rules.alpha / max(1, shared)
    rows = [_row(name, before, now, rules, level) for name in names]
    rows.sort(key=lambda row: VERDICTS.index(row.verdict))
    exit_code, words = _conclusion(rows)
    return FileOutcome(
        rows=tuple(rows), exit_code=exit_code, words=words, caveats=_caveats(before, now, lines)
    )


def _has(files: Sequence[BenchmarkFile], name: str) -> bool:
    return any(name in file.benches for file in files)


def _differing(files: Sequence[BenchmarkFile]) -> list[str]:
    """Each fact of the machines that differs between the first file and another, once."""
    first, lines = files[0], dict[str, str]()
    for file in files[1:]:
        for name, value in file.machine.items():
            if value != first.machine[name]:
                told = f"{name} is {first.machine[name]} in {first.path}, {value} in {file.path}"
                lines.setdefault(name, told)
    return list(lines.values())


def _caveats(
    before: list[BenchmarkFile], now: list[BenchmarkFile], lines: list[str]
) -> tuple[str, ...]:
    single = min(len(before), len(now)) == 1
    found = [f"different machines: {'; '.join(lines)}"] if lines else []
    found += [SINGLE] if single else [] if in_turns(before, now) else [BATCHES]
    return tuple(found)


def in_turns(before: Sequence[BenchmarkFile], now: Sequence[BenchmarkFile]) -> bool:
    """Whether the sides alternated: sorted by time, at least as many changes of side as files.

    ABAB… and ABBA… do, one side after the other does not, nor do files that say no time.
    """
    moments = [(f.written, side) for side, files in enumerate((before, now)) for f in files]
    known = [(written, side) for written, side in moments if written is not None]
    order = [side for _, side in sorted(known)]
    changes = sum(earlier != later for earlier, later in itertools.pairwise(order))
    if len(known) < len(moments):
        return False
    return changes >= min(len(before), len(now))


def _row(
    name: str,
    before: list[BenchmarkFile],
    now: list[BenchmarkFile],
    rules: Rules,
    level: float,
) -> FileRow:
    ours = [file for file in before if name in file.benches]
    theirs = [file for file in now if name in file.benches]
    if not ours or not theirs:
        side = "candidate" if not ours else "base"
        return FileRow(name=name, verdict="not comparable", reason=f"in files of the {side} alone")
    benches = [[file.benches[name] for file in files] for files in (ours, theirs)]
    timers = sorted({str(bench.timer) for side in benches for bench in side})
    if len(timers) > 1:
        reason = f"timed by different clocks: {', '.join(timers)}"
        return FileRow(name=name, verdict="not comparable", reason=reason)
    minima = [[math.log(bench.min_s) for bench in side] for side in benches]
    if min(map(len, minima)) == 1:
        return _unproven(name, benches[0], benches[1])
    found = judge(minima[0], minima[1], rules, level, _order(ours, theirs))
    return FileRow(name=name, **vars(found))


def _order(before: Sequence[BenchmarkFile], now: Sequence[BenchmarkFile]) -> Order:
    if not in_turns(before, now):
        return "batches"
    return "pairs" if len(before) == len(now) else "turns"


def _unproven(name: str, before: Sequence[Bench], now: Sequence[Bench]) -> FileRow:
    """One process on a side: the ratios are shown, and nothing is decided."""
    fastest, middle = (
        median(getattr(bench, field) for bench in now)
        / median(getattr(bench, field) for bench in before)
        for field in ("min_s", "median_s")
    )
    return FileRow(
        name=name,
        verdict="inconclusive",
        reason=f"one process a side proves nothing; median {units.ratio(middle)}",
        ratio=fastest,
        wins=None,
        rounds=1,
    )


def _conclusion(rows: Sequence[FileRow]) -> tuple[ExitCode, str]:
    of = Counter(row.verdict for row in rows)
    words = counted(of.elements())
    if of["regressed"]:
        return ExitCode.FINDING, words
    if set(of) <= {"not comparable"}:
        return ExitCode.USAGE, f"nothing is comparable: {words}"
    return ExitCode.INCONCLUSIVE if of["inconclusive"] else ExitCode.OK, words


_HEADER = ("benchmark", "ratio", "95 % interval", "wins", "verdict", "why")


def as_text(outcome: FileOutcome) -> str:
    """The table for a terminal, what it comes to, and what it does not show."""
    lines = [_HEADER, *(_texts(row) for row in outcome.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER) - 1)]
    padded = [[*map(str.ljust, line[:-1], widths), line[-1]] for line in lines]
    table = ["  ".join(cells) for cells in padded]
    return "\n".join([*table, "", outcome.words, *(f"Note: {text}" for text in outcome.caveats)])


def _texts(row: FileRow) -> tuple[str, ...]:
    wins = units.UNKNOWN if row.wins is None else f"{row.wins}/{row.rounds}"
    interval = units.ratio_interval(row.low, row.high)
    return row.name, units.ratio(row.ratio), interval, wins, row.verdict, row.reason
