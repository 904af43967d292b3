"""Fabricated histories with known steps: how many are found, and how many that are not there.

`noise.json` in the folder has the noise that was used, so that all can be counted again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attnbench.analysis.history.entries import CellLine, Entry, read
from attnbench.analysis.history.series import Line, history
from attnbench.analysis.history.steps import Rules, steps
from attnbench.errors import StoreError
from tests.validation.history.fabricated import (
    APART,
    BLOCK,
    RUNS,
    SIZE,
    STEPS,
    Noise,
    fabricate,
    noise_of,
)
from tests.validation.page import Table, markdown, write_texts

PAGE, NOISE, SUMMARY = "history.md", "noise.json", "summary.json"
STEPPED = 8  # cells of a history that have steps
NEAR = 2  # runs by which a step may be off
ENOUGH, FALSE = 4, 1  # of the five at least so many found, and at most so many that are none
GOAL, CALM = 0.95, "calm"  # of the series in this noise reach both
FACTORS = (0.0, 0.3, 0.6, 0.8)
ROOT = Path(__file__).parents[3]
SOURCES = {CALM: "selftest-timer-calm", "neighbours": "selftest-timer"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """How many histories of each noise; `runs`: a folder whose noise replaces that of `busy`."""

    seeds: int
    runs: Path | None
    output: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was found in one series: its noise, true steps found, false ones."""

    sd: float
    found: int
    false: int


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Fabricate, find, count; write noise.json, summary.json and history.md.

    Raises:
        StoreError: there are no runs to take the noise `busy` from, or nothing can be written.
    """
    folder = request.output / request.name
    noises = {name: _of_timer(source) for name, source in SOURCES.items()}
    noises["busy"] = _busy(folder / NOISE, request.runs)
    summary: dict[str, Any] = {"seeds": request.seeds, "noise": {}}
    for name, noise in noises.items():
        tell(f"{name}: {request.seeds} histories in the noise of {len(noise.rows)} runs")
        summary["noise"][name] = _counted(noise, request.seeds)
    summary["lasting"] = [_lasting(factor) for factor in FACTORS]
    summary["met"] = summary["noise"][CALM]["reach"] >= GOAL
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: msgspec.to_builtins(noise) for name, noise in noises.items()}
    write_texts(
        folder,
        {
            NOISE: json.dumps(kept, separators=(",", ":")) + "\n",
            SUMMARY: json.dumps(summary, indent=1) + "\n",
            PAGE: markdown(f"make validate PART=history: {request.name}", tables(summary)),
        },
    )
    return folder, summary


def _busy(file: Path, runs: Path | None) -> Noise:
    if runs is not None:
        return noise_of(read(runs))
    try:
        return msgspec.convert(json.loads(file.read_text())["busy"], Noise)
    except (OSError, ValueError, KeyError) as err:
        raise StoreError(f"{file} has no noise; name a folder of runs with --runs") from err


def _of_timer(name: str) -> Noise:
    """The runs that `make validate PART=timer` left: one code, beside 0, 1 and 2 neighbours."""
    file = ROOT / "results" / name / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    return noise_of(
        [
            Entry(
                run=str(number), created=(begin + timedelta(minutes=number)).isoformat(),
                environment={"device_name": name},
                cells=tuple(
                    CellLine(f"n={n}", impl, f"n={n}", time_us, group=f"n={n}")
                    for n, impl, time_us, *_ in row["cells"]
                ),
            )
            for number, row in enumerate(rows)
        ]
    )  # fmt: skip


def _counted(noise: Noise, seeds: int) -> dict[str, Any]:
    spread = _spreads(noise)
    seen: list[Seen] = []
    untouched = false = suspicious = 0
    for seed in range(seeds):
        made = fabricate(noise, seed, STEPPED)
        (found,) = history(made.entries, Rules())
        by_name = {line.name: line for line in found.lines if line.kind == "cell"}
        for case_id, impl, label, _ in noise.cells:
            line, truth = by_name[f"{impl} {label}"], made.truth.get((case_id, impl), [])
            sure = [(f.at, f.step.log) for f in line.found if f.verdict != "suspicious"]
            wrong = sum(not any(_same(s, t) for t in truth) for s in sure)
            if truth:
                right = sum(any(_same(s, t) for s in sure) for t in truth)
                seen.append(Seen(sd=spread[line.name], found=right, false=wrong))
            else:
                untouched, false = untouched + 1, false + wrong
                suspicious += _suspicious(line)
    quarters = np.array_split(sorted(seen, key=lambda one: one.sd), 4)  # type: ignore[call-overload]
    return {
        "runs": len(noise.rows), "cells": len(noise.cells), **_shares(seen),
        "quarters": [_shares(list(quarter)) for quarter in quarters],
        "untouched": untouched, "untouched_false": false, "untouched_suspicious": suspicious,
    }  # fmt: skip


def _same(found: tuple[int, float], true: tuple[int, float]) -> bool:
    return abs(found[0] - true[0]) <= NEAR and (found[1] > 0) == (true[1] > 0)


def _suspicious(line: Line) -> int:
    return sum(found.verdict == "suspicious" for found in line.found)


def _spreads(noise: Noise) -> dict[str, float]:
    """Of each line half the width, as ln, that the middle 68 % of its runs have without steps."""
    (found,) = history(fabricate(noise, 0, 0).entries, Rules())
    return {
        line.name: float(np.diff(np.quantile(np.log(line.values), (0.16, 0.84)))[0]) / 2
        for line in found.lines
        if line.kind == "cell"
    }


def _shares(seen: Sequence[Seen]) -> dict[str, Any]:
    return {
        "series": len(seen),
        "sd": [min(one.sd for one in seen), max(one.sd for one in seen)],
        "found": sum(one.found for one in seen),
        "false": sum(one.false for one in seen),
        "enough": sum(one.found >= ENOUGH for one in seen) / len(seen),
        "few_false": sum(one.false <= FALSE for one in seen) / len(seen),
        "reach": sum(one.found >= ENOUGH and one.false <= FALSE for one in seen) / len(seen),
    }


def _lasting(factor: float, lines: int = 200) -> dict[str, Any]:
    """Lines of noise alone, each value of which keeps `factor` of the one before."""
    wrong = 0
    for seed in range(lines):
        rng, x, row = random.Random(seed), 0.0, []
        for _ in range(RUNS):
            x = factor * x + rng.gauss(0, 0.05)
            row.append(x)
        found = steps(row, Rules(), tests=80 * (RUNS - 1))
        wrong += any(min(step.before, step.after) >= Rules().confirm for step in found)
    return {"factor": factor, "lines": lines, "with_steps": wrong}


def tables(summary: dict[str, Any]) -> list[Table]:
    """What was found of known steps, by noise, and what in noise alone."""
    rows = []
    for name, of in summary["noise"].items():
        parts = [("all", of), *((f"quarter {i}", q) for i, q in enumerate(of["quarters"], 1))]
        for which, part in parts:
            low, high = (f"{100 * sd:.1f}" for sd in part["sd"])
            rows.append(
                (
                    f"{name}, {which}", f"{low}–{high} %", str(part["series"]),
                    f"{part['found']} of {STEPS * part['series']}", str(part["false"]),
                    *(f"{100 * part[share]:.0f} %" for share in ("enough", "few_false")),
                )
            )  # fmt: skip
    known = Table(
        title="Known steps",
        header=(
            "noise", "sd of a run", "series", "steps found", "false", "≥ 4 of 5 found", "≤ 1 false",
        ),
        rows=tuple(rows),
        note=f"Series of {RUNS} runs with {STEPS} steps of ± {100 * SIZE:.0f} %, at least {APART}"
        f" runs apart; {STEPPED} cells of each of {summary['seeds']} histories have them. Found:"
        f" a regression or improvement of the right sign within ± {NEAR} runs. Noise: blocks of"
        f" {BLOCK[0]} to {BLOCK[1]} consecutive runs of one code; calm and neighbours are those of"
        " make validate PART=timer beside 0 to 2 busy processes on two days, busy the preset quick"
        " while other work kept the two cores at a load of 3 to 7. Sd: half the width of the middle"
        " 68 % of a cell's runs, without what is common to runs and groups; quarters are by it.",
    )  # fmt: skip
    untouched = Table(
        title="Cells of the same histories without a step",
        header=("noise", "runs it is of", "series", "false findings", "suspicious"),
        rows=tuple(
            (name, *(str(of[x]) for x in ("runs", "untouched", "untouched_false",
                                         "untouched_suspicious")))
            for name, of in summary["noise"].items()
        ),
    )  # fmt: skip
    lasting = Table(
        title="Noise that lasts",
        header=("kept of the run before", "lines", "with a false finding"),
        rows=tuple(
            (f"{100 * of['factor']:.0f} %", str(of["lines"]), str(of["with_steps"]))
            for of in summary["lasting"]
        ),
        note=f"Simulated lines of {RUNS} runs whose noise (5 % a run) is autoregressive, among 80"
        " cells.",
    )
    return [known, untouched, lasting]
