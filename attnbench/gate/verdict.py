"""From a gate run's raw data to its outcome: the same live and in a replay."""

from __future__ import annotations

import math
from dataclasses import replace

from attnbench.errors import ExitCode
from attnbench.gate.exact import compare, verdict_of
from attnbench.gate.leaks import growing
from attnbench.gate.outcome import Checked, Controls, GateRun, Outcome, Row
from attnbench.gate.referee import Referee, hear_all
from attnbench.gate.rules import Verdict
from attnbench.stats import median, median_interval
from attnbench.units import brief_percent


def comparable(run: GateRun) -> tuple[int, ...]:
    """The cells that are right on both sides: those whose time may be compared."""
    return tuple(
        number
        for number in range(len(run.cells))
        if verdict_of(run.checks[number].get("base"), run.checks[number].get("candidate")) is None
    )


def seed_of(run: GateRun) -> int:
    """The seed that the order of the run's controls was drawn with."""
    return int(run.options.get("seed") or 0)


def decide(run: GateRun) -> Outcome:
    """Every verdict, from the raw data alone, and how the process must end."""
    referee = hear_all(run.rounds, comparable(run), run.rules, seed_of(run))
    rows = tuple(_row(run, number, referee) for number in range(len(run.cells)))
    controls = referee.controls()
    exit_code, words = _conclusion(run, rows, controls)
    return Outcome(rows=rows, controls=controls, exit_code=exit_code, words=words)


def _row(run: GateRun, number: int, referee: Referee) -> Row:
    cell, checks = run.cells[number], run.checks[number]
    decided = verdict_of(checks.get("base"), checks.get("candidate"))
    if decided is not None:
        return Row(cell=cell, verdict=decided[0], reason=decided[1])
    exact = compare(checks["base"], checks["candidate"], run.rules.growth)
    row = _timed(run, number, referee, exact.notes)
    failures = exact.failures + growing(run.rounds, number)
    if not failures:
        return row
    grown = "; ".join(failures)
    if row.verdict == "regressed":
        grown = f"{row.reason}; {grown}"
    verdict: Verdict = "incorrect" if row.verdict == "incorrect" else "regressed"
    return replace(row, verdict=verdict, reason=grown)


def _both(run: GateRun, number: int) -> tuple[Checked, Checked]:
    return run.checks[number]["base"], run.checks[number]["candidate"]


def _timed(run: GateRun, number: int, referee: Referee, notes: tuple[str, ...]) -> Row:
    decision = referee.decided.get(number)
    stage, logs = referee.observations(number)
    if decision is None:
        why = "the time budget ended" if run.over_budget else "the run was cut short"
        verdict: Verdict = "inconclusive"
        reason, wins = f"{why} {referee.open().get(number, '')}".rstrip(), None
    else:
        verdict, reason, wins = decision.verdict, decision.reason, decision.wins
    interval = median_interval(logs)
    return Row(
        cell=run.cells[number],
        verdict=verdict,
        reason=reason,
        stage=stage if logs else None,
        ratio=math.exp(median(logs)) if logs else None,
        low=None if interval is None else math.exp(interval[0]),
        high=None if interval is None else math.exp(interval[1]),
        wins=wins,
        rounds=len(logs),
        notes=notes,
    )


def _conclusion(run: GateRun, rows: tuple[Row, ...], controls: Controls) -> tuple[ExitCode, str]:
    """The exit code and one sentence: the first of these that holds."""
    of: dict[Verdict, int] = {}
    for row in rows:
        of[row.verdict] = of.get(row.verdict, 0) + 1
    exact = any(
        row.verdict == "regressed"
        and compare(*_both(run, number), run.rules.growth).failures + growing(run.rounds, number)
        for number, row in enumerate(rows)
    )
    against = _counted(of, ("incorrect", "regressed"))
    if of.get("incorrect") or exact:
        return ExitCode.FINDING, against
    if controls.untrusted:
        return ExitCode.ENVIRONMENT, f"the run cannot be trusted: {controls.untrusted}"
    if of.get("regressed"):
        return ExitCode.FINDING, against
    if set(of) <= {"not comparable"}:
        return ExitCode.USAGE, "nothing is comparable"
    if of.get("inconclusive"):
        return ExitCode.INCONCLUSIVE, _counted(of, ("inconclusive",))
    if controls.found is not True:
        return ExitCode.INCONCLUSIVE, _blind(run, controls)
    words = _counted(of, ("ok", "improved", "not comparable"))
    threshold = brief_percent(run.rules.threshold)
    return ExitCode.OK, f"no regression of {threshold} or more: {words}{_caution(run, rows)}"


def _caution(run: GateRun, rows: tuple[Row, ...]) -> str:
    """What a reader of a green line must know: what is no longer there; a disturbed machine."""
    gone = dict.fromkeys(row.cell.impl for row in rows if row.reason.startswith("removed"))
    disturbed = sum("not_vetoed" in found.facts for found in run.rounds)
    counted = sum(found.veto is None for found in run.rounds)
    return (f"; removed: {', '.join(gone)}" if gone else "") + (
        f"; the machine was disturbed in {disturbed} of the {counted} rounds that count"
        if disturbed
        else ""
    )


def _blind(run: GateRun, controls: Controls) -> str:
    planted = f"a planted slowdown of {brief_percent(run.rules.threshold)}"
    if run.over_budget:
        return (
            f"the time budget ended before {planted} was found: {controls.wins} of"
            f" {controls.rounds} rounds"
        )
    return (
        f"blind: {planted} was seen in only {controls.wins} of {controls.rounds} rounds, so that"
        " passing says nothing"
    )


def _counted(of: dict[Verdict, int], verdicts: tuple[Verdict, ...]) -> str:
    return ", ".join(f"{of[verdict]} {verdict}" for verdict in verdicts if of.get(verdict))
