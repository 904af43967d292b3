"""Tables as GitHub's Markdown writes them; the standard library alone."""

from __future__ import annotations

import re
from collections.abc import Sequence


def escape(text: str) -> str:
    """Make a text safe inside a table cell: no pipe, no line break, no HTML, no emphasis."""
    flat = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*_\[\]\\])", r"\\\1", flat)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a GitHub table; columns after the first `text_columns` are aligned right."""
    rule = ["---" if i < text_columns else "---:" for i in range(len(header))]
    lines = [list(map(escape, header)), rule, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
