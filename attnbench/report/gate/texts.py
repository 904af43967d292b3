"""The words of a gate run, the same on the terminal, in Markdown, in JUnit XML and on the page."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateCell, GateRun, Rules, Version
from attnbench.gate.decide.outcome import VERDICTS, Change, Outcome, Row, Verdict
from attnbench.gate.decide.verdict import missing
from attnbench.schema.record import Cell
from attnbench.theory.flags import profile_command
from attnbench.theory.traits import case_label

Element = Literal["failure", "error", "skipped"]


class Look(NamedTuple):
    """How a verdict is shown: its sign, its class in `page.css`, and its element in JUnit XML."""

    sign: str
    page: str
    element: Element | None = None


# What is open must not look like a pass; what cannot be compared is no fault of the candidate.
LOOKS: dict[Verdict, Look] = {
    "incorrect": Look("✗", "refuted", "failure"),
    "regressed": Look("✗", "refuted", "failure"),
    "inconclusive": Look("?", "inconclusive", "error"),
    "not timed": Look("–", "inconclusive", "skipped"),
    "not comparable": Look("–", "inconclusive", "skipped"),
    "improved": Look("↓", "holds"),
    "ok": Look("✓", "holds"),
}
# What stands before the conclusion, by how the run ends.
TITLES: dict[ExitCode, str] = {
    ExitCode.OK: "✓ passed: ",
    ExitCode.FINDING: "✗ failed: ",
    ExitCode.USAGE: "– ",
    ExitCode.INCONCLUSIVE: "? not passed: ",
    ExitCode.ENVIRONMENT: "! ",
}
HEADER = ("cell", "change", "95 % interval", "wins", "verdict")
READING = (
    "Change: candidate / base − 1 in the metric named; of time the median over rounds (above 0:"
    " slower), with its 95 % interval over rounds, of a suspect from its confirmation alone. Wins:"
    " rounds beyond the margin, of all that decide; of an ok cell those below the threshold."
)
_LIBRARIES = ("torch", "cuda", "driver", "python", "blas", "cpu_capability")  # said first
MOST_PROFILES = 3  # commands that are printed
MOST_DIFFERENCES = 8  # of environments, in one line
# What no page, XML file or terminal can show: control characters, halves of a pair, non-characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def flat(text: str) -> str:
    """The text on one line, without what XML and terminals cannot show."""
    return _UNPRINTABLE.sub("", " ".join(text.split()))


def change(ratio: float | None) -> str:
    """A ratio of times as the change it is: 1.104 is `+10.4 %`; unknown is `–`."""
    if ratio is None or not math.isfinite(ratio):
        return units.UNKNOWN
    share = 100 * (ratio - 1)
    text = f"{share:+.1f}" if abs(share) < 99.95 else f"{share:+.0f}"
    return f"{text} %".replace("-", "−") if float(text) else "0.0 %"


def changed(changes: Sequence[Change]) -> str:
    """The change that decides, with its metric: `time +10.4 %`, `workspace +100 %`, `error`."""
    if not changes:
        return units.UNKNOWN
    first = changes[0]
    return first.metric if first.ratio is None else f"{first.metric} {change(first.ratio)}"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval as changes: `+9.8 … +11.1 %`; unknown is `–`."""
    if low is None or high is None:
        return units.UNKNOWN
    return f"{change(low).removesuffix(' %')} … {change(high)}"


def case_words(cell: GateCell) -> str:
    """The case of a cell in short; a test has none."""
    return case_label(cell.case) if isinstance(cell, Cell) else ""


def labels(cells: Sequence[GateCell]) -> tuple[str, list[str]]:
    """What the cases of all cells have in common, and what tells each cell: `sdpa n=512`."""
    common, rest = units.split_common([case_words(cell) for cell in cells], keep="n=")
    own = [f"{cell.impl} {text}".rstrip() for cell, text in zip(cells, rest, strict=True)]
    named = [
        f"{text} ({cell.case.case_id})" if isinstance(cell, Cell) and own.count(text) > 1 else text
        for cell, text in zip(cells, own, strict=True)
    ]
    return common, [flat(text) for text in named]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A cell as every output shows it; `columns` are those of `HEADER`."""

    number: int
    row: Row
    look: Look
    columns: tuple[str, ...]
    reason: str
    notes: tuple[str, ...]


def lines(run: GateRun, outcome: Outcome) -> list[Line]:
    """All cells, the worst verdict first; of equal ones the slowest."""
    found = []
    for number, (name, row) in enumerate(zip(labels(run.cells)[1], outcome.rows, strict=True)):
        look = LOOKS[row.verdict]
        ends, wins = interval(row.low, row.high), f"{row.wins}/{row.rounds}"
        if row.changes != () and row.changes[0].metric != "time":  # they are not of that
            ends = wins = units.UNKNOWN
        wins = units.UNKNOWN if row.wins is None else wins
        shown = (name, changed(row.changes), ends, wins)
        found.append(
            Line(
                number=number, row=row, look=look, columns=(*shown, f"{look.sign} {row.verdict}"),
                reason=flat(row.reason), notes=tuple(map(flat, row.notes)),
            )
        )  # fmt: skip
    worst = {verdict: place for place, verdict in enumerate(VERDICTS)}
    return sorted(found, key=lambda line: (worst[line.row.verdict], -(line.row.ratio or 0.0)))


def reasons(shown: Iterable[Line]) -> list[tuple[str, str]]:
    """`✗ sdpa n=512`, and why: for all that is not ok, and all of which there is a note.

    Cells that share it are named together.
    """
    sharing: dict[tuple[str, str], list[str]] = {}
    for line in shown:
        own = [] if line.row.verdict == "ok" else [(line.look.sign, line.reason)]
        for key in (*own, *(("–", f"note: {note}") for note in line.notes)):
            sharing.setdefault(key, []).append(line.columns[0])
    return [(f"{sign} {', '.join(cells)}", why) for (sign, why), cells in sharing.items()]


def title(outcome: Outcome) -> str:
    """`✗ failed: 1 regressed`."""
    return TITLES[outcome.exit_code] + flat(outcome.words)


def versions(run: GateRun) -> list[str]:
    """What was held against what: `base: main (3f2a91c0d1)`; and if that is the same code."""
    found = [_version(run.base, run.candidate), _version(run.candidate, run.base)]
    if run.base.environment and run.candidate.environment:
        return found + environments(run)
    alike = ["every file that was loaded holds the same code in both versions"]
    return found + alike * bool(run.options.get("loaded_alike"))


def environments(run: GateRun) -> list[str]:
    """How two environments differ: in their libraries, then in what else is installed in them."""
    # Where both run in one interpreter, its facts were taken once.
    before = _installed(run.base_environment or run.environment, run.base)
    after = _installed(run.environment, run.candidate)
    differing = [n for n, value in before.items() if n in after and after[n] != value]
    words = [f"{n} {before[n]} → {after[n]}" for n in differing[:MOST_DIFFERENCES]]
    if (more := len(differing) - MOST_DIFFERENCES) > 0:
        words.append(f"{more} more packages")
    for own, other, whose in ((before, after, "base"), (after, before, "candidate")):
        if alone := len(own.keys() - other.keys()):
            words.append(f"only in the {whose}: {units.counted(alone, 'package')}")
    if not words:
        return ["both environments hold the same packages, of the same versions"]
    return [flat(f"the environments differ: {'; '.join(words)}")]


def _installed(facts: Mapping[str, Any], version: Version) -> dict[str, Any]:
    known = {name: facts[name] for name in _LIBRARIES if facts.get(name) is not None}
    packages = version.environment.packages if version.environment else {}
    return {**known, **{name: packages[name] for name in packages if name not in known}}


def _version(of: Version, other: Version) -> str:
    if of.environment is not None and of.ref is None and other.ref is None:
        return flat(f"{of.name}: {of.environment.label}")  # the code is the same
    commit = (of.commit or "")[:10]
    if of.ref is not None:
        named = commit.startswith(of.ref[:10])
        words = of.ref[:10] if named else f"{of.ref} ({commit})" if commit else of.ref
    else:
        words = f"the working tree at {commit}" if commit else f"the files in {of.root}"
    where = f"{of.environment.label}; " if of.environment else ""
    return flat(f"{of.name}: {where}{words}{', with uncommitted changes' if of.dirty else ''}")


def promise(rules: Rules) -> str:
    """What the run set out to find, and how often it may be wrong."""
    threshold, margin = units.brief_percent(rules.threshold), units.brief_percent(rules.margin)
    alpha = units.brief_percent(rules.alpha)
    return (
        f"A slowdown of {threshold} is found, or its cell stays open. What is slower by less than"
        f" the margin of {margin} is called a regression in at most {alpha} of runs, given"
        " independent rounds and a bias within the margin."
    )


def controls(run: GateRun, outcome: Outcome) -> list[str]:
    """What the positive control and the A/A control have shown."""
    found = outcome.controls
    planted = f"positive control (a slowdown of {units.brief_percent(run.rules.threshold)})"
    seen = f"seen as {change(found.planted_ratio)}, beyond the margin in {found.wins} of"
    words = {
        None: ": none, since no time was compared",
        True: f" was found: {seen} {found.rounds} rounds",
        False: f" was not found, so that passing says nothing: {missing(run, found)}",
    }[found.found]
    null = f"A/A control (the base again): {change(found.null_ratio)}"
    if found.untrusted:
        null += f"; not to be trusted: {flat(found.untrusted)}"
    return [planted + words, null]


def environment(run: GateRun) -> str:
    """The machine in one line: `AMD EPYC · 1 thread · torch 2.13.0`."""
    known = run.environment
    threads = known.get("threads")
    facts = [
        known.get("device_name") or known.get("device"),
        units.counted(threads, "thread") if threads else None,
        *(f"{name} {known[name]}" for name in ("torch", "attnbench") if known.get(name)),
        units.moment(run.created) if run.created else None,
    ]
    return flat(" · ".join(str(fact) for fact in facts if fact))


def total_s(run: GateRun) -> float:
    """Wall seconds of the whole run: as it says itself, or all its parts."""
    return run.spent.get("wall_s", sum(run.spent.values()))


def rounds(run: GateRun) -> str:
    """`20 rounds: 8 screening, 12 confirmation; 2 more discarded`."""
    stages = [found.stage for found in run.rounds if found.discarded is None]
    names = {"screen": "screening", "confirm": "confirmation"}
    parts = ", ".join(f"{stages.count(s)} {w}" for s, w in names.items() if s in stages)
    discarded = len(run.rounds) - len(stages)
    disturbed = sum("counted_despite" in found.facts for found in run.rounds)
    return (
        f"{units.counted(len(stages), 'round')}{': ' * bool(parts)}{parts}"
        + f"; {discarded} more discarded" * bool(discarded)
        + f"; {disturbed} of them disturbed, but counted" * bool(disturbed)
    )


def measured(run: GateRun) -> list[str]:
    """How many rounds there were, and how long the run took, by its parts."""
    parts = {k.removesuffix("_s"): v for k, v in run.spent.items() if k != "wall_s"}
    detail = ", ".join(f"{name} {units.seconds(value)}" for name, value in parts.items())
    over = "; it ended before all was decided" if run.over_budget else ""
    budget = f"of a budget of {units.seconds(run.rules.budget_s)}{over}"
    return [rounds(run), f"{units.seconds(total_s(run))} {budget}{': ' * bool(detail)}{detail}"]


def incidents(run: GateRun) -> list[str]:
    """The rounds that were discarded or disturbed, and the cells without a time in one, and why."""
    names, found = labels(run.cells)[1], []
    for number, seen in enumerate(run.rounds, start=1):
        if seen.discarded is not None:
            found.append(f"round {number}: discarded: {seen.discarded}")
        elif "counted_despite" in seen.facts:
            found.append(f"round {number}: disturbed, but counted: {seen.facts['counted_despite']}")
        for cell, why in seen.failures.items():
            found.append(f"round {number}: {names[cell]}: {why.process}: {why}")
    return [flat(text) for text in found]


def profiles(run: GateRun, outcome: Outcome) -> list[str]:
    """The commands that show which op makes the difference, of the cells that changed most."""
    own: list[str] = []
    if run.base.environment and run.candidate.environment:
        for version in (run.base, run.candidate):
            own += ["--python", version.environment.python] if version.environment else []
    elif run.base.commit:
        own += ["--base", run.base.commit[:12]]
        for file in run.candidate.files:
            own += ["--impl", os.path.relpath(file, run.candidate.root)]
    files = [["--impl", str(version.ref)] for version in (run.base, run.candidate)]
    changed = [
        row
        for row in outcome.rows
        if row.verdict in ("regressed", "improved") and row.ratio is not None
    ]
    changed.sort(key=lambda row: -abs(math.log(row.ratio or 1.0)))
    return [
        flat(f"{profile_command(row.cell.case, row.cell.impl)} {shlex.join(flags)}".rstrip())
        for row in changed[:MOST_PROFILES]
        for flags in (files if run.base.is_file else [own])
        if isinstance(row.cell, Cell)
    ]


def replay(file: Path) -> str:
    """The command that decides again."""
    return f"attnbench gate --replay {shlex.quote(flat(str(file)))}"
