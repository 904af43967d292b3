"""What a gate run leaves: a table on the terminal, Markdown and JUnit XML beside its raw data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from rich.console import Console, RenderableType
from rich.text import Text

from attnbench.base.files import write_whole
from attnbench.base.units import escape, table
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateRun, Outcome, Row, Verdict
from attnbench.gate.decide.stored import NAME, drop_kept_rounds, write_gate
from attnbench.report import tables
from attnbench.report.gate import texts
from attnbench.theory.traits import case_label

SUMMARY = "GITHUB_STEP_SUMMARY"  # the variable that names the file
MOST_ROWS = 60  # a summary is cut off by its reader at a megabyte
LONGEST = 400  # letters of a reason
SUITE = "attnbench gate"
XML, MARKDOWN = "gate.xml", "gate.md"
_STYLES = {
    "incorrect": "bold red", "regressed": "bold red", "inconclusive": "yellow",
    "not comparable": "dim", "improved": "cyan", "ok": "green",
}  # fmt: skip


def terminal(
    run: GateRun, outcome: Outcome, folder: Path | None = None, to: Console | None = None
) -> str:
    """The table, the reasons, the controls and the conclusion, ready to print.

    `folder` is where the files are, if there are any; `to` is standard output unless given.
    """
    common, names = texts.labels(run.cells)
    rows: list[tuple[str | Text, ...]] = []
    for number, row in texts.worst_first(outcome.rows):
        sign, *parts, verdict = texts.texts(row, names[number])
        style = _STYLES[row.verdict]
        rows.append((Text(sign, style=style), *parts, Text(verdict, style=style)))
    head: list[RenderableType] = [
        tables.grid(texts.HEADER, rows, right=texts.HEADER[2:5], whole=texts.HEADER[2:]),
        Text(f"wins: {texts.WINS}", style="dim"),
    ]
    reasons = (
        Text.assemble((f"{texts.SIGNS[verdict]} {name}", _STYLES[verdict]), f": {why}")
        for verdict, name, why in texts.reasons(run, outcome)
    )
    facts = (
        f"all cells: {common}", *texts.sides(run), *texts.code(run),
        *texts.controls(run, outcome), texts.rounds(run), texts.spent(run),
    )  # fmt: skip
    colour = {0: "green", 1: "red"}.get(int(outcome.exit_code), "yellow")
    conclusion = f"{texts.title(outcome)} (exit code {int(outcome.exit_code)})"
    where = [] if folder is None else [
        Text(f"page:   {folder / 'gate.html'}", no_wrap=True),
        Text(f"replay: {texts.replay(folder / NAME)}", no_wrap=True),
    ]  # fmt: skip
    return tables.shown(
        *(head if outcome.rows else []), *reasons, *map(Text, facts),
        Text(conclusion, style=f"bold {colour}"), *where, to=to,
    )  # fmt: skip


def write_all(folder: Path, run: GateRun, outcome: Outcome) -> str | None:
    """Write gate.json, gate.xml, gate.md and gate.html, and append to $GITHUB_STEP_SUMMARY.

    The raw data come first. Returns why the summary cannot be appended to, if so.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report.gate.page import write_page  # matplotlib

    file = write_gate(folder, run, outcome)
    drop_kept_rounds(folder)
    write_whole(folder / XML, junit(run, outcome))
    text = markdown(run, outcome, file)
    write_whole(folder / MARKDOWN, text)
    warning = append_summary(text)
    write_page(folder, run, outcome)
    return warning


def markdown(run: GateRun, outcome: Outcome, file: Path) -> str:
    """Return the run in short: verdict, table, reasons, controls; details folded.

    `file` is where the raw data lie: its path stands in the command that decides again.
    """
    common, names = texts.labels(run.cells)
    rows = [texts.texts(row, names[i]) for i, row in texts.worst_first(outcome.rows)]
    blocks = [
        f"## attnbench gate: {escape(texts.title(outcome))}",
        escape(f"{'; '.join([*texts.sides(run), *texts.code(run)])}. {texts.counts(outcome)}."),
        escape(f"All cells: {common}.") if common else "",
        _table(rows),
        *_more(len(rows) - MOST_ROWS, "cells"),
        _reasons(run, outcome),
        _bullets(texts.controls(run, outcome)),
        _details(run),
        "Decide again from the raw data:",
        f"    {texts.replay(file)}",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def append_summary(text: str) -> str | None:
    """Append to the file that $GITHUB_STEP_SUMMARY names, if it is set; return what went wrong."""
    name = os.environ.get(SUMMARY)
    if not name:
        return None
    try:
        with open(name, "a", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
    except (OSError, ValueError) as err:
        why = getattr(err, "strerror", None) or err
        return f"cannot append to {texts.flat(name)}, which ${SUMMARY} names ({why})"
    return None


def _table(rows: list[tuple[str, ...]]) -> str:
    shown = [(cell, *numbers, f"{sign} {verdict}") for sign, cell, *numbers, verdict in rows]
    return table(texts.HEADER[1:], shown[:MOST_ROWS]) if shown else "No cells."


def _reasons(run: GateRun, outcome: Outcome) -> str:
    found = texts.reasons(run, outcome)
    lines = [
        f"{texts.SIGNS[verdict]} {name}: {_short(why)}" for verdict, name, why in found[:MOST_ROWS]
    ]
    return "\n\n".join([_bullets(lines), *_more(len(found) - MOST_ROWS, "reasons")]).strip()


def _details(run: GateRun) -> str:
    lines = [
        texts.promise(run.rules),
        texts.READING,
        texts.rounds(run),
        texts.spent(run),
        texts.environment(run),
        *(f"round {number} {_short(why)}" for number, why in texts.vetoes(run)[:20]),
    ]
    body = _bullets([line for line in lines if line])
    return f"<details><summary>How it was measured</summary>\n\n{body}\n\n</details>"


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _more(count: int, what: str) -> list[str]:
    return [f"… and {count} more {what} in gate.html"] if count > 0 else []


Element = Literal["failure", "error", "skipped"]
# What is open must not look like a pass; what cannot be compared is no fault of the candidate.
_ELEMENTS: dict[Verdict, Element] = {
    "incorrect": "failure",
    "regressed": "failure",
    "inconclusive": "error",
    "not comparable": "skipped",
}


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One test case; `kind` None is a pass."""

    classname: str
    name: str
    kind: Element | None
    type: str
    message: str
    properties: tuple[tuple[str, str], ...] = ()


def junit(run: GateRun, outcome: Outcome) -> str:
    """Return the XML: one suite, one test case a cell, one for each control.

    Regressed and incorrect cells are failures; inconclusive ones, and controls that failed, are
    errors; cells that cannot be compared are skipped. A run that compared nothing has an error.
    """
    cases = list(_cases(run, outcome))
    totals = {f"{kind}s" if kind != "skipped" else kind: str(sum(c.kind == kind for c in cases))
              for kind in ("failure", "error", "skipped")}  # fmt: skip
    numbers = {"tests": str(len(cases)), **totals, "time": f"{texts.total_s(run):.3f}"}
    root = ElementTree.Element("testsuites", {"name": SUITE, **numbers})
    stamp = {"timestamp": texts.clean(run.created[:19])} if run.created else {}
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **numbers, **stamp})
    _add_properties(suite, tuple(_facts(run, outcome)))
    for case in cases:
        _add_case(suite, case)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _facts(run: GateRun, outcome: Outcome) -> Iterator[tuple[str, str]]:
    for name, text in zip(("base", "candidate"), texts.sides(run), strict=True):
        yield name, text.removeprefix(f"{name}: ")
    yield "threshold", f"{run.rules.threshold:.6g}"
    yield "margin", f"{run.rules.margin:.6g}"
    yield "alpha", f"{run.rules.alpha:.6g}"
    yield "rounds", texts.rounds(run)
    yield "environment", texts.environment(run)
    yield "exit_code", str(int(outcome.exit_code))
    yield "conclusion", texts.title(outcome)


def _cases(run: GateRun, outcome: Outcome) -> Iterator[_Case]:
    for row in outcome.rows:
        yield _cell(row)
    yield from _controls(run, outcome)
    if outcome.exit_code == ExitCode.USAGE:  # all were skipped: that must not look like a pass
        yield _Case(
            classname=SUITE, name="something is comparable", kind="error", type="not comparable",
            message=texts.flat(outcome.words),
        )  # fmt: skip


def _cell(row: Row) -> _Case:
    known: list[tuple[str, str]] = [("verdict", row.verdict)]
    known += [
        (name, f"{value:.6g}")
        for name, value in (("ratio", row.ratio), ("low", row.low), ("high", row.high))
        if value is not None
    ]
    if row.wins is not None:
        known += [("wins", str(row.wins)), ("rounds", str(row.rounds))]
    known += [("note", note) for note in row.notes]
    measured = f"{texts.change(row.ratio)} ({texts.interval(row.low, row.high)}): "
    return _Case(
        classname=row.cell.impl,
        name=case_label(row.cell.case),
        kind=_ELEMENTS.get(row.verdict),
        type=row.verdict,
        message=(measured if row.ratio is not None else "") + texts.flat(row.reason),
        properties=tuple(known),
    )


def _controls(run: GateRun, outcome: Outcome) -> Iterator[_Case]:
    found = outcome.controls
    failed = (("positive control", found.found is False, "blind"),
              ("A/A control", bool(found.untrusted), "untrusted"))  # fmt: skip
    timed: Element | None = "skipped" if found.found is None else None
    for (name, bad, type_), message in zip(failed, texts.controls(run, outcome), strict=True):
        yield _Case(
            classname=SUITE, name=name, kind="error" if bad else timed,
            type=type_ if bad else "not comparable", message=message,
        )  # fmt: skip


def _add_case(suite: ElementTree.Element, case: _Case) -> None:
    names = {"classname": texts.flat(case.classname), "name": texts.flat(case.name)}
    element = ElementTree.SubElement(suite, "testcase", names)
    _add_properties(element, case.properties)
    if case.kind == "skipped":
        ElementTree.SubElement(element, "skipped", {"message": case.message})
    elif case.kind is not None:
        attributes = {"type": case.type, "message": case.message}
        ElementTree.SubElement(element, case.kind, attributes).text = case.message


def _add_properties(parent: ElementTree.Element, known: tuple[tuple[str, str], ...]) -> None:
    if not known:
        return
    element = ElementTree.SubElement(parent, "properties")
    for name, value in known:
        ElementTree.SubElement(element, "property", {"name": name, "value": texts.flat(value)})
