"""Other tools' rules on the raw times of the live runs: false alarms a gate run, slowdowns found.

A gate run of theirs is one fresh process a side over all cells. `same round`: both sides are from
one round, where they took turns within tenths of a second, which no tool does for them. `minutes
apart`: the candidate is from a round of another run, as where one commit is timed after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from attnbench.gate.decide.data import Round, Variant
from tests.validation.gate.peers import PEERS, Peer, Times
from tests.validation.gate.pool import Live
from tests.validation.gate.tally import share

T = TypeVar("T")
Figures = dict[str, Any]
SAME, APART = "same round", "minutes apart"
MOST_PAIRS = 400  # of rounds to apply each rule to; more would take minutes and say the same


@dataclass(frozen=True)
class _Pair:
    """The times of one cell on two sides, and whether the second was slowed."""

    cell: int
    base: Times
    candidate: Times


@dataclass(frozen=True)
class _Timed:
    """One round that counts, with the run it is from."""

    live: Live
    found: Round


def versus(runs: Sequence[Live], seed: int = 0) -> list[Figures]:
    """A row of figures for each way of pairing and each rule; none without rounds to pair."""
    rounds = [
        _Timed(live, found)
        for live in runs
        for found in live.run.rounds
        if found.discarded is None and not found.failures
    ]
    alike = _some(_gate_runs(rounds, None), seed), _some(_gate_runs(rounds, seed), seed)
    shares = sorted({live.run.rules.threshold for live in runs}, reverse=True)
    rows = []
    for way, gate_runs, shuffled in ((SAME, alike[0], None), (APART, alike[1], seed)):
        slowed = {p: _some(_slowed(rounds, p, shuffled), seed) for p in shares}
        rows += [_row(peer, way, gate_runs, slowed) for peer in PEERS if gate_runs]
    return rows


def _row(
    peer: Peer, way: str, gate_runs: list[list[_Pair]], slowed: dict[float, list[_Pair]]
) -> Figures:
    alarms = [any(_says(peer, pair) for pair in pairs) for pairs in gate_runs]
    return {
        "tool": peer.label,
        "pairing": way,
        "false_alarms": share(sum(alarms), len(alarms)),
        "found": {
            f"{100 * planted:g}": share(sum(_says(peer, pair) for pair in pairs), len(pairs))
            for planted, pairs in slowed.items()
        },
    }


def _says(peer: Peer, pair: _Pair) -> bool:
    return peer.slower(pair.base, pair.candidate)


def _gate_runs(rounds: list[_Timed], seed: int | None) -> list[list[_Pair]]:
    """All cells of two identical sides: of one round, or (with a seed) of rounds of two runs."""
    whole = [
        timed
        for timed in rounds
        if not timed.live.kind.share and all(_has(timed, c, "candidate") for c in _cells(timed))
    ]
    return [
        [_pair(before, after, cell, "candidate") for cell in _cells(before)]
        for before, after in _partners(whole, seed)
    ]


def _slowed(rounds: list[_Timed], planted: float, seed: int | None) -> list[_Pair]:
    """The base against the control that was slowed by this share, cell by cell."""
    found = []
    for cell in _cells(rounds[0]) if rounds else ():
        timed = [
            each
            for each in rounds
            if each.live.run.rules.threshold == planted and _has(each, cell, "planted")
        ]
        found += [_pair(a, b, cell, "planted") for a, b in _partners(timed, seed)]
    return found


def _partners(rounds: list[_Timed], seed: int | None) -> Iterator[tuple[_Timed, _Timed]]:
    """Each round with itself, or with one that chance picks from the other runs."""
    chance = random.Random(seed)
    for after in rounds:
        if seed is None:
            yield after, after
            continue
        others = [before for before in rounds if before.live is not after.live]
        if others:
            yield chance.choice(others), after


def _cells(timed: _Timed) -> range:
    return range(len(timed.live.run.cells))


def _has(timed: _Timed, cell: int, arm: Variant) -> bool:
    return arm in timed.found.samples.get(cell, {})


def _pair(before: _Timed, after: _Timed, cell: int, arm: Variant) -> _Pair:
    return _Pair(cell, _times(before, cell, "base"), _times(after, cell, arm))


def _times(timed: _Timed, cell: int, arm: Variant) -> Times:
    return np.array([ns for blocks in timed.found.samples[cell][arm] for ns in blocks], dtype=float)


def _some(pairs: list[T], seed: int) -> list[T]:
    if len(pairs) <= MOST_PAIRS:
        return pairs
    return random.Random(seed).sample(pairs, MOST_PAIRS)
