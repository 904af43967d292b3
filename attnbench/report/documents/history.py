"""What a history of runs found: steps in the times of cells, and what came along with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnbench.analysis.history.series import VERDICTS, Found, Line, Series, Verdict
from attnbench.analysis.history.steps import FEWEST
from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.report import document as doc
from attnbench.report.labels import shortened

SIGNS: dict[Verdict, doc.Sign] = {
    "regression": "bad", "improvement": "better", "suspicious": "open", "no change": "good",
    "insufficient data": "none",
}  # fmt: skip
PANELS = 24  # lines of a machine that are drawn
READING = (
    "Changes common to all cells of a run, or of a group measured interleaved, have their own line;"
    " a cell's line is what is left. Stored runs cannot tell a change of the code from one of the"
    " machine: attnbench gate can."
)
SUSPICIOUS = (
    "few runs: too few on one side of the step, so far",
    "environment: the environment changed at the same place (its number below)",
    "together: other cells moved at the same place, which may be the machine",
)
PICTURES = (
    "A dot is a run, in the order of time; a bar the level between two steps; what lies off the"
    " scale is drawn at its edge. Coloured lines are steps: regression red, improvement blue,"
    " suspicious yellow. Dashed lines are changes of the environment, by their number above."
)
STEP = {"since": "since", "change": "change", "runs": "runs before | after", "runs_after": ""}


def document(machines: Sequence[Series]) -> doc.Document:
    """All machines; the exit code is 0 whatever is found."""
    verdicts = [[line.verdict for line in of.lines if line.kind == "cell"] for of in machines]
    found = [verdict for own in verdicts for verdict in own]
    sections = [list(_sections(series)) for series in machines]
    if len(machines) > 1:
        sections = [[
            doc.Section(f"{_heading(series)}: {units.tally(own, VERDICTS)}", parts)
            for series, own, parts in zip(machines, verdicts, sections, strict=True)
        ]]  # fmt: skip
    return doc.Document(
        kind="history", exit_code=ExitCode.OK,
        conclusion=doc.Finding(
            sign=next((SIGNS[of] for of in VERDICTS if of in found), "none"),
            verdict=units.tally(found, VERDICTS), subject="the history",
            reason=f"a cell needs {FEWEST} runs on one machine"
            if "insufficient data" in found else "",
        ),
        about=[_heading(series) for series in machines], sections=sections[0],
    )  # fmt: skip


def _sections(series: Series) -> list[doc.Section]:
    names = _names(series)
    steps = [(line, one) for line in series.lines for one in line.found]
    steps.sort(key=lambda pair: -abs(pair[1].step.log))
    sure: list[Sequence[doc.Cell]] = []
    suspicious: list[Sequence[doc.Cell]] = []
    for line, one in steps:
        if one.verdict == "suspicious":
            number = f" {series.marks.index(one.mark) + 1}" if one.mark else ""
            why = ", ".join(word + number * (word == "environment") for word in one.why)
            suspicious.append((names[line], why, *_step(series, one)))
        else:
            verdict = doc.Finding(sign=SIGNS[one.verdict], verdict=one.verdict, subject=names[line])
            sure.append((names[line], verdict, *_step(series, one)))
    marks = [
        doc.Section(f"{number}: {_place(series, mark.at)}", [doc.Text(doc.changes(mark.facts))])
        for number, mark in enumerate(series.marks, start=1)
    ]
    cells = []
    for line in (line for line in series.lines if line.kind == "cell"):
        impl, _, case = line.name.partition(" ")
        verdict = doc.Finding(
            sign=SIGNS[line.verdict], verdict=line.verdict, subject=names[line],
            reason=_steps(series, line), test=(impl, case),
        )  # fmt: skip
        cells.append((names[line], verdict))
    drawn = sorted(series.lines, key=lambda line: line.kind != "run")[:PANELS]
    left_out = len(series.lines) - len(drawn)
    reading = PICTURES + f" {left_out} more lines are not drawn." * bool(left_out)
    of = [(line, SIGNS[line.verdict], names[line], _steps(series, line)) for line in drawn]
    picture = series, of, reading
    figure = doc.Figure(title="What changed most", draw="panels.draw_all", of=picture)
    tables = [
        doc.Table(columns={"cell": "cell", "verdict": "verdict"} | STEP, rows=sure, most=20),
        doc.Table(columns={"cell": "cell", "why": "why"} | STEP, rows=suspicious, most=8),
        doc.Table(columns={"cell": "cell", "verdict": "verdict"}, rows=cells),
    ]
    title = "Changed" if sure else "No step is certain"
    return [
        doc.Section(title, [doc.Text([READING], quiet=True), tables[0]]),
        doc.Section("Suspicious", [doc.Text(SUSPICIOUS, quiet=True), tables[1]] * bool(suspicious)),
        doc.Section("Changes of the environment", marks),
        doc.Section(figure.title, [figure]),
        doc.Section(f"All cells ({len(cells)})", tables[2:], folded=True),
    ]


def _step(series: Series, found: Found) -> tuple[doc.Cell, ...]:
    step, place = found.step, _place(series, found.at)
    runs = doc.Value(step.before, mark=f"|{step.after}"), doc.Value(step.after)
    return place, doc.Value(math.exp(step.log), "change"), *runs


def _steps(series: Series, line: Line) -> doc.Sentence:
    """`+31.4 % since 2026-11-23 quick-20`, of each step."""
    text = ", ".join(f"{{{i}}} since {{at{i}}}" for i in range(len(line.found)))
    known: dict[str, doc.Value] = {}
    for i, of in enumerate(line.found):
        known |= {
            f"{i}": doc.Value(math.exp(of.step.log), "change"),
            f"at{i}": doc.Value(_place(series, of.at)),
        }
    return doc.sentence(text, **known)


def _place(series: Series, at: int) -> str:
    """The day of a run, and its commit, or its name where that is unknown."""
    run = series.runs[at]
    dirty = "+" if run.dirty else ""
    return f"{run.when:%Y-%m-%d} {run.commit[:7] + dirty if run.commit else run.run}"


def _names(series: Series) -> dict[Line, str]:
    """The names of lines without the words that all cells share."""
    cells = [line for line in series.lines if line.kind == "cell"]
    common, own = shortened([line.name for line in cells])
    names = dict(zip(cells, own, strict=True))
    for line in series.lines:
        if line.kind != "cell":
            words = " ".join(w for w in line.name.split() if w not in common.split())
            names[line] = f"all cells of {words or 'one group'}" if line.kind == "group" else words
    return names


def _heading(series: Series) -> str:
    first, last = series.runs[0], series.runs[-1]
    device, name, cores = last.machine
    count = units.counted(len(series.runs), "run")
    where = f"{name} ({device}, {cores} cores)"
    return f"{count} on {where}, {first.when:%Y-%m-%d %H:%M} to {last.when:%Y-%m-%d %H:%M}"
