"""What a gate run leaves: a table on the terminal; page, Markdown and JUnit beside its raw data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from rich.console import Console, RenderableType
from rich.text import Text

from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.base.units import escape, table
from attnbench.errors import ExitCode, StoreError
from attnbench.gate.decide.data import Checked, GateRun, Outcome, Row, Verdict
from attnbench.gate.decide.stored import NAME, drop_kept_rounds, load_gate, write_gate
from attnbench.gate.decide.verdict import decide
from attnbench.report import tables
from attnbench.report.gate import texts
from attnbench.report.tables import LIMITS, value_text
from attnbench.theory.traits import case_label

SUMMARY = "GITHUB_STEP_SUMMARY"  # the variable that names the file
MOST_ROWS = 60  # a summary is cut off by its reader at a megabyte
LONGEST = 400  # letters of a reason
SUITE = "attnbench gate"
XML, MARKDOWN, PAGE = "gate.xml", "gate.md", "gate.html"
PLOTS = "plots"
MOST_METRICS, MOST_DISTURBED = 400, 200  # rows of the page's tables
_LOOKS: dict[Verdict, str] = {  # how a verdict looks, as `page.css` calls it
    "incorrect": "refuted", "regressed": "refuted", "inconclusive": "inconclusive",
    "not comparable": "inconclusive", "improved": "holds", "ok": "holds",
}  # fmt: skip
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


def junit(run: GateRun, outcome: Outcome) -> str:
    """Return the XML: one suite, one test case a cell, one for each control.

    Regressed and incorrect cells are failures; inconclusive ones, and controls that failed, are
    errors; cells that cannot be compared are skipped. A run that compared nothing has an error.
    """
    root = ElementTree.Element("testsuites", {"name": SUITE})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE})
    if run.created:
        suite.set("timestamp", texts.clean(run.created[:19]))
    sides = texts.sides(run)
    facts = {
        **{name: text.removeprefix(f"{name}: ")
           for name, text in zip(("base", "candidate"), sides, strict=True)},
        **{name: f"{getattr(run.rules, name):.6g}" for name in ("threshold", "margin", "alpha")},
        "rounds": texts.rounds(run),
        "environment": texts.environment(run),
        "exit_code": str(int(outcome.exit_code)),
        "conclusion": texts.title(outcome),
    }  # fmt: skip
    _add_properties(suite, facts.items())
    for row in outcome.rows:
        _add_cell(suite, row)
    found = outcome.controls
    shown = texts.controls(run, outcome)
    timed: Element | None = "skipped" if found.found is None else None
    blind, untrusted = found.found is False, bool(found.untrusted)
    _add_case(suite, SUITE, "positive control", "error" if blind else timed, "blind", shown[0])
    _add_case(suite, SUITE, "A/A control", "error" if untrusted else timed, "untrusted", shown[1])
    if outcome.exit_code == ExitCode.USAGE:  # all were skipped: that must not look like a pass
        words = texts.flat(outcome.words)
        _add_case(suite, SUITE, "something is comparable", "error", "not comparable", words)
    names = {"failures": "failure", "errors": "error", "skipped": "skipped", "tests": "testcase"}
    for element in (root, suite):
        for name, tag in names.items():
            element.set(name, str(len(suite.findall(f".//{tag}"))))
        element.set("time", f"{texts.total_s(run):.3f}")
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _add_cell(suite: ElementTree.Element, row: Row) -> None:
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
    message = (measured if row.ratio is not None else "") + texts.flat(row.reason)
    impl, label, element = row.cell.impl, case_label(row.cell.case), _ELEMENTS.get(row.verdict)
    _add_properties(_add_case(suite, impl, label, element, row.verdict, message), known)


def _add_case(
    suite: ElementTree.Element, classname: str, name: str, element: Element | None, type_: str,
    message: str,
) -> ElementTree.Element:  # fmt: skip
    """Add one test case; without an `element` it passed."""
    names = {"classname": texts.flat(classname), "name": texts.flat(name)}
    case = ElementTree.SubElement(suite, "testcase", names)
    if element == "skipped":
        ElementTree.SubElement(case, element, {"message": message})
    elif element is not None:
        attributes = {"type": type_, "message": message}
        ElementTree.SubElement(case, element, attributes).text = message
    return case


def _add_properties(parent: ElementTree.Element, known: Iterable[tuple[str, str]]) -> None:
    element = ElementTree.SubElement(parent, "properties")
    for name, value in known:
        ElementTree.SubElement(element, "property", {"name": name, "value": texts.flat(value)})


def redraw(folder: Path) -> Path:
    """Decide again from the raw data in a gate run's folder, and draw its page.

    Raises:
        StoreError: there is no gate run, it is damaged, or the folder cannot be written.
    """
    run = load_gate(folder)
    return write_page(folder, run, decide(run))


def write_page(folder: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write gate.html and its figures (plots/gate-rounds-*) into a gate run's folder.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report import pages  # matplotlib
    from attnbench.report.gate import figure

    try:
        plots = figure.draw_all(run, outcome, folder / PLOTS)
        groups = pages.plot_groups(plots)
    except OSError as err:
        raise StoreError(f"cannot write a report into {folder} ({err.strerror})") from err
    common, names = texts.labels(run.cells)
    metrics = _metrics(run, names)
    disturbed = texts.vetoes(run)
    bad = (outcome.controls.found is False, bool(outcome.controls.untrusted))
    values = {
        "plots": groups,
        "replay": texts.replay(folder / NAME),
        "title": texts.title(outcome),
        "exit_code": int(outcome.exit_code),
        "counts": texts.counts(outcome),
        "sides": [*texts.sides(run), *texts.code(run)],
        "files": [(side.name, texts.flat(file)) for side in (run.base, run.candidate)
                  for file in side.files],
        "facts": texts.environment(run),
        "common": common,
        "header": texts.HEADER[1:],
        "reading": texts.READING,
        "rows": [
            {
                "texts": texts.texts(row, f"{texts.SIGNS[row.verdict]} {names[number]}")[1:-1],
                "mark": texts.mark(row.verdict),
                "look": _LOOKS[row.verdict],
                "reason": texts.flat(row.reason),
                "notes": [texts.flat(note) for note in row.notes],
            }
            for number, row in texts.worst_first(outcome.rows)
        ],
        "controls": list(zip(texts.controls(run, outcome), bad, strict=True)),
        "promise": texts.promise(run.rules),
        "metrics": [row for row in metrics if row["differs"]],
        "same_metrics": [row for row in metrics if not row["differs"]][:MOST_METRICS],
        "rounds": texts.rounds(run),
        "disturbed": disturbed[:MOST_DISTURBED],
        "failures": texts.failures(run)[:MOST_DISTURBED],
        "spent": texts.spent(run),
        "environment": _known_values(run.environment),
        "options": _known_values(run.options),
    }  # fmt: skip
    write_whole(folder / PAGE, pages.template("gate.html.jinja").render(values))
    return folder / PAGE


def _metrics(run: GateRun, names: list[str]) -> list[dict[str, Any]]:
    """What repeats exactly, on both sides, cell by cell."""
    found = []
    for number, both in run.checks.items():
        sides = [_known(both.get(side)) for side in ("base", "candidate")]
        right = all(side["status"] == "ok" for side in sides)
        for name in dict.fromkeys([*sides[0], *sides[1]]) if right else ("status",):
            base, candidate = (_metric(name, side.get(name)) for side in sides)
            found.append(
                {"cell": names[number], "metric": name, "base": base, "candidate": candidate,
                 "differs": base != candidate}
            )  # fmt: skip
    return found


def _known(checked: Checked | None) -> dict[str, Any]:
    if checked is None:
        return {"status": "absent"}
    status = checked.status + (f": {checked.reason}" if checked.reason else "")
    return {"status": status, **checked.metrics}


def _metric(name: str, value: Any) -> str:
    if type(value) in (int, float) and not name.endswith("_bytes"):
        return units.digits(value) if type(value) is float else units.count(value)
    exact = f" ({units.count(value)})" if type(value) is int and value >= 1024 else ""
    return texts.flat(value_text(name, value)) + exact


def _known_values(known: Mapping[str, Any]) -> dict[str, str]:
    return {
        texts.flat(name): texts.flat(value_text(name, value))
        for name, value in known.items()
        if name not in LIMITS
    }
