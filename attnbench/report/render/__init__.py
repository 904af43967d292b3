"""Renderers of documents, one a format: `render(document)` returns its text."""

from __future__ import annotations

from importlib import import_module

from attnbench.report.document import Document

FORMATS = {
    "text": "terminal", "markdown": "markdown", "json": "json", "html": "html", "junit": "junit"
}  # fmt: skip


def rendered(document: Document, format_: str = "text") -> str:
    """The document in one of `FORMATS`.

    Raises:
        UsageError: JUnit XML of a document without verdicts.
    """
    module = import_module(f"{__name__}.{FORMATS[format_]}")
    return str(module.render(document))
