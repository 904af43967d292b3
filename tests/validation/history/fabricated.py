"""Histories with known steps, in the noise that runs of identical code showed.

A row of noise is what the times of a run differed by from those that the cells have over all runs.
A history of 200 runs is put together from blocks of consecutive rows, so that what lasts over
several runs does so in it; all cells of a run come from the same row, so that they still go
together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from attnbench.analysis.apart import CellTime, taken_apart
from attnbench.analysis.history.entries import CellLine, Entry

RUNS, STEPS, SIZE = 200, 5, 0.10
APART = 20  # runs between two steps, and from the ends, at least
BLOCK = (3, 6)  # consecutive rows that are taken together


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of noise: for each run, ln of what moved each cell, of those that all runs have."""

    environment: dict[str, object]
    cells: tuple[tuple[str, str, str, str], ...]  # case, implementation, label, group
    levels_us: tuple[float, ...]
    runs: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]  # by run and cell


def noise_of(entries: Sequence[Entry]) -> Noise:
    """What runs of identical code on one machine differed by."""
    tables = [
        {c.key: CellTime(time_us=c.time_us, group=c.group) for c in entry.cells}
        for entry in entries
    ]
    levels, _ = taken_apart(tables)
    cells = [c for c in entries[-1].cells if all(c.key in table for table in tables)]
    return Noise(
        environment=entries[-1].environment,
        cells=tuple((c.case_id, c.impl, c.label, c.group) for c in cells),
        levels_us=tuple(round(levels[c.key].time_us, 3) for c in cells),
        runs=tuple(entry.created for entry in entries),
        rows=tuple(
            tuple(round(math.log(table[c.key].time_us / levels[c.key].time_us), 4) for c in cells)
            for table in tables
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Fabricated:
    """A history, and its true steps: by cell, the first run after each and ln of its size."""

    entries: list[Entry]
    truth: dict[tuple[str, str], list[tuple[int, float]]]


def fabricate(noise: Noise, seed: int, stepped: int) -> Fabricated:
    """A history of `RUNS` runs in which `stepped` cells have `STEPS` steps each."""
    rng = random.Random(seed)
    rows: list[tuple[float, ...]] = []
    while len(rows) < RUNS:
        length = min(rng.randint(*BLOCK), len(noise.rows))
        start = rng.randint(0, len(noise.rows) - length)
        rows += noise.rows[start : start + length]
    truth = {}
    for name in rng.sample([cell[:2] for cell in noise.cells], stepped):
        slack = RUNS - APART * (STEPS + 1)
        places = sorted(rng.randint(0, slack) for _ in range(STEPS))
        signs = [rng.choice((-1, 1)) for _ in range(STEPS)]
        truth[name] = [
            (place + APART * (i + 1), sign * math.log1p(SIZE))
            for i, (place, sign) in enumerate(zip(places, signs, strict=True))
        ]
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    entries = []
    for number, row in enumerate(rows[:RUNS]):
        cells = []
        for (case_id, impl, label, group), level_us, moved in zip(
            noise.cells, noise.levels_us, row, strict=True
        ):
            steps = sum(log for at, log in truth.get((case_id, impl), ()) if at <= number)
            time_us = level_us * math.exp(moved + steps)
            cells.append(CellLine(case_id, impl, label, time_us, group=group))
        entries.append(
            Entry(
                run=f"run-{number}", created=(begin + timedelta(days=number)).isoformat(),
                environment=noise.environment, cells=tuple(cells),
            )
        )  # fmt: skip
    return Fabricated(entries=entries, truth=truth)
