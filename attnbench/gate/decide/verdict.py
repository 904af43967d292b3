"""From a gate run's raw data to its outcome: the same live and in a replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from attnbench.base.stats import median, median_interval
from attnbench.base.units import brief_percent, change, seconds, tally
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateRun, VersionName
from attnbench.gate.decide.exact import GROWING, compare, growing, verdict_of
from attnbench.gate.decide.outcome import Change, Controls, Outcome, Row, Verdict
from attnbench.gate.decide.sequential import Decision, SequentialDecision


def comparable(run: GateRun) -> tuple[int, ...]:
    """The cells that are right in both versions: those whose time may be compared."""
    return tuple(
        number
        for number in range(len(run.cells))
        if verdict_of(run.checks[number]["base"], run.checks[number]["candidate"]) is None
    )


def beyond_timing(run: GateRun, times: SequentialDecision) -> bool:
    """Whether something is wrong: what no further round can change, and no speed makes up for."""
    return any(row.verdict == "incorrect" for row in _rows(run, times))


def decide(run: GateRun) -> Outcome:
    """Every verdict, from the raw data alone, and how the process must end."""
    seed = int(run.options.get("seed") or 0)
    times = SequentialDecision(comparable(run), run.rules, seed)
    for found in run.rounds:
        times.add(found)
    rows, controls = tuple(_rows(run, times)), times.controls.summary()
    exit_code, words = _conclusion(run, rows, controls)
    return Outcome(rows=rows, controls=controls, exit_code=exit_code, words=words)


def _is_exact(row: Row) -> bool:
    """Whether something wrong, or grown that repeats exactly, is held against the candidate."""
    return row.verdict == "incorrect" or any(change.metric != "time" for change in row.changes)


def _rows(run: GateRun, times: SequentialDecision) -> Iterator[Row]:
    """The verdict on each cell by what is known so far."""
    for number, cell in enumerate(run.cells):
        base, candidate = run.checks[number]["base"], run.checks[number]["candidate"]
        checked = verdict_of(base, candidate)
        if checked is not None:  # the checks alone decide
            only_in: VersionName | None = "candidate" if base.status == "absent" else None
            if candidate.status == "absent":
                only_in = "base"
            verdict, reason = checked
            wrong = (Change("error"),) * (candidate.status == "incorrect")
            yield Row(cell=cell, verdict=verdict, reason=reason, changes=wrong, only_in=only_in)
            continue
        differences = compare(base, candidate, run.rules)
        grows = growing(run.rounds, number)
        failures = differences.failures + grows
        row = replace(_timed(run, number, times), notes=differences.notes)
        if failures:
            worse = row.verdict in ("incorrect", "regressed")
            larger: Verdict = "larger" if isinstance(run.rules.growth, Mapping) else "regressed"
            trade = _trade(row) if larger == "larger" and not worse else ""
            row = replace(
                row,
                verdict=row.verdict if worse else larger,
                reason="; ".join([*[row.reason] * worse, *failures, *[trade] * bool(trade)]),
                changes=(*row.changes * worse, *differences.changes, *[GROWING] * len(grows)),
                trade=trade,
            )
        yield row


def _trade(row: Row) -> str:
    """What the time does where a cell is larger: `12 % faster`, or its verdict."""
    if row.verdict == "improved" and row.ratio is not None:
        return f"{brief_percent(1 - row.ratio)} faster"
    return f"time {change(row.ratio) if row.verdict == 'ok' else row.verdict}"


def _timed(run: GateRun, number: int, times: SequentialDecision) -> Row:
    stage, logs = times.observations(number)
    decision = times.decided.get(number)
    if decision is None and run.at_finding:
        reason = "a finding ended the run; --keep-going times the rest"
        decision = Decision(verdict="not timed", reason=reason)
    elif decision is None:
        why = "stopped by --budget" if run.over_budget else "the run was cut short"
        reason = f"{why} {times.progress().get(number, '')}".rstrip()
        decision = Decision(verdict="inconclusive", reason=reason)
    ratio = math.exp(median(logs)) if logs else None
    changes = (Change("time", ratio),) * (ratio is not None)
    if decision.verdict == "incorrect":
        changes = (Change("error"),) * times.wrong(number)
    interval = median_interval(logs)
    return Row(
        cell=run.cells[number],
        verdict=decision.verdict,
        reason=decision.reason,
        stage=stage if logs else None,
        ratio=ratio,
        changes=changes,
        low=None if interval is None else math.exp(interval[0]),
        high=None if interval is None else math.exp(interval[1]),
        wins=decision.wins,
        rounds=len(logs),
    )


def _conclusion(run: GateRun, rows: tuple[Row, ...], controls: Controls) -> tuple[ExitCode, str]:
    """The exit code and one sentence: the first of these that holds."""
    of = [row.verdict for row in rows]
    against = tally(of, ("incorrect", "regressed", "larger"))
    gone = ", ".join(dict.fromkeys(row.cell.impl for row in rows if row.only_in == "base"))
    removed = f"removed: {gone}" if gone else ""
    if any(map(_is_exact, rows)) or (removed and run.rules.fail_removed):  # needs no trust in times
        said = against, tally(of, ("not timed",)), removed
        return ExitCode.FINDING, "; ".join(filter(None, said))
    if controls.untrusted:
        return ExitCode.ENVIRONMENT, f"the run cannot be trusted: {controls.untrusted}"
    if "regressed" in of:
        return ExitCode.FINDING, "; ".join(filter(None, (against, removed)))
    if set(of) <= {"not comparable"}:
        return ExitCode.USAGE, "nothing is comparable"
    if "inconclusive" in of:
        return ExitCode.INCONCLUSIVE, tally(of, ("inconclusive",))
    threshold = brief_percent(run.rules.threshold)
    if controls.found is not True:
        control = f"the positive control of {threshold} was not found"
        return ExitCode.INCONCLUSIVE, f"{control}: {missing(run, controls)}"
    words = tally(of, ("ok", "improved", "not comparable"))
    facts = [f"no regression of {threshold} or more: {words}", removed]
    if disturbed := sum("counted_despite" in found.facts for found in run.rounds):
        rounds = sum(found.discarded is None for found in run.rounds)
        facts.append(f"the machine was disturbed in {disturbed} of the {rounds} rounds that count")
    return ExitCode.OK, "; ".join(filter(None, facts))


def missing(run: GateRun, controls: Controls) -> str:
    """What a run lacks whose positive control was not found, with the figures, and the remedy."""
    if controls.rounds < controls.look:
        words = f"{controls.rounds} of {controls.look} rounds undisturbed"
    else:
        words = f"beyond the margin in {controls.wins} of {controls.rounds} rounds"
        words += f", where it takes {controls.needed}" if controls.needed is not None else ""
    why = Counter(found.discarded for found in run.rounds if found.discarded is not None)
    if why:
        words += f"; {why.total()} discarded ({why.most_common(1)[0][0]})"
    if run.over_budget:
        words += f"; the budget of {seconds(run.rules.budget_s)} is over"
    if run.over_budget or controls.rounds < controls.look:
        return f"{words}; raise --budget or rerun"
    return f"{words}; rerun on a quieter machine, or raise --threshold"
