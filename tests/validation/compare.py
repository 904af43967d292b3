"""Runs of known code held against each other: how often `compare` calls what changed, and what not.

Runs are taken from a folder, where they are named by their code and a number: `quick-10`. What is
kept of them, a line a run, is enough to count again without them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from attnbench.analysis.apart import CellTime, Spread, scale, spread
from attnbench.analysis.compare import same
from attnbench.analysis.compare.sources import Source, SourceCell, of_run
from attnbench.base import units
from attnbench.base.files import make_folder
from attnbench.base.stats import median
from attnbench.execution.store import load_run, runs_in
from attnbench.version import __version__
from tests.validation.page import Table, markdown, write_texts

Figures = dict[str, Any]
SUMMARY, PAGE, LINES = "summary.json", "compare.md", "runs.jsonl"
PLANTED = 1.3  # the slowdown that is to be named
BEFORE, AFTER, SLOWER = "mine-0", "mine-0.3", "mine"  # codes, and the cells that differ in them
TIMED = "selftest-timer*/runs.jsonl"  # what `make validate PART=timer` keeps, on other machines
BANDED = "quick"  # the code whose pairs are counted by their typical residual, too
CALLED, NAMED = 0.01, 0.90  # goals
BANDS = ((0.03, "calm: below 3 %"), (0.06, "3 to 6 %"), (math.inf, "busy: 6 % and more"))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=compare` was asked for: `runs` is a folder of new ones, or None."""

    runs: Path | None = None
    output: Path = Path("results")
    name: str = "selftest-compare"


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, Figures]:
    """Keep what is new in the folder of runs, and count over all that is kept.

    Raises:
        StoreError: a folder cannot be read or written.
    """
    path = request.output / request.name
    if not path.exists():
        make_folder(request.output, request.name)
    file = path / LINES
    lines = file.read_text().splitlines() if file.exists() else []
    known = {json.loads(line)["run"] for line in lines}
    for folder in runs_in(request.runs) if request.runs else ():
        run = load_run(folder)
        if folder.name not in known and run.records and not run.unfinished:
            tell(folder.name)
            lines.append(json.dumps(line_of(of_run(run))))
    sources = [source_of(json.loads(line)) for line in lines]
    for folder in sorted(request.output.glob(TIMED)):
        sources += of_timer(folder)
    summary = {"attnbench": __version__} | summarise(sources)
    write_texts(
        path,
        {
            LINES: "".join(f"{line}\n" for line in lines),
            SUMMARY: json.dumps(summary, indent=1) + "\n",
            PAGE: markdown(f"make validate PART=compare: {path.name}", tables(summary)),
        },
    )
    return path, summary


def line_of(source: Source) -> Figures:
    """What is kept of a run: of each cell its time in µs and the error of its ln."""
    groups: dict[str, int] = {}
    cells = []
    for (case_id, impl), cell in source.cells.items():
        if cell.time:
            group = groups.setdefault(cell.time.group, len(groups))
            error = round(cell.time.error, 4)
            cells.append([case_id, impl, cell.time.time_us, error, group, cell.unsteady])
    loads = [cell.metrics["load_1m"] for cell in source.cells.values() if cell.time]
    return {
        "run": source.name, "created": source.created, "load_1m": round(median(loads), 2),
        "cells": cells,
    }  # fmt: skip


def source_of(line: Figures) -> Source:
    """Inverse of `line_of`, as far as comparing needs it."""
    cells = {
        (case_id, impl): SourceCell(
            label=case_id,
            impl=impl,
            time=CellTime(time_us=time_us, error=error, group=f"{line['run']} {group}"),
            unsteady=unsteady,
        )
        for case_id, impl, time_us, error, group, unsteady in line["cells"]
    }
    facts = {"load_1m": line["load_1m"]}
    return Source(
        name=line["run"], path=Path(), created=line["created"], cells=cells, environment=facts
    )


def of_timer(file: Path) -> list[Source]:
    """The runs of one code that the part `timer` kept: alone, and beside one or two neighbours.

    Their times come without errors, which makes intervals narrower than those of `compare`.
    """
    code = file.parent.name.removeprefix("selftest-")
    return [
        Source(
            name=f"{code}-{number}",
            path=file,
            created=f"{number:04}",
            cells={
                (f"{n}", impl): SourceCell(
                    label=f"n={n}",
                    impl=impl,
                    time=CellTime(time_us=time_us, group=f"{number} {n}"),
                    unsteady=unsteady,
                )
                for n, impl, time_us, _, unsteady, *_ in run["cells"]
            },
        )
        for number, run in enumerate(map(json.loads, file.read_text().splitlines()[1:]))
    ]


def summarise(sources: Sequence[Source]) -> Figures:
    """Counts for each kind of pair; every pair's noise is that of the runs that are not in it."""
    by_code: dict[str, list[Source]] = {BANDED: [], BEFORE: [], AFTER: []}
    for source in sorted(sources, key=lambda s: s.created or ""):
        by_code.setdefault(source.name.rpartition("-")[0], []).append(source)
    found: dict[str, list[Figures]] = {}
    for code, runs in by_code.items():
        noise = _Noise([runs])
        disjoint = list(zip(runs[::2], runs[1::2], strict=False))
        pairs = [_identical(a, b, noise) for a, b in combinations(runs, 2)]
        names = {(a.name, b.name) for a, b in disjoint}
        found[f"{code}: disjoint pairs"] = [p for p in pairs if (p["a"], p["b"]) in names]
        found[f"{code}: all pairs"] = pairs
        for low, (high, words) in zip((0.0, *(b[0] for b in BANDS)), BANDS, strict=False):
            if code == BANDED:
                some = [p for p in pairs if low <= p["typical"] < high]
                found[f"{code}: all pairs, {words}"] = some
    noise = _Noise([by_code[BEFORE], by_code[AFTER]])
    real = [_real(a, b, noise) for a, b in zip(by_code[BEFORE], by_code[AFTER], strict=False)]
    by_code = {code: runs for code, runs in by_code.items() if runs}
    summary: Figures = {"pairs": {name: _total(pairs) for name, pairs in found.items() if pairs}}
    summary["real"] = _total(real) if real else None
    summary["runs"] = {code: len(runs) for code, runs in by_code.items()}
    loads = [[s.environment["load_1m"] for s in runs if s.environment] for runs in by_code.values()]
    summary["load_1m"] = [median(found) for found in loads if found]
    return summary


class _Noise:
    """The spread of all runs but two; each is computed once."""

    def __init__(self, series: Sequence[Sequence[Source]]) -> None:
        self.series = series

    def without(self, *pair: Source) -> Spread:
        return spread([[s.times for s in runs if s not in pair] for runs in self.series])


def _identical(a: Source, b: Source, noise: _Noise) -> Figures:
    """A pair of runs of the same code: what is called changed, and each cell once made slower."""
    known = noise.without(a, b)
    rows = same.compare(a, b, known).rows
    named = 0
    for row in rows:
        if row.verdict != "not comparable":
            slower = same.compare(a, _slowed(b, row.key), known)
            named += next(r for r in slower.rows if r.key == row.key).verdict == "slower"
    return _counted(a, b, rows) | {"planted": _comparable(rows), "named": named}


def _slowed(source: Source, key: tuple[str, str]) -> Source:
    cell = source.cells[key]
    assert cell.time is not None, "cells without a time are not comparable"
    time = replace(cell.time, time_us=PLANTED * cell.time.time_us)
    return replace(source, cells={**source.cells, key: replace(cell, time=time)})


def _real(a: Source, b: Source, noise: _Noise) -> Figures:
    """A pair in which one implementation really is slower: whether its cells are named."""
    rows = same.compare(a, b, noise.without(a, b)).rows
    own = [row for row in rows if row.impl == SLOWER]
    others = [row for row in rows if row.impl != SLOWER]
    named = sum(row.verdict == "slower" for row in own)
    return _counted(a, b, others) | {"planted": len(own), "named": named}


def _counted(a: Source, b: Source, rows: Sequence[same.Row]) -> Figures:
    left = [math.log(row.ratio) for row in rows if row.ratio]
    return {
        "a": a.name, "b": b.name, "typical": scale(left), "cells": len(rows),
        "comparable": _comparable(rows),
        "called": sum(row.verdict in ("slower", "faster") for row in rows),
    }  # fmt: skip


def _comparable(rows: Iterable[same.Row]) -> int:
    return sum(row.verdict != "not comparable" for row in rows)


def _total(pairs: Sequence[Figures]) -> Figures:
    names = ("cells", "comparable", "called", "planted", "named")
    total = {name: sum(pair[name] for pair in pairs) for name in names}
    return total | {"pairs": len(pairs), "typical": median(pair["typical"] for pair in pairs)}


def tables(summary: Figures) -> Iterator[Table]:
    """One row for each kind of pair."""
    rows = [(name, *_row(found)) for name, found in summary["pairs"].items()]
    if summary["real"]:
        rows.append((f"{BEFORE} against {AFTER}, really slower", *_row(summary["real"])))
    counts = ", ".join(f"{count} of {code}" for code, count in summary["runs"].items())
    loads = "–".join(units.digits(f(summary["load_1m"] or [math.nan])) for f in (min, max))
    yield Table(
        title="Runs against runs",
        header=(
            "runs", "pairs", "typical residual", "cells", "not comparable", "called changed",
            f"{PLANTED - 1:.0%} slower", "named",
        ),
        rows=tuple(rows),
        note=(
            f"Runs: {counts}. Those of {BANDED} and {SLOWER} are of a machine of two cores beside"
            f" other work, load average {loads} in the median of runs; those of timer, by"
            " make validate PART=timer, are of others, alone and beside one or two processes that"
            " spin, and without the errors of their times. Disjoint pairs are of neighbours in"
            " time. Called changed: cells of identical code, in shares of all. Slower: each"
            " comparable cell in turn, its times multiplied in the data, but for the last row,"
            " where an implementation spins. Noise is known from the runs that are not in the"
            f" pair. Goals: called at most {CALLED:.0%}, named {NAMED:.0%}:"
            f" {'met' if met(summary) else 'MISSED'}."
        ),
    )  # fmt: skip


def _row(found: Figures) -> tuple[str, ...]:
    return (
        str(found["pairs"]), units.percent(found["typical"]), units.count(found["cells"]),
        units.count(found["cells"] - found["comparable"]),
        f"{found['called']} ({units.percent(found['called'] / found['cells'])})",
        units.count(found["planted"]),
        f"{found['named']} ({units.percent(found['named'] / max(1, found['planted']))})",
    )  # fmt: skip


def met(summary: Figures) -> bool:
    """Whether disjoint pairs keep to both goals, and what really is slower is named."""
    found = [value for name, value in summary["pairs"].items() if name.endswith("disjoint pairs")]
    found += [summary["real"]] if summary["real"] else []
    return all(
        row["called"] <= CALLED * row["cells"] and row["named"] >= NAMED * row["planted"]
        for row in found
    )
