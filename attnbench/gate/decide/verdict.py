"""From a gate run's raw data to its outcome: the same live and in a replay."""

from __future__ import annotations

import math
from dataclasses import replace

from attnbench.base.stats import median, median_interval
from attnbench.base.units import brief_percent
from attnbench.errors import ExitCode
from attnbench.gate.decide.exact import Exact, compare, verdict_of
from attnbench.gate.decide.leaks import growing
from attnbench.gate.decide.outcome import Controls, GateRun, Outcome, Row
from attnbench.gate.decide.referee import Referee, hear_all
from attnbench.gate.decide.rules import Verdict, counted


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
    exact = {number: _exact(run, number) for number in referee.cells}
    rows = tuple(_row(run, number, referee, exact.get(number)) for number in range(len(run.cells)))
    controls = referee.controls()
    grown = any(found.failures for found in exact.values())
    exit_code, words = _conclusion(run, rows, grown, controls)
    return Outcome(rows=rows, controls=controls, exit_code=exit_code, words=words)


def _exact(run: GateRun, number: int) -> Exact:
    """What repeats exactly, of a cell that is right on both sides."""
    found = compare(run.checks[number]["base"], run.checks[number]["candidate"], run.rules.growth)
    return replace(found, failures=found.failures + growing(run.rounds, number))


def _row(run: GateRun, number: int, referee: Referee, exact: Exact | None) -> Row:
    """The verdict on one cell; `exact` is None where its checks alone decide."""
    if exact is None:
        checks = run.checks[number]
        decided = verdict_of(checks.get("base"), checks.get("candidate"))
        assert decided is not None, "what is comparable was compared"
        return Row(cell=run.cells[number], verdict=decided[0], reason=decided[1])
    row = _timed(run, number, referee, exact.notes)
    if not exact.failures:
        return row
    grown = "; ".join(exact.failures)
    if row.verdict == "regressed":
        grown = f"{row.reason}; {grown}"
    verdict: Verdict = "incorrect" if row.verdict == "incorrect" else "regressed"
    return replace(row, verdict=verdict, reason=grown)


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


def _conclusion(
    run: GateRun, rows: tuple[Row, ...], grown: bool, controls: Controls
) -> tuple[ExitCode, str]:
    """The exit code and one sentence: the first of these that holds.

    `grown` says that something failed which repeats exactly, and so needs no trust in times.
    """
    of = [row.verdict for row in rows]
    against = counted(of, ("incorrect", "regressed"))
    if "incorrect" in of or grown:
        return ExitCode.FINDING, against
    if controls.untrusted:
        return ExitCode.ENVIRONMENT, f"the run cannot be trusted: {controls.untrusted}"
    if "regressed" in of:
        return ExitCode.FINDING, against
    if set(of) <= {"not comparable"}:
        return ExitCode.USAGE, "nothing is comparable"
    if "inconclusive" in of:
        return ExitCode.INCONCLUSIVE, counted(of, ("inconclusive",))
    if controls.found is not True:
        return ExitCode.INCONCLUSIVE, _blind(run, controls)
    words = counted(of, ("ok", "improved", "not comparable"))
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
