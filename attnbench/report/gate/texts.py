"""The words of a gate run, the same on the terminal, in Markdown, in JUnit XML and on the page."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import (
    VERDICTS,
    GateRun,
    Outcome,
    Row,
    Rules,
    Verdict,
    Version,
    counted,
)
from attnbench.schema.record import Cell
from attnbench.theory.traits import case_label

SIGNS: dict[Verdict, str] = {
    "incorrect": "✗",
    "regressed": "✗",
    "inconclusive": "?",
    "not comparable": "–",
    "improved": "↓",
    "ok": "✓",
}
# What stands before the conclusion, by how the run ends.
TITLES: dict[ExitCode, str] = {
    ExitCode.OK: "✓ passed: ",
    ExitCode.FINDING: "✗ failed: ",
    ExitCode.USAGE: "– ",
    ExitCode.INCONCLUSIVE: "? not passed: ",
    ExitCode.ENVIRONMENT: "! ",
}
STAGES = {"screen": "screening", "confirm": "confirmation"}
HEADER = ("", "cell", "change", "95 % interval", "wins", "verdict")
WINS = "rounds beyond the margin, of all that decide; of an ok cell those below the threshold"
READING = (
    "Change: candidate / base − 1, the median over rounds (above 0: slower), with its 95 % interval"
    f" over rounds; of a suspect from its confirmation alone. Wins: {WINS}."
)
# What no page, XML file or terminal can show: control characters, halves of a pair, non-characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """The text without what XML and terminals cannot show; line breaks and tabs stay."""
    return _UNPRINTABLE.sub("", text)


def flat(text: str) -> str:
    """The text, clean and on one line."""
    return clean(" ".join(text.split()))


def change(ratio: float | None) -> str:
    """A ratio of times as the change it is: 1.104 is `+10.4 %`; unknown is `–`."""
    if ratio is None or not math.isfinite(ratio):
        return units.UNKNOWN
    share = 100 * (ratio - 1)
    text = f"{share:+.1f}" if abs(share) < 99.95 else f"{share:+.0f}"
    return f"{text} %".replace("-", "−") if float(text) else "0.0 %"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval as changes: `+9.8 … +11.1 %`; unknown is `–`."""
    if low is None or high is None:
        return units.UNKNOWN
    return f"{change(low).removesuffix(' %')} … {change(high)}"


def wins(row: Row) -> str:
    """`11/12`, or `–` where no round decided."""
    return units.UNKNOWN if row.wins is None else f"{row.wins}/{row.rounds}"


def mark(verdict: Verdict) -> str:
    """A verdict with its sign, readable without colour."""
    return f"{SIGNS[verdict]} {verdict}"


def labels(cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """What the cases of all cells have in common, and what tells each cell: `sdpa n=512`."""
    words = [case_label(cell.case).split() for cell in cells]
    common = [w for w in (words[0] if words else []) if all(w in row for row in words)]
    common = [word for word in common if not word.startswith("n=")]
    own = [
        " ".join([cell.impl, *(word for word in row if word not in common)])
        for cell, row in zip(cells, words, strict=True)
    ]
    named = [
        text if own.count(text) == 1 else f"{text} ({cell.case.case_id})"
        for cell, text in zip(cells, own, strict=True)
    ]
    return " ".join(common), [flat(text) for text in named]


def worst_first(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    """Rows with the numbers of their cells; of equal verdicts the slowest first."""
    numbered = list(enumerate(rows))
    return sorted(numbered, key=lambda item: (VERDICTS.index(item[1].verdict), -_ratio(item[1])))


def _ratio(row: Row) -> float:
    return 0.0 if row.ratio is None else row.ratio


def texts(row: Row, label: str) -> tuple[str, ...]:
    """A row of the table, as `HEADER` names its columns."""
    return (
        SIGNS[row.verdict], label, change(row.ratio), interval(row.low, row.high), wins(row),
        row.verdict,
    )  # fmt: skip


def reasons(run: GateRun, outcome: Outcome) -> list[tuple[Verdict, str, str]]:
    """Verdict, cells, and why, for all that is not ok; and for all of which there is a note.

    Cells that share verdict and reason are named together.
    """
    _, names = labels(run.cells)
    sharing: dict[tuple[Verdict, str], list[str]] = {}
    for number, row in worst_first(outcome.rows):
        if row.verdict != "ok":
            sharing.setdefault((row.verdict, flat(row.reason)), []).append(names[number])
        for note in row.notes:  # held against nobody: the sign of no verdict
            key: tuple[Verdict, str] = "not comparable", flat(f"note: {note}")
            sharing.setdefault(key, []).append(names[number])
    return [(verdict, _some(cells), why) for (verdict, why), cells in sharing.items()]


def _some(names: Sequence[str], most: int = 4) -> str:
    """The names, or the first of them and how many more there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def title(outcome: Outcome) -> str:
    """`✗ failed: 1 regressed`."""
    return TITLES[outcome.exit_code] + flat(outcome.words)


def counts(outcome: Outcome) -> str:
    """`1 regressed, 7 ok`."""
    return counted(row.verdict for row in outcome.rows)


def sides(run: GateRun) -> list[str]:
    """What was held against what: `base: main (3f2a91c0d1)`."""
    return [f"{side.name}: {_side(side)}" for side in (run.base, run.candidate)]


def code(run: GateRun) -> list[str]:
    """What a reader must know who expects a difference: that nothing of it was loaded."""
    if not run.options.get("loaded_alike"):
        return []
    return ["every file that was loaded holds the same code on both sides"]


def _side(side: Version) -> str:
    commit = (side.commit or "")[:10]
    ref = side.ref or ("the working tree" if commit else f"the files in {side.root}")
    at = f" ({commit})" if commit and not (side.commit or "").startswith(ref) else ""
    if at and side.ref is None:
        at = f" at {commit}"
    return flat(f"{ref}{at}{', with uncommitted changes' if side.dirty else ''}")


def promise(rules: Rules) -> str:
    """What the run set out to find, and how often it may be wrong."""
    threshold, margin, alpha = map(
        units.brief_percent, (rules.threshold, rules.margin, rules.alpha)
    )
    return (
        f"A slowdown of {threshold} is found, or its cell stays open. What is slower by less than"
        f" the margin of {margin} is called a regression in at most {alpha} of runs, given"
        " independent rounds and a side bias within the margin."
    )


def controls(run: GateRun, outcome: Outcome) -> list[str]:
    """What the positive control and the A/A control have shown."""
    found = outcome.controls
    null = f"A/A control (the base again): {change(found.null_ratio)}"
    if found.untrusted:
        null += f"; not to be trusted: {flat(found.untrusted)}"
    return [_planted(run.rules, outcome), null]


def _planted(rules: Rules, outcome: Outcome) -> str:
    found = outcome.controls
    planted = f"positive control (a slowdown of {units.brief_percent(rules.threshold)})"
    if found.found is None:
        return f"{planted}: none, since no time was compared"
    seen = f"seen as {change(found.planted_ratio)}, beyond the margin in"
    if found.found:
        return f"{planted} was found: {seen} {found.wins} of {found.rounds} rounds"
    return (
        f"{planted} was NOT found: {seen} only {found.wins} of {found.rounds} rounds;"
        " the run is blind"
    )


def environment(run: GateRun) -> str:
    """The machine in one line: `AMD EPYC · 1 thread · torch 2.13.0`."""
    known = run.environment
    threads = known.get("threads")
    facts = [
        known.get("device_name") or known.get("device"),
        f"{threads} thread{'s' * (threads != 1)}" if threads else None,
        f"torch {known['torch']}" if known.get("torch") else None,
        f"attnbench {known['attnbench']}" if known.get("attnbench") else None,
        units.moment(run.created) if run.created else None,
    ]
    return flat(" · ".join(str(fact) for fact in facts if fact))


def total_s(run: GateRun) -> float:
    """Wall seconds of the whole run: as it says itself, or all its parts."""
    return run.spent.get("wall_s", sum(run.spent.values()))


def spent(run: GateRun) -> str:
    """`1 min 52 s of a budget of 5 min 0 s: checks 20.0 s, rounds 92.0 s`."""
    known = {k.removesuffix("_s"): v for k, v in run.spent.items() if k != "wall_s"}
    parts = [f"{name} {units.seconds(value)}" for name, value in known.items()]
    over = "; it ended before all was decided" if run.over_budget else ""
    detail = f": {', '.join(parts)}" if parts else ""
    budget = units.seconds(run.rules.budget_s)
    return f"{units.seconds(total_s(run))} of a budget of {budget}{over}{detail}"


def rounds(run: GateRun) -> str:
    """`20 rounds: 8 screening, 12 confirmation; 2 more vetoed`."""
    counted = [found.stage for found in run.rounds if found.veto is None]
    parts = [f"{counted.count(s)} {w}" for s, w in STAGES.items() if s in counted]
    vetoed = len(run.rounds) - len(counted)
    more = f"; {vetoed} more vetoed" if vetoed else ""
    kept = sum("not_vetoed" in found.facts for found in run.rounds)
    more += f"; {kept} of them disturbed, but counted" if kept else ""
    what = f"{len(counted)} round{'s' * (len(counted) != 1)}"
    return f"{what}{': ' if parts else ''}{', '.join(parts)}{more}"


def vetoes(run: GateRun) -> list[tuple[int, str]]:
    """The rounds that were disturbed, by number from 1, and by what: counted only where it says."""
    found = []
    for number, round_ in enumerate(run.rounds, start=1):
        if round_.veto is not None:
            found.append((number, flat(f"vetoed: {round_.veto}")))
        elif "not_vetoed" in round_.facts:
            found.append((number, flat(f"disturbed, but counted: {round_.facts['not_vetoed']}")))
    return found


def failures(run: GateRun) -> list[tuple[int, str, str]]:
    """Round, cell, and why the cell has no time in it."""
    _, names = labels(run.cells)
    return [
        (number, names[cell], flat(f"{failure.variant}: {failure}"))
        for number, found in enumerate(run.rounds, start=1)
        for cell, failure in found.failures.items()
    ]


def replay(file: Path) -> str:
    """The command that decides again."""
    return f"attnbench gate --replay {shlex.quote(flat(str(file)))}"
