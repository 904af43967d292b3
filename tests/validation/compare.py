"""Runs of known code held against each other: how often `compare` calls what changed, and what not.

Runs are taken from a folder, where they are named by their code and a number: `quick-10`. What is
kept of them, a line a run, is enough to count again without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from attnbench.analysis.apart import CellTime, Spread, scale, spread
from attnbench.analysis.compare import same
from attnbench.analysis.compare.sources import Source, SourceCell, of_run
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_run
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

PLANTED = 1.3  # the slowdown of a cell that is to be named
WHOLE = (1.3, 1.5)  # that of all cells of an implementation
BEFORE, AFTER, SLOWER = "mine-0", "mine-0.3", "mine"  # codes, and the cells that differ in them
CALLED, NAMED, NAMED_WHOLE = 0.01, 0.90, 0.85  # goals; the last is of the most of `WHOLE`
CORES = 2  # of the machine of all runs that are kept


def examine(path: Path, tell: Tell, *, runs: Path | None) -> Ended:
    """Keep what is new in the folder `runs`, and count over all that is kept.

    Raises:
        StoreError: a folder cannot be read or written.
    """

    def missing(done: list[Figures]) -> Iterator[Figures]:
        known = {row["run"] for row in done}
        for folder in RunFolder.all_in(SWEEP, runs) if runs else ():
            run, name = load_run(folder.path), folder.path.name
            if name not in known and run.records and not run.unfinished:
                tell(name)
                yield line_of(of_run(run))

    return go_on(path, {}, missing, lambda rows: summarise(map(source_of, rows)), tables)


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
            unsteady=unsteady,
            time=CellTime(
                time_us=time_us,
                error=error,
                group=f"{line['run']} {group}",
                load=line["load_1m"] / CORES,
            ),
        )
        for case_id, impl, time_us, error, group, unsteady in line["cells"]
    }
    facts = {"load_1m": line["load_1m"]}
    return Source(
        name=line["run"], path=Path(), created=line["created"], cells=cells, environment=facts
    )


def summarise(sources: Iterable[Source]) -> Figures:
    """Counts for each kind of pair; every pair's noise is that of the runs that are not in it."""
    by_code: dict[str, list[Source]] = {BEFORE: [], AFTER: []}
    for source in sorted(sources, key=lambda s: s.created or ""):
        by_code.setdefault(source.name.rpartition("-")[0], []).append(source)
    pairs: Figures = {}
    for code, runs in by_code.items():
        noise = _Noise([runs])
        found = [_identical(a, b, noise) for a, b in combinations(runs, 2)]
        apart = set(zip((r.name for r in runs[::2]), (r.name for r in runs[1::2]), strict=False))
        pairs[f"{code}: disjoint pairs"] = [p for p in found if (p["a"], p["b"]) in apart]
        pairs[f"{code}: all pairs"] = found
    noise = _Noise([by_code[BEFORE], by_code[AFTER]])
    pairs[f"{BEFORE} against {AFTER}, really slower"] = [
        _real(a, b, noise) for a, b in zip(by_code[BEFORE], by_code[AFTER], strict=False)
    ]
    summary: Figures = {"pairs": {name: _total(some) for name, some in pairs.items() if some}}
    summary["runs"] = {code: len(runs) for code, runs in by_code.items() if runs}
    summary["met"] = met(summary)
    return summary


class _Noise:
    """The spread of all runs but two; each is computed once."""

    def __init__(self, series: Sequence[Sequence[Source]]) -> None:
        self.series = series

    def without(self, *pair: Source) -> Spread:
        return spread([[s.times for s in runs if s not in pair] for runs in self.series])


def _identical(a: Source, b: Source, noise: _Noise) -> Figures:
    """A pair of runs of the same code: what is called changed, and what was made slower."""
    known = noise.without(a, b)
    found = same.compare(a, b, known)
    named = 0
    for row in found.rows:
        if row.verdict != "not comparable":
            slower = same.compare(a, _slowed(b, PLANTED, row.key), known)
            named += next(r for r in slower.rows if r.key == row.key).verdict == "slower"
    names = sorted({row.impl for row in found.ratios} | {row.against for row in found.ratios})
    whole: Figures = {"impls": len(names), "planted_whole": len(names)}
    whole["impls_called"] = sum(row.verdict != "no change seen" for row in found.ratios)
    for factor in WHOLE:
        whole[f"named_{factor}"] = sum(
            _named(
                same.compare(a, _slowed(b, factor, *(k for k in b.cells if k[1] == name)), known),
                name,
            )
            for name in names
        )
    return _counted(a, b, found.rows) | {"planted": _comparable(found.rows), "named": named} | whole


def _named(found: same.Compared, impl: str) -> bool:
    """Whether the implementation is called slower against another, which fails `--fail-slower`."""
    return (impl, "slower") in {(row.impl, row.verdict) for row in found.ratios}


def _slowed(source: Source, factor: float, *keys: tuple[str, str]) -> Source:
    cells = dict(source.cells)
    for key in keys:
        time = cells[key].time
        assert time is not None, "only cells with a time are kept"
        cells[key] = replace(cells[key], time=replace(time, time_us=factor * time.time_us))
    return replace(source, cells=cells)


def _real(a: Source, b: Source, noise: _Noise) -> Figures:
    """A pair in which one implementation really is slower: whether its cells are named."""
    found = same.compare(a, b, noise.without(a, b))
    own = [row for row in found.rows if row.impl == SLOWER]
    others = [row for row in found.rows if row.impl != SLOWER]
    named = sum(row.verdict == "slower" for row in own)
    called = [row for row in found.ratios if row.impl != SLOWER]
    return _counted(a, b, others) | {
        "planted": len(own), "named": named, "planted_whole": 1, "impls": len(called),
        "impls_called": sum(row.verdict != "no change seen" for row in called),
        f"named_{PLANTED}": int(_named(found, SLOWER)),
    }  # fmt: skip


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
    names = pairs[0].keys() - {"a", "b", "typical"}
    total = {name: sum(pair[name] for pair in pairs) for name in sorted(names)}
    return total | {"pairs": len(pairs), "typical": median(pair["typical"] for pair in pairs)}


def tables(summary: Figures) -> list[Table]:
    """One row for each kind of pair."""
    header = (
        "runs", "pairs", "typical residual", "cells", "not comparable", "called changed",
        f"{PLANTED - 1:.0%} slower", "named",
    )  # fmt: skip
    rows = tuple((name, *_row(found)) for name, found in summary["pairs"].items())
    counts = ", ".join(f"{count} of {code}" for code, count in summary["runs"].items())
    note = (
        f"Runs: {counts}. Disjoint pairs are of neighbours in time. Called changed: cells of"
        " identical code, in shares of all. Slower: each comparable cell in turn, its times"
        " multiplied in the data, but for the last row, where an implementation spins. Noise is"
        f" known from the runs that are not in the pair. Goals: called at most {CALLED:.0%}, named"
        f" {NAMED:.0%}: {'met' if summary['met'] else 'MISSED'}."
    )
    whole = (
        "runs", "pairs", "implementations", "called changed",
        *(f"{factor - 1:.0%} slower: named" for factor in WHOLE),
    )  # fmt: skip
    return [
        Table(title="Runs against runs", header=header, rows=rows, note=note),
        Table(
            title="Implementations against each other", header=whole,
            rows=tuple((name, *_whole(found)) for name, found in summary["pairs"].items()),
            note="Each implementation in turn, all of its cells, is held against the others. Named:"
            " with its name, and an exit code of 1 with --fail-slower."
            f" Goals: called at most {CALLED:.0%}, {max(WHOLE) - 1:.0%} named {NAMED_WHOLE:.0%}.",
        ),
    ]  # fmt: skip


def _whole(found: Figures) -> tuple[str, ...]:
    called, count, planted = (found[name] for name in ("impls_called", "impls", "planted_whole"))
    named = [found.get(f"named_{factor}") for factor in WHOLE]
    return (
        str(found["pairs"]), units.count(count), f"{called} ({units.percent(called / count)})",
        *("–" if n is None else f"{n} of {planted} ({units.percent(n / planted)})" for n in named),
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
    """Whether disjoint pairs keep to all goals, and what really is slower is named."""
    most = f"named_{max(WHOLE)}"
    return all(
        row["called"] <= CALLED * row["cells"]
        and row["named"] >= NAMED * row["planted"]
        and row["impls_called"] <= CALLED * row["impls"]
        and row.get(most, math.inf) >= NAMED_WHOLE * row["planted_whole"]
        for name, row in summary["pairs"].items()
        if not name.endswith("all pairs")
    )
