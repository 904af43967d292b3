"""From live runs to the figures of `summary.json`: live, resampled, other tools, real cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnbench.base import units
from attnbench.gate.decide.verdict import decide
from tests.validation.gate.pool import Live, of_kind
from tests.validation.gate.resample import resample, stock
from tests.validation.gate.schedule import Kind
from tests.validation.gate.tally import Judged, by_cell, tally
from tests.validation.gate.versus import versus

Figures = dict[str, Any]


def judged(live: Live) -> Judged:
    """A live run as its raw data decides it now."""
    return Judged(
        kind=live.kind,
        cell=live.cell,
        truth=tuple(1 + live.kind.share * (c == live.cell) for c in range(len(live.run.cells))),
        outcome=decide(live.run),
        seconds=live.spent_s,
        rounds=len(live.run.rounds),
    )


def summarise(
    runs: Sequence[Live], wanted: Mapping[Kind, int], resamples: int, tell: Callable[[str], None]
) -> Figures:
    """All figures; without `resamples` those of the live runs alone, which take no time."""
    now = {kind: [judged(live) for live in of_kind(runs, kind)] for kind in _kinds(runs, wanted)}
    names = [name(cell) for cell in runs[0].run.cells] if runs else []
    every = [each for judgements in now.values() for each in judgements]
    summary: Figures = {
        "wanted": {kind.label: count for kind, count in wanted.items()},
        "cells": names,
        "live": [tally(judgements) for judgements in now.values() if judgements],
        "by_cell": by_cell(every, names),
        "changed": sum(
            int(each.outcome.exit_code) != live.exit_code
            for each, live in zip(every, _in_order(runs, now), strict=True)
        ),
        "ratios": [_ratios(each) for each in every],
        "resampled": [],
        "stock": None,
        "peers": [],
    }
    return summary | (_more(runs, list(now), resamples, tell) if resamples else {})


def _more(
    runs: Sequence[Live], kinds: Sequence[Kind], resamples: int, tell: Callable[[str], None]
) -> Figures:
    """Resampled runs, and other tools on the same times."""
    found: Figures = {}
    kept = stock(runs)
    if kept is not None:
        found["stock"] = {
            "rounds": len(kept.rounds),
            "slowed": {
                f"{100 * share:g}": sum(len(p) for (_, s), p in kept.slowed.items() if s == share)
                for share in sorted({s for _, s in kept.slowed}, reverse=True)
            },
            "off_most": kept.off_most,
        }
        found["resampled"] = []
        for kind in kinds:
            if kept.enough(kind):
                tell(f"resampling {resamples} runs: {kind.label}")
                found["resampled"].append(tally(resample(kind, kept, resamples)))
    tell("applying other tools' rules to the same times")
    return found | {"peers": versus(runs)}


def name(cell: Any) -> str:
    """`naive n=128`: the cells differ in nothing else."""
    return f"{cell.impl} n={units.length(cell.case.seq_len)}"


def _kinds(runs: Sequence[Live], wanted: Mapping[Kind, int]) -> list[Kind]:
    """Those that were asked for, then others that the folder holds."""
    return list(dict.fromkeys([*wanted, *(live.kind for live in runs)]))


def _in_order(runs: Sequence[Live], now: Mapping[Kind, Sequence[Judged]]) -> list[Live]:
    return [live for kind in now for live in of_kind(runs, kind)]


def _ratios(run: Judged) -> Figures:
    """What the picture shows of a run: a ratio, a verdict and a stage for each cell."""
    return {
        "kind": run.kind.label,
        "cell": run.cell,
        "ratios": [None if r.ratio is None else round(r.ratio, 5) for r in run.outcome.rows],
        "verdicts": [row.verdict for row in run.outcome.rows],
    }
