"""Documents as files beside the data that they are of, and in the summary of a CI job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnbench.base.files import write_whole
from attnbench.errors import StoreError
from attnbench.gate.decide.data import GateRun
from attnbench.gate.decide.outcome import Outcome
from attnbench.gate.decide.stored import write_gate
from attnbench.report.document import Document
from attnbench.report.documents import gate
from attnbench.report.render import html, rendered

SUFFIXES = {"junit": ".xml", "markdown": ".md", "html": ".html"}
PLOTS = "plots"
SUMMARY = "GITHUB_STEP_SUMMARY"  # the variable that names the file
MOST_BYTES = 900_000  # of a summary: beyond 1 MiB GitHub shows none of it


def write_files(
    folder: Path, document: Document, formats: Sequence[str] = ("markdown", "html")
) -> tuple[Document, list[str]]:
    """Write the document into an existing folder, a file a format.

    Returns it with the path of its page as the first of its commands, and what went wrong: a figure
    that cannot be drawn, on the page, hides no verdict.

    Raises:
        StoreError: the folder cannot be written.
    """
    failed: list[str] = []
    for name in formats:
        try:
            if name == "html":
                text = html.render(document, folder / PLOTS, failed)
            else:
                text = rendered(document, name)
            write_whole(folder / f"{document.kind}{SUFFIXES[name]}", text)
        except OSError as err:
            raise StoreError(f"cannot write {folder} ({err.strerror})") from err
    page = "page", str(folder / f"{document.kind}{SUFFIXES['html']}")
    return replace(document, commands=[page, *document.commands]), failed


def append_summary(document: Document) -> str | None:
    """Append the Markdown to the file that $GITHUB_STEP_SUMMARY names; why it cannot be."""
    if not (name := os.environ.get(SUMMARY)):
        return None
    data = rendered(document, "markdown").encode(errors="replace")
    if len(data) > MOST_BYTES:
        more = f"\n\n… more in {document.kind}.html\n"
        data = data[:MOST_BYTES].rpartition(b"\n")[0] + more.encode()
    try:
        with open(name, "ab") as summary:
            summary.write(data + b"\n")
    except OSError as err:
        return f"cannot append to {name}, which ${SUMMARY} names ({err.strerror})"
    return None


def write_gate_files(folder: Path, run: GateRun, outcome: Outcome) -> tuple[Document, list[str]]:
    """Write gate.json, .xml, .md and .html, and append to $GITHUB_STEP_SUMMARY.

    The raw data come first. Returns the document, and what else cannot be written or drawn.

    Raises:
        StoreError: the folder cannot be written.
    """
    found = gate.document(run, outcome, write_gate(folder, run, outcome))
    summary = append_summary(found)
    found, warnings = write_files(folder, found, ("junit", "markdown", "html"))
    return found, [summary, *warnings] if summary else warnings
