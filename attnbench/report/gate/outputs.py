"""What a gate run leaves: a table on the terminal; page, Markdown and JUnit beside its raw data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console, RenderableType
from rich.text import Text

from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.base.units import bullets, escape, table
from attnbench.errors import ExitCode, StoreError
from attnbench.gate.decide.data import GateRun
from attnbench.gate.decide.outcome import VERDICTS, Outcome
from attnbench.gate.decide.stored import NAME, write_gate
from attnbench.report import tables
from attnbench.report.gate import texts
from attnbench.report.parts import STYLES
from attnbench.report.tables import value_text, value_texts

SUMMARY = "GITHUB_STEP_SUMMARY"  # the variable that names the file
MOST_BYTES = 900_000  # of a summary: beyond 1 MiB GitHub shows none of it
SUITE = "attnbench gate"
XML, MARKDOWN, PAGE, PLOTS = "gate.xml", "gate.md", "gate.html", "plots"


def terminal(
    run: GateRun, outcome: Outcome, folder: Path | None = None, to: Console | None = None
) -> str:
    """The table, the reasons, the controls and the conclusion, ready to print.

    `folder` is where the files are, if there are any; `to` is standard output unless given.
    """
    shown = texts.lines(run, outcome)
    rows: list[tuple[str | Text, ...]] = [
        (*line.columns[:-1], Text(line.columns[-1], style=STYLES[line.look.sign])) for line in shown
    ]
    head: list[RenderableType] = [
        tables.grid(texts.HEADER, rows, right=texts.HEADER[1:4], whole=texts.HEADER[1:], to=to),
        Text(texts.READING, style="dim"),
    ]
    reasons = (
        Text.assemble((cells, STYLES[cells[0]]), f": {why}") for cells, why in texts.reasons(shown)
    )
    common = [f"all cells: {words}"] if (words := texts.labels(run.cells)[0]) else []
    facts = (*common, *texts.versions(run), *texts.controls(run, outcome), *texts.measured(run))
    colour = {0: "green", 1: "red"}.get(int(outcome.exit_code), "yellow")
    conclusion = f"{texts.title(outcome)} (exit code {int(outcome.exit_code)})"
    where = [] if folder is None else [
        Text(f"page:   {folder / PAGE}", no_wrap=True),
        Text(f"replay: {texts.replay(folder / NAME)}", no_wrap=True),
    ]  # fmt: skip
    where += [Text(f"why:    {line}", no_wrap=True) for line in texts.profiles(run, outcome)]
    return tables.shown(
        *(head if rows else []), *reasons, *map(Text, facts),
        Text(conclusion, style=f"bold {colour}"), *where, to=to,
    )  # fmt: skip


def write_all(folder: Path, run: GateRun, outcome: Outcome) -> str | None:
    """Write gate.json, gate.xml, gate.md and gate.html, and append to $GITHUB_STEP_SUMMARY.

    The raw data come first. Returns why the summary cannot be appended to, or the page not drawn.

    Raises:
        StoreError: the folder cannot be written.
    """
    file = write_gate(folder, run, outcome)
    write_whole(folder / XML, junit(run, outcome))
    text, warning = markdown(run, outcome, file), None
    write_whole(folder / MARKDOWN, text)
    if name := os.environ.get(SUMMARY):
        try:
            data = text.encode(errors="replace")
            if len(data) > MOST_BYTES:
                data = data[:MOST_BYTES].rpartition(b"\n")[0] + f"\n\n… more in {PAGE}\n".encode()
            with open(name, "ab") as summary:
                summary.write(data + b"\n")
        except OSError as err:
            warning = f"cannot append to {name}, which ${SUMMARY} names ({err.strerror})"
    try:
        write_page(folder, run, outcome)
    except StoreError:
        raise
    except Exception as err:  # what cannot be drawn hides no verdict
        why = f"{PAGE} cannot be drawn ({type(err).__name__}: {err!s:.200})"
        warning = f"{warning}; {why}" if warning else why
    return warning


def markdown(run: GateRun, outcome: Outcome, file: Path) -> str:
    """Return the run in short: verdict, table, reasons, controls; details folded.

    `file` is where the raw data lie: its path stands in the command that decides again.
    """
    shown = texts.lines(run, outcome)
    reasons = [f"{cells}: {why}" for cells, why in texts.reasons(shown)]
    common = texts.labels(run.cells)[0]
    details = [
        texts.promise(run.rules), texts.READING, *texts.measured(run), texts.environment(run),
        *texts.incidents(run),
    ]  # fmt: skip
    blocks = [
        f"## attnbench gate: {escape(texts.title(outcome))}",
        escape(f"{'; '.join(texts.versions(run))}. {_counts(outcome)}."),
        escape(f"All cells: {common}.") if common else "",
        table(texts.HEADER, [line.columns for line in shown]) if shown else "No cells.",
        bullets(reasons),
        bullets(texts.controls(run, outcome)),
        "<details><summary>How it was measured</summary>",
        bullets(details),
        "</details>",
        "Decide again from the raw data:",
        f"    {texts.replay(file)}",
        *(["Which op makes the difference:"] if (why := texts.profiles(run, outcome)) else []),
        "\n".join(f"    {line}" for line in why),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _counts(outcome: Outcome) -> str:
    return units.tally((row.verdict for row in outcome.rows), VERDICTS)


def junit(run: GateRun, outcome: Outcome) -> str:
    """Return the XML: one suite, one test case a cell, one for each control.

    Regressed and incorrect cells are failures; inconclusive ones, and controls that failed, are
    errors; cells that cannot be compared are skipped. A run that compared nothing has an error.
    """
    root = ElementTree.Element("testsuites", {"name": SUITE})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE})
    if run.created:
        suite.set("timestamp", texts.flat(run.created[:19]))
    versions = (text.split(": ", 1) for text in texts.versions(run)[:2])
    promises = ((name, getattr(run.rules, name)) for name in ("threshold", "margin", "alpha"))
    _add_properties(
        suite, *versions, *promises,
        ("rounds", texts.rounds(run)), ("environment", texts.environment(run)),
        ("exit_code", int(outcome.exit_code)), ("conclusion", texts.title(outcome)),
    )  # fmt: skip
    for line in texts.lines(run, outcome):
        row, message = line.row, line.reason
        change, ends = line.columns[1:3]
        if ends != units.UNKNOWN:
            message = f"{change} ({ends}): {message}"
        what = line.look.element, row.verdict, message
        case = _add_case(suite, row.cell.impl, texts.case_words(row.cell), *what)
        values = {name: getattr(row, name) for name in ("ratio", "low", "high", "wins")}
        values["rounds"] = None if row.wins is None else row.rounds
        known = ((name, value) for name, value in values.items() if value is not None)
        notes = (("note", note) for note in row.notes)
        _add_properties(case, ("verdict", row.verdict), *known, *notes)
    found, shown = outcome.controls, texts.controls(run, outcome)
    timed: texts.Element | None = "skipped" if found.found is None else None
    planted: texts.Element | None = "error" if found.found is False else timed
    _add_case(suite, SUITE, "positive control", planted, "blind", shown[0])
    null: texts.Element | None = "error" if found.untrusted else timed
    _add_case(suite, SUITE, "A/A control", null, "untrusted", shown[1])
    if outcome.exit_code == ExitCode.USAGE:  # all were skipped: that must not look like a pass
        name = "something is comparable"
        _add_case(suite, SUITE, name, "error", "not comparable", texts.flat(outcome.words))
    names = {"failures": "failure", "errors": "error", "skipped": "skipped", "tests": "testcase"}
    for element in (root, suite):
        for name, tag in names.items():
            element.set(name, str(len(suite.findall(f".//{tag}"))))
        element.set("time", f"{texts.total_s(run):.3f}")
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _add_case(
    suite: ElementTree.Element, classname: str, name: str, element: texts.Element | None,
    type_: str, message: str,
) -> ElementTree.Element:  # fmt: skip
    """Add one test case; without an `element` it passed."""
    names = {"classname": texts.flat(classname), "name": texts.flat(name)}
    case = ElementTree.SubElement(suite, "testcase", names)
    if element is not None:
        ElementTree.SubElement(case, element, {"type": type_, "message": message}).text = message
    return case


def _add_properties(parent: ElementTree.Element, *known: Iterable[Any]) -> None:
    element = ElementTree.SubElement(parent, "properties")
    for name, value in known:
        text = f"{value:.6g}" if isinstance(value, float) else texts.flat(str(value))
        ElementTree.SubElement(element, "property", {"name": name, "value": text})


def write_page(folder: Path, run: GateRun, outcome: Outcome) -> Path:
    """Write gate.html and its figures (plots/gate-rounds-*) into a gate run's folder.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report import pages  # matplotlib
    from attnbench.report.gate import figure

    with pages.writing(folder):
        values = {
            "run": run,
            "outcome": outcome,
            "texts": texts,
            "plots": pages.plot_groups(figure.draw_all(run, outcome, folder / PLOTS)),
            "replay": texts.replay(folder / NAME),
            "counts": _counts(outcome),
            "metrics": list(_metrics(run)),
            "environment": _known_values(run.environment),
            "options": _known_values(run.options),
        }
        write_whole(folder / PAGE, pages.template("gate.html.jinja").render(values))
    return folder / PAGE


def _metrics(run: GateRun) -> Iterator[dict[str, Any]]:
    """What repeats exactly, of both versions; of a cell that failed its status alone."""
    for number, cell in enumerate(texts.labels(run.cells)[1]):
        both = [run.checks[number]["base"], run.checks[number]["candidate"]]
        known: list[dict[str, Any]] = [
            {"status": f"{of.status}: {of.reason}" if of.reason else of.status} | of.metrics
            for of in both
        ]
        right = all(of.status == "ok" for of in both)
        for metric in dict.fromkeys([*known[0], *known[1]]) if right else ("status",):
            base, candidate = (_metric(metric, of.get(metric)) for of in known)
            yield {
                "cell": cell, "metric": metric, "base": base, "candidate": candidate,
                "differs": base != candidate,
            }  # fmt: skip


def _metric(name: str, value: Any) -> str:
    if type(value) is not int:
        return units.digits(value) if type(value) is float else texts.flat(value_text(name, value))
    exact = units.count(value)
    return f"{units.size(value)} ({exact})" if name.endswith("_bytes") and value > 1023 else exact


def _known_values(known: Mapping[str, Any]) -> dict[str, str]:
    return {texts.flat(k): texts.flat(text) for k, text in value_texts(known).items()}
