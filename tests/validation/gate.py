"""Gate runs whose answer is known: identical sides, and a slowdown planted in one cell.

The built-in naive and sdpa are held against themselves. False alarms and detections are counted
over runs that are made one by one, each in a minute or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.base.stats import median
from attnbench.errors import ExitCode, UsageError
from attnbench.execution.events import Warned, follow
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.gate.decide.data import DEFAULT_THRESHOLD, GateRun, Rules, Version
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run import measuring
from attnbench.planning.plan import Axes
from attnbench.schema.record import Cell
from tests.validation.neighbours import neighbours as beside
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

IMPLS = ("naive", "sdpa")
IMPL_FILES = Path(__file__).resolve().parents[2] / "impls"
MACHINE = ("device_name", "cores", "torch", "python")  # other machines have other noise
USUAL = DEFAULT_THRESHOLD["cpu"]
FOUND, UNDECIDED = 0.90, 0.10  # goals, beside that of no false alarm


def examine(
    path: Path, tell: Tell, *, aa: int, inject: Sequence[float], each: int,
    seq_lens: tuple[int, ...], neighbours: int,
) -> Ended:  # fmt: skip
    """Make `aa` runs of identical sides and `each` for each slowdown of `inject`, in percent.

    Raises:
        UsageError: a slowdown that cannot be planted.
        StoreError: the folder cannot be written, or has runs of another machine.
    """
    if wrong := [percent for percent in inject if not 1 <= percent <= 100]:
        raise UsageError(f"--inject {wrong[0]:g} is no slowdown in percent from 1 to 100")
    with LocalRunner(Settings(device="cpu", threads=1)) as runner:
        machine = runner.catalogue().environment
    asked = {"neighbours": neighbours, "seq_lens": list(seq_lens)}
    wanted = {0.0: aa} | {round(percent / 100, 6): each for percent in inject}

    def missing(done: list[Figures]) -> Iterator[Figures]:
        with beside(neighbours, len(done)):
            have = {share: sum(row["share"] == share for row in done) for share in wanted}
            # The kind that is furthest behind comes next, so that any beginning has all of them.
            while behind := [share for share in wanted if have[share] < wanted[share]]:
                share = min(behind, key=lambda share: have[share] / wanted[share])
                row = measured(share, have[share], seq_lens, tell)
                have[share] += 1
                left = sum(wanted.values()) - sum(have.values())
                tell(
                    f"{label(share)} run {have[share]}: {row['ending']} in"
                    f" {units.seconds(row['wall_s'])}; {left} more"
                )
                yield row

    return go_on(
        path, asked | {name: machine.get(name) for name in MACHINE}, missing,
        lambda rows: summarise(rows, wanted), tables,
    )  # fmt: skip


def measured(share: float, number: int, seq_lens: tuple[int, ...], tell: Tell) -> Figures:
    """One run. The slowed cell rotates; the gate promises to find it, or 10 % if that is less."""
    count = len(IMPLS) * len(seq_lens)
    cell = number % count if share else None
    axes = Axes(batch_sizes=(1,), heads=(4,), seq_lens=seq_lens, head_dims=(64,), impls=IMPLS)
    seed = round(1e4 * share) * 10_000 + number
    request = measuring.GateRequest(
        base=_side("base"), candidate=_side("candidate"), sweeps=(axes,),
        rules=Rules(threshold=min(USUAL, share or USUAL)),
        settings=Settings(device="cpu", threads=1, seed=seed),
        injected={} if cell is None else {cell: share}, options={},
    )  # fmt: skip

    def show(event: object) -> None:
        if isinstance(event, Warned):
            tell(f"Warning: {event.message}")

    return row_of(follow(measuring.run_gate(request), show), share, cell)


def _side(name: Any) -> Version:
    files = tuple(str(IMPL_FILES / f"{impl}.py") for impl in IMPLS)
    return Version(name=name, root=str(IMPL_FILES), files=files)


def row_of(run: GateRun, share: float, cell: int | None) -> Figures:
    """What is kept of a run: how it ended, and each cell's verdict, ratio and interval."""
    outcome = decide(run)
    ending = outcome.exit_code.name.lower()
    if outcome.exit_code == ExitCode.INCONCLUSIVE:  # else it did not see its own control
        open_ones = any(row.verdict == "inconclusive" for row in outcome.rows)
        ending = "inconclusive" if open_ones else "blind"
    return {
        "share": share, "cell": cell, "created": run.created, "ending": ending,
        "rounds": len(run.rounds), "wall_s": run.spent["wall_s"],
        "cells": [f"{c.impl} n={c.case.seq_len}" for c in run.cells if isinstance(c, Cell)],
        "verdicts": [row.verdict for row in outcome.rows],
        "ratios": [(row.low, row.ratio, row.high) for row in outcome.rows],
    }  # fmt: skip


def summarise(rows: list[Figures], wanted: dict[float, int]) -> Figures:
    """Counts by kind of run; the goals are judged once all runs are there."""
    shares = sorted({row["share"] for row in rows})
    kinds = [_kind([row for row in rows if row["share"] == share]) for share in shares]
    whole = all(sum(row["share"] == share for row in rows) >= n for share, n in wanted.items())
    missed = [
        kind["runs"]
        for kind in kinds
        if kind["false_alarms"]
        or (not kind["share"] and kind["unfit"] + kind["inconclusive"] > UNDECIDED * kind["runs"])
        or (kind["share"] == USUAL and kind["found"] < FOUND * kind["runs"])
    ]
    return {"kinds": kinds, "whole": whole, "met": not (whole and missed)}


def _kind(rows: list[Figures]) -> Figures:
    found: Figures = {"share": rows[0]["share"], "runs": len(rows)}
    against = [
        {cell for cell, said in enumerate(row["verdicts"]) if said in ("incorrect", "regressed")}
        for row in rows
    ]
    pairs = list(zip(rows, against, strict=True))
    slowed: list[tuple[Any, float]] = []
    alike: list[tuple[Any, float]] = []
    for row in rows:
        for cell, ratios in enumerate(row["ratios"]):
            if None not in ratios:
                mine = cell == row["cell"]
                (slowed if mine else alike).append((ratios, 1 + row["share"] * mine))
    return found | {
        "false_alarms": sum(bool(named - {row["cell"]}) for row, named in pairs),
        "found": sum(row["cell"] in named for row, named in pairs),
        "unfit": sum(row["ending"] in ("blind", "environment") for row in rows),
        "inconclusive": sum(row["ending"] == "inconclusive" for row in rows),
        "slowed": _held(slowed), "alike": _held(alike),
        "wall_s": [median(row["wall_s"] for row in rows), max(row["wall_s"] for row in rows)],
    }  # fmt: skip


def _held(pairs: list[tuple[Any, float]]) -> Figures:
    """In how many intervals the true ratio lies, and how far off the ratios are in the middle."""
    held = sum(low <= truth <= high for (low, _, high), truth in pairs)
    bias = median(ratio / truth - 1 for (_, ratio, _), truth in pairs) if pairs else None
    return {"held": held, "of": len(pairs), "bias": bias}


def label(share: float) -> str:
    """`A/A` or `+10 %`."""
    return f"+{100 * share:g} %" if share else "A/A"


def rate(hits: int, of: int) -> str:
    """`0 of 40: 0 % [0, 8.81]`, with the exact 95 % interval (Clopper & Pearson 1934)."""
    from scipy.stats import beta

    low = beta.ppf(0.025, hits, of - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, of - hits) if hits < of else 1.0
    ends = ", ".join(units.digits(100 * float(end)) for end in (low, high))
    return f"{hits} of {of}: {units.digits(100 * hits / of)} % [{ends}]"


def tables(summary: Figures) -> list[Table]:
    """A row for each kind of run."""
    signed = lambda x: units.UNKNOWN if x is None else f"{100 * x:+.2f} %".replace("-", "−")  # noqa: E731
    rows = []
    for kind in summary["kinds"]:
        of, slowed, alike = kind["runs"], kind["slowed"], kind["alike"]
        held = [f"{x['held']} of {x['of']}" for x in (slowed, alike) if x["of"]]
        rows.append((
            label(kind["share"]), rate(kind["false_alarms"], of),
            rate(kind["found"], of) if kind["share"] else units.UNKNOWN,
            rate(kind["unfit"], of), rate(kind["inconclusive"], of), " / ".join(held),
            signed(alike["bias"]), signed(slowed["bias"]), *map(units.seconds, kind["wall_s"]),
        ))  # fmt: skip
    asked = summary["asked"]
    note = (
        f"{asked['device_name']}, {asked['cores']} cores, torch {asked['torch']}, one thread,"
        f" beside {asked['neighbours']} processes that spin and sleep. A false alarm is a run that"
        " calls a cell slower, or wrong, that is not. Intervals that hold the true ratio: those"
        " of slowed cells, then of the others. Goals: no false alarm, at most"
        f" {UNDECIDED:.0%} of A/A undecided, {FOUND:.0%} of {label(USUAL)} found:"
        f" {'too few runs yet' if not summary['whole'] else 'met' if summary['met'] else 'MISSED'}."
    )
    header = (
        "runs", "false alarms", "planted found", "blind or untrusted", "inconclusive",
        "interval holds truth", "bias, others", "bias, planted", "time", "longest",
    )  # fmt: skip
    return [Table(title="Live gate runs", header=header, rows=tuple(rows), note=note)]
