"""How many calls of a program went to what was advised for them, and why others did not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnbench.base.units import counted
from attnbench.report import document as doc


def document(stats: Mapping[str, Any], code: int, *, dry: bool) -> doc.Document:
    """What `stats` of `attnbench.use` says; `code` is how the program exited."""
    hits, names = sum(stats["hits"].values()), ("hits", "misses", "fallbacks")
    total, did = sum(sum(stats[name].values()) for name in names), "would go" if dry else "went"
    table = doc.Table(
        columns={"calls": "calls", "to": "to", "what": "case or reason"},
        rows=[
            (doc.Value(count, "count"), to, what)
            for name, to in zip(names, ("advised", "original", "fallback"), strict=True)
            for what, count in sorted(stats[name].items(), key=lambda item: -item[1])
        ],
        most=24,
    )
    return doc.Document(
        kind="use", exit_code=code or (0 if hits else 2),
        conclusion=doc.Finding(
            sign="none", verdict=f"{hits} of {counted(total, 'call')}", subject="attention",
            reason=doc.sentence(
                f"{did} to what was advised; checks took {{time}}",
                time=doc.Value(1e6 * stats["check_s"], "us"),
            ),
        ),
        sections=[doc.Section("", [table])],
    )  # fmt: skip
