"""The verdicts of a document as JUnit XML, for CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

from attnbench.errors import UsageError
from attnbench.report.document import Document, Sign
from attnbench.report.render import written

# What is open must not look like a pass; what cannot be compared is no fault of the candidate.
ELEMENTS: dict[Sign, str] = {"bad": "failure", "open": "error", "none": "skipped"}


def render(document: Document) -> str:
    """One suite, one test case a finding: bad ones are failures, open ones errors.

    What ends other than well by its exit code has a failure or an error: else the conclusion is
    one.

    Raises:
        UsageError: the document has no verdicts.
    """
    found = written.tests(document.sections)
    if not found and not document.conclusion.test:
        formats = "text, markdown, json, html"
        raise UsageError(f"--format junit: {document.kind} has no verdicts; formats: {formats}")
    suite_name = f"attnbench {document.kind}"
    root = ElementTree.Element("testsuites", {"name": suite_name})
    suite = ElementTree.SubElement(root, "testsuite", {"name": suite_name})
    if document.created:
        suite.set("timestamp", written.clean(document.created[:19]))
    facts = {name: value.number for name, value in document.facts.items()}
    end = {
        "exit_code": int(document.exit_code),
        "conclusion": written.conclusion(document.conclusion),
    }
    _add_properties(suite, (facts | end).items())
    if document.exit_code and not any(of.sign in ("bad", "open") for of in found.values()):
        found[suite_name, document.conclusion.subject] = document.conclusion
    for test, of in found.items():
        group, name = map(written.clean, test)
        case = ElementTree.SubElement(suite, "testcase", {"classname": group, "name": name})
        element = "error" if of is document.conclusion else ELEMENTS.get(of.sign)
        if of.sign == "open" and not document.exit_code:
            element = "skipped"  # the run passes all the same
        if element is not None:
            message = ": ".join(filter(None, [written.figures(of), written.words(of.reason)]))
            shown = {"type": written.clean(of.verdict), "message": message}
            ElementTree.SubElement(case, element, shown).text = message
        figures = [
            (name, number)
            for key, x in of.figures.items()
            for name, number in ((key, x.number), (f"{key}_low", x.low), (f"{key}_high", x.high))
            if number is not None
        ]
        notes = (("note", note) for note in of.notes)
        _add_properties(case, [("verdict", of.verdict), *figures, *notes])
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped", "tests": "testcase"}
    for each in (root, suite):
        for name, tag in tags.items():
            each.set(name, str(len(suite.findall(f".//{tag}"))))
        each.set("time", f"{document.spent_s or 0:.3f}")
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _add_properties(parent: ElementTree.Element, known: Iterable[tuple[str, Any]]) -> None:
    element = ElementTree.SubElement(parent, "properties")
    for name, value in known:
        text = f"{value:.6g}" if isinstance(value, float) else written.clean(str(value))
        ElementTree.SubElement(element, "property", {"name": written.clean(name), "value": text})
