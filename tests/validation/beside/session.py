"""The same sweep alone and beside neighbours, in turns: what it reports is kept line by line."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnbench.analysis import notes, times
from attnbench.analysis.pairs import ratio
from attnbench.execution.process import Settings
from attnbench.execution.store import Run, load_run
from attnbench.planning.plan import Axes
from attnbench.version import __version__
from tests.validation.beside.summary import Figures, summarise, tables
from tests.validation.neighbours import swept_beside
from tests.validation.page import markdown, write_texts
from tests.validation.sittings import sitting

SUMMARY, PAGE = "summary.json", "timer.md"
TWINS = Path(__file__).with_name("twins.py")
IMPLS = ("naive", "sdpa", "chunked", "sdpa-math", "naive-twin", "sdpa-twin")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=timer` was asked for; `runs` is how many of each condition."""

    runs: int = 10
    neighbours: tuple[int, ...] = (1, 2)
    seq_lens: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    each_s: float = 1.0
    seed: int = 0
    output: Path = Path("results")
    name: str = "selftest-timer"


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, Figures]:
    """Make the runs that the folder lacks, and count; an interrupt ends them, and is noted.

    Raises:
        StoreError: the folder cannot be written, or holds runs that were asked for differently.
    """
    path = request.output / request.name
    asked = json.loads(json.dumps(asdict(request) | {"output": "", "name": "", "runs": 0}))
    rows, interrupted = sitting(path, asked, lambda done: _missing(request, done, tell))
    summary = {"attnbench": __version__, "asked": asked, "interrupted": interrupted}
    summary |= summarise(rows)
    page = markdown(f"make validate PART=timer: {path.name}", tables(summary))
    write_texts(path, {SUMMARY: json.dumps(summary, indent=1) + "\n", PAGE: page})
    return path, summary


def _missing(
    request: Request, rows: list[Figures], tell: Callable[[str], None]
) -> Iterator[Figures]:
    """Runs until there are enough of each condition, the conditions in random order each time."""
    order = random.Random(request.seed)
    conditions = [0, *request.neighbours]
    done = {count: sum(row["neighbours"] == count for row in rows) for count in conditions}
    for number in range(request.runs):
        order.shuffle(conditions)
        for count in conditions:
            if number >= done[count]:
                tell(f"run {number + 1} of {request.runs}, {count} beside it")
                yield _run(request, count, seed=request.seed + 1000 * count + number)


def _run(request: Request, count: int, seed: int) -> Figures:
    axes = Axes(seq_lens=request.seq_lens, impls=IMPLS)
    settings = Settings(
        device="cpu", files=(str(TWINS),), seed=seed,
        min_time_s=request.each_s, max_time_s=request.each_s,
    )  # fmt: skip
    with swept_beside(count, axes, settings) as path:
        return {"neighbours": count, "seed": seed} | _figures(load_run(path))


def _figures(run: Run) -> Figures:
    """Each cell's time, interval, and whether it is unsteady; each pair's ratio with its own."""
    by_size: dict[int, dict[str, Any]] = {}
    for record in run.records:
        by_size.setdefault(record.cell.case.seq_len, {})[record.cell.impl] = record
    cells = [
        (n, impl, times.time_us(r), times.interval_us(r), notes.unsteady(r),
         r.metrics.get("cpu_share"), r.metrics.get("full_speed_share"))
        for n, records in by_size.items() for impl, r in records.items()
    ]  # fmt: skip
    pairs = []
    for n, records in by_size.items():
        for above, below in itertools.combinations([i for i in IMPLS if i in records], 2):
            value, interval = ratio(records[above], records[below])
            pairs.append((n, above, below, value, interval))
    return {"wall_s": run.info["spent"]["wall_s"], "cells": cells, "pairs": pairs}
