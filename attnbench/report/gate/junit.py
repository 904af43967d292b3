"""A gate run as JUnit XML, which CI systems show beside a project's tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateRun, Outcome, Row, Verdict
from attnbench.report.gate import texts
from attnbench.theory.traits import case_label

SUITE = "attnbench gate"
Kind = Literal["failure", "error", "skipped"]
# What is open must not look like a pass; what cannot be compared is no fault of the candidate.
_KINDS: dict[Verdict, Kind] = {
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
    kind: Kind | None
    type: str
    message: str
    properties: tuple[tuple[str, str], ...] = ()


def render(run: GateRun, outcome: Outcome) -> str:
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
    for side, said in zip(("base", "candidate"), texts.sides(run), strict=True):
        yield side, said.removeprefix(f"{side}: ")
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
        kind=_KINDS.get(row.verdict),
        type=row.verdict,
        message=(measured if row.ratio is not None else "") + texts.flat(row.reason),
        properties=tuple(known),
    )


def _controls(run: GateRun, outcome: Outcome) -> Iterator[_Case]:
    found, said = outcome.controls, texts.controls(run, outcome)
    timed: Kind | None = "skipped" if found.found is None else None
    kind: Kind | None = "error" if found.found is False else timed
    yield _Case(
        classname=SUITE, name="planted slowdown is found", kind=kind,
        type="blind" if kind == "error" else "not comparable", message=said[0],
    )  # fmt: skip
    kind = "error" if found.untrusted else timed
    yield _Case(
        classname=SUITE, name="base against itself", kind=kind,
        type="untrusted" if kind == "error" else "not comparable", message=said[1],
    )  # fmt: skip


def _add_case(suite: ElementTree.Element, case: _Case) -> None:
    names = {"classname": texts.flat(case.classname), "name": texts.flat(case.name)}
    element = ElementTree.SubElement(suite, "testcase", names)
    _add_properties(element, case.properties)
    if case.kind == "skipped":
        ElementTree.SubElement(element, "skipped", {"message": case.message})
    elif case.kind is not None:
        said = {"type": case.type, "message": case.message}
        ElementTree.SubElement(element, case.kind, said).text = case.message


def _add_properties(parent: ElementTree.Element, known: tuple[tuple[str, str], ...]) -> None:
    if not known:
        return
    element = ElementTree.SubElement(parent, "properties")
    for name, value in known:
        ElementTree.SubElement(element, "property", {"name": name, "value": texts.flat(value)})
