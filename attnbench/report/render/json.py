"""A document as JSON: figures as numbers in named units, verdicts as words of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from attnbench.report import document as doc
from attnbench.report.render import written
from attnbench.version import __version__

SCHEMA = 1  # raised where a field changes its meaning or goes


def render(document: doc.Document) -> str:
    """The text, in ASCII."""
    head = {"kind": f"attnbench {document.kind}", "schema": SCHEMA, "attnbench": __version__}
    found = head | {
        "exit_code": int(document.exit_code), "created": document.created or None,
        "spent_s": document.spent_s, "about": plain(document.about),
        "conclusion": plain(document.conclusion), "facts": plain(document.facts),
        "sections": plain(document.sections),
        "commands": [{"label": label, "command": text} for label, text in document.commands],
    }  # fmt: skip
    return json.dumps(found, indent=1) + "\n"


def plain(of: Any) -> Any:
    """A part as JSON has it: texts without units are texts, numbers are objects."""
    match of:
        case doc.Value(number=number, unit="text" | "impl", of=""):
            return _finite(number)
        case doc.Value():
            unit = {"change": "ratio"}.get(of.unit, of.unit.removeprefix("delta_"))
            known = {"value": of.number, "unit": unit, "low": of.low, "high": of.high}
            known |= {"of": of.of or None, "mark": of.mark.strip() or None}
            return {k: _finite(v) for k, v in known.items() if k == "value" or v is not None}
        case doc.Sentence():
            return {"text": written.words(of), "figures": plain(of.figures)}
        case doc.Finding():
            keys = ("verdict", "sign", "subject", "reason", "figures", "notes")
            return {k: plain(v) for k in keys if (v := getattr(of, k)) or k in keys[:3]}
        case doc.Table():
            rows = ({k: plain(v) for k, v in zip(of.columns, row, strict=True)} for row in of.rows)
            return {"table": list(rows)}
        case doc.Text():
            return {"text": plain(of.lines)}
        case doc.Figure():
            return {"figure": of.title}
        case doc.Section():
            return {"section": of.title, "parts": plain(of.parts)}
        case Mapping():
            return {name: plain(value) for name, value in of.items()}
        case list() | tuple():
            return [plain(item) for item in of if not isinstance(item, doc.Section) or item.parts]
    return of


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
