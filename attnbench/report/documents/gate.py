"""What a gate run found: verdicts on cells, controls, what was measured, and how."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateCell, GateRun, Version
from attnbench.gate.decide.outcome import VERDICTS, Outcome, Row, Verdict
from attnbench.gate.decide.verdict import missing
from attnbench.machine.environment import asked
from attnbench.report import document as doc
from attnbench.report.labels import case_words, labels
from attnbench.schema.record import Cell as MeasuredCell
from attnbench.theory.flags import profile_command
from attnbench.theory.traits import TRAITS

SIGNS: dict[Verdict, doc.Sign] = {
    "incorrect": "bad", "regressed": "bad", "larger": "bad", "inconclusive": "open",
    "not timed": "none", "not comparable": "none", "improved": "better", "ok": "good",
}  # fmt: skip
COLUMNS = {
    "impl": "", "case_id": "", "cell": "cell", "change": "change", "wins": "wins",
    "rounds": "", "verdict": "verdict",
}  # fmt: skip
READING = (
    "Change: candidate / base − 1; for time the median over rounds, with its 95 % interval (for"
    " suspects, only the confirmation rounds count). Wins: of a suspect, rounds slower than the"
    " margin; of an ok cell, rounds below the threshold."
)
PROMISE = (
    "A slowdown of {threshold} is detected, or its cell stays inconclusive. Code that is slower by"
    " less than the margin of {margin} is called a regression in at most {alpha} of runs, if rounds"
    " are independent and their bias is within the margin."
)
FORWARD = "only the forward pass was compared: --passes both has the backward, too"
SUITE = "attnbench gate"
MOST_PROFILES = 3  # commands that are printed
MOST_NAMED = 3  # cells in the first line
MOST_DIFFERENCES = 8  # of environments, in one line
_Named = Sequence[tuple[int, str, Row]]  # cells with numbers and names


def document(run: GateRun, outcome: Outcome, file: Path | None = None) -> doc.Document:
    """All of a run; `file` is where its raw data lie, if it is stored."""
    common, names = labels(run.cells)
    rows = ordered(run, outcome)
    found = [finding(name, row) for _, name, row in rows]
    table = doc.Table(
        columns=COLUMNS, cut="cell",
        rows=[(
            row.cell.impl, row.cell.case.case_id if isinstance(row.cell, MeasuredCell) else "",
            name, changed(row), wins(row), doc.Value(row.rounds), of,
        ) for (_, name, row), of in zip(rows, found, strict=True)],
    )  # fmt: skip
    figure = doc.Figure(title="A dot for every round", draw="rounds.draw_all", of=(run, outcome))
    pairs = (run.base, run.candidate), (run.candidate, run.base)
    versions = {of.name: _version(of, other) for of, other in pairs}
    promised = "threshold", "margin", "alpha"
    shares = {name: doc.Value(getattr(run.rules, name), "share") for name in promised}
    count = units.counted(len(rows), "cell")
    counts = units.tally((row.verdict for row in outcome.rows), VERDICTS)
    commands = [("why", line) for line in profiles(run, outcome)]
    if file is not None:
        commands.insert(0, ("replay", f"attnbench gate --replay {shlex.quote(str(file))}"))
    return doc.Document(
        kind="gate", conclusion=_conclusion(outcome, rows), exit_code=outcome.exit_code,
        about=[
            *(f"{name}: {words}" for name, words in versions.items()), *filter(None, [_alike(run)]),
            doc.sentence("{count}, {common}: {counts}", count=count, common=common, counts=counts)
            if common else f"{count}: {counts}",
            *[FORWARD] * _forward_alone(run.cells), *_measured(run),
        ],
        created=run.created, spent_s=_total_s(run) or None, commands=commands,
        facts={
            **{name: doc.Value(words) for name, words in versions.items()},
            **shares, "rounds": doc.Value(sum(of.discarded is None for of in run.rounds)),
            "environment": doc.Value(_machine(run)),
        },
        sections=[
            doc.Section("Cells", [
                table, doc.Text([READING], quiet=True),
                *(replace(of, reason="") if of.sign == "good" else of for of in found),
            ] if rows else []),
            doc.Section("Rounds", [figure] if run.rounds else []),
            doc.Section("Controls", list(_controls(run, outcome))),
            doc.Section("Counts and memory", folded=True, parts=list(_exact(run, names))),
            doc.Section("How it was measured", folded=True, parts=[
                doc.Text([doc.sentence(PROMISE, **shares), *_incidents(run, names), *(
                    f"{of.name}: {f}" for of in (run.base, run.candidate) for f in of.files)]),
                doc.Section("Environment", folded=True, parts=[doc.facts(run.environment)]),
                doc.Section("Options", folded=True, parts=[doc.facts(run.options)]),
            ]),
        ],
    )  # fmt: skip


def ordered(run: GateRun, outcome: Outcome) -> _Named:
    """The cells with numbers and names, the worst verdict first; of equal ones the slowest."""
    rows = zip(range(len(run.cells)), labels(run.cells)[1], outcome.rows, strict=True)
    return sorted(rows, key=lambda of: (VERDICTS.index(of[2].verdict), -(of[2].ratio or 0.0)))


def _against(words: str, rows: _Named) -> doc.Sentence:
    """`1 regressed: naive n=512 time +10.4 %`: the words, and how the worst cells changed."""
    bad = [(name, row) for _, name, row in rows if SIGNS[row.verdict] == "bad"]
    named: dict[str, Any] = {"words": words}
    for i, (name, row) in enumerate(bad[:MOST_NAMED]):
        named |= {f"name{i}": name, f"change{i}": changed(row)}
    cells = "; ".join(f"{{name{i}}} {{change{i}}}" for i in range(len(named) // 2))
    more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    return doc.sentence("{words}" + ": " * bool(cells) + cells + more, **named)


def _conclusion(outcome: Outcome, rows: _Named) -> doc.Finding:
    words: dict[ExitCode, tuple[doc.Sign, str, doc.Words]] = {
        ExitCode.OK: ("good", "passed", outcome.words),
        ExitCode.FINDING: ("bad", "failed", _against(outcome.words, rows)),
        ExitCode.USAGE: ("none", outcome.words, ""),
        ExitCode.INCONCLUSIVE: ("open", "not passed", outcome.words),
        ExitCode.ENVIRONMENT: ("open", "not to be trusted", outcome.controls.untrusted or ""),
    }
    sign, verdict, reason = words[outcome.exit_code]
    end = "the run"
    return doc.Finding(sign=sign, verdict=verdict, subject=end, reason=reason, test=(SUITE, end))


def finding(name: str, row: Row) -> doc.Finding:
    """The verdict on a cell."""
    of = "time" * bool(row.trade)  # what has grown stands next to it
    figures = {"ratio": doc.Value(row.ratio, "change", row.low, row.high, of)}
    grown = {c.metric: c.ratio for c in row.changes if c.metric != "time" and c.ratio is not None}
    figures |= {metric: doc.Value(ratio, "change") for metric, ratio in grown.items()}
    if row.wins is not None:
        figures |= {"wins": doc.Value(row.wins), "rounds": doc.Value(row.rounds)}
    group, _, test = row.cell.impl.partition("::")  # of the node id of a test
    return doc.Finding(
        sign=SIGNS[row.verdict], verdict=row.verdict, subject=name, reason=row.reason,
        test=(group, test or case_words(row.cell)), figures=figures, notes=row.notes,
    )  # fmt: skip


def changed(row: Row) -> doc.Value:
    """The change that decides, with its metric and, of times, its interval; or the metric alone."""
    if not row.changes:
        return doc.Value(None, "change")
    first = row.changes[0]
    low, high = (row.low, row.high) if first.metric == "time" else (None, None)
    mark = f", {row.trade}" * bool(row.trade)
    return doc.Value(first.ratio, "change", low, high, first.metric, mark)


def wins(row: Row) -> doc.Value:
    """`8/8`, of a verdict on times; else unknown."""
    timed = not row.changes or row.changes[0].metric == "time"
    return doc.Value(row.wins if timed else None, mark=f"/{row.rounds}")


def _controls(run: GateRun, outcome: Outcome) -> Iterator[doc.Finding]:
    """What the positive control and the A/A control have shown."""
    found, name = outcome.controls, "positive control"
    signs: dict[bool | None, tuple[doc.Sign, str, str]] = {
        None: ("none", "not timed", ""),
        True: ("good", "found", "was found: seen as {seen}, beyond the margin in {wins} of {rounds}"
               " rounds"),
        False: ("open", "not found", "was not found, so a pass would say nothing: {missing}"),
    }  # fmt: skip
    sign, verdict, text = signs[found.found]
    untimed, threshold = "no time was compared", doc.Value(run.rules.threshold, "share")
    reason = doc.sentence(
        "a slowdown of {threshold} " + text if text else untimed, threshold=threshold,
        seen=doc.Value(found.planted_ratio, "change"), wins=doc.Value(found.wins),
        rounds=doc.Value(found.rounds), missing=missing(run, found) if found.found is False else "",
    )  # fmt: skip
    yield doc.Finding(sign=sign, verdict=verdict, subject=name, reason=reason, test=(SUITE, name))
    name, text = "A/A control", "the base against itself: {null}"
    sign, verdict = "good", "quiet"
    if found.null_ratio is None:
        sign, verdict, text = "none", "not timed", untimed
    if found.untrusted:
        sign, verdict, text = "open", "untrusted", text + "; not to be trusted: {why}"
    null = doc.Value(found.null_ratio, "change")
    reason = doc.sentence(text, null=null, why=found.untrusted or "")
    yield doc.Finding(sign=sign, verdict=verdict, subject=name, reason=reason, test=(SUITE, name))


def _alike(run: GateRun) -> str:
    """How two environments differ, libraries first; else whether the code is the same."""
    if not (run.base.environment and run.candidate.environment):
        same = "every file that was loaded holds the same code in both versions"
        return same * bool(run.options.get("loaded_alike"))
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
        return "both environments hold the same packages, of the same versions"
    return f"the environments differ: {'; '.join(words)}"


def _installed(known: Mapping[str, Any], version: Version) -> dict[str, Any]:
    found = {name: known[name] for name in asked("library") if known.get(name) is not None}
    packages = version.environment.packages if version.environment else {}
    return {**found, **{name: packages[name] for name in packages if name not in found}}


def _forward_alone(cells: Sequence[GateCell]) -> bool:
    """Whether all are forward passes of what could be differentiated; of tests nothing is said."""
    cases = [cell.case for cell in cells if isinstance(cell, MeasuredCell)]
    could = any(len(TRAITS.get(case.workload).passes) > 1 for case in cases)
    return could and {case.pass_ for case in cases} == {"forward"}


def _version(of: Version, other: Version) -> str:
    if of.environment is not None and of.ref is None and other.ref is None:
        return of.environment.label  # the code is the same
    commit = (of.commit or "")[:10]
    if of.ref is not None:
        named = commit.startswith(of.ref[:10])
        words = of.ref[:10] if named else f"{of.ref} ({commit})" if commit else of.ref
    else:
        words = f"the working tree at {commit}" if commit else f"the files in {of.root}"
    where = f"{of.environment.label}; " if of.environment else ""
    changes = of.changes or "with uncommitted changes" * of.dirty
    return f"{where}{words}{', ' * bool(changes)}{changes}"


def _machine(run: GateRun) -> str:
    """The machine in one line: `AMD EPYC · 1 thread · torch 2.13.0`."""
    known = run.environment
    threads = known.get("threads")
    words = [
        known.get("device_name") or known.get("device"),
        units.counted(threads, "thread") if threads else None,
        *(f"{name} {known[name]}" for name in ("torch", "attnbench") if known.get(name)),
        units.moment(run.created) if run.created else None,
    ]
    return " · ".join(str(word) for word in words if word)


def _total_s(run: GateRun) -> float:
    """Wall seconds of the whole run: as it says itself, or all its parts."""
    return run.spent.get("wall_s", sum(run.spent.values()))


def _rounds(run: GateRun) -> str:
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


def _measured(run: GateRun) -> list[doc.Words]:
    """The machine, how many rounds there were, and how long the run took, by its parts."""
    parts = {k.removesuffix("_s"): v for k, v in run.spent.items() if k != "wall_s"}
    text = "{count}; " + ("{total} of a budget of {budget}" if run.spent else "interrupted")
    text += "; it ended before all was decided" * run.over_budget
    text += ": " * bool(parts) + ", ".join(f"{name} {{{name}}}" for name in parts)
    seconds = {"total": _total_s(run), "budget": run.rules.budget_s, **parts}
    known = {name: doc.Value(value, "s") for name, value in seconds.items()}
    return [_machine(run), doc.sentence(text, count=_rounds(run), **known)]


def _incidents(run: GateRun, names: Sequence[str]) -> Iterator[str]:
    """The rounds that were discarded or disturbed, and the cells without a time in one, and why."""
    for number, seen in enumerate(run.rounds, start=1):
        if seen.discarded is not None:
            yield f"round {number}: discarded: {seen.discarded}"
        elif "counted_despite" in seen.facts:
            yield f"round {number}: disturbed, but counted: {seen.facts['counted_despite']}"
        for cell, why in seen.failures.items():
            yield f"round {number}: {names[cell]}: {why.process}: {why}"


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
    elif run.base.is_file:
        own = ["--impl", str(run.candidate.ref), "--against", str(run.base.ref)]
    rows = [
        row
        for row in outcome.rows
        if row.verdict in ("regressed", "larger", "improved") and row.ratio is not None
    ]
    rows.sort(key=lambda row: -abs(math.log(row.ratio or 1.0)))
    return [
        f"{profile_command(row.cell.case, row.cell.impl)} {shlex.join(own)}".rstrip()
        for row in rows[:MOST_PROFILES]
        if isinstance(row.cell, MeasuredCell)
    ]


def _exact(run: GateRun, names: Sequence[str]) -> Iterator[doc.Part]:
    """What repeats exactly, of both versions; of a cell that failed its status alone."""
    differing: list[tuple[doc.Cell, ...]] = []
    alike: list[tuple[doc.Cell, ...]] = []
    for number, name in enumerate(names):
        both = [run.checks[number]["base"], run.checks[number]["candidate"]]
        known: list[dict[str, Any]] = [
            {"status": f"{of.status}: {of.reason}" if of.reason else of.status, **of.metrics}
            for of in both
        ]
        right = all(of.status == "ok" for of in both)
        for metric in dict.fromkeys([*known[0], *known[1]]) if right else ("status",):
            base, candidate = (of.get(metric) for of in known)
            row = (name, metric, _exactly(base), _exactly(candidate))
            (alike if base == candidate else differing).append(row)
    columns = {"cell": "cell", "metric": "what", "base": "base", "candidate": "candidate"}
    yield doc.Text(
        lines=["What repeats exactly is compared without statistics; each cell was checked and"
               " counted once in each version."], quiet=True,
    )  # fmt: skip
    yield doc.Table(columns=columns, rows=differing)
    if not differing:
        yield doc.Text(["Nothing differs between the versions."])
    if alike:
        rows = [doc.Table(columns=columns, rows=alike)]
        yield doc.Section("The same in both versions", rows, folded=True)


def _exactly(value: Any) -> doc.Value:
    units_: dict[type, doc.Unit] = {int: "count", float: "number"}
    unit = units_.get(type(value), "text")
    return doc.Value(value if unit != "text" or value is None else str(value), unit=unit)
