"""report.md: the short version, to paste into a pull request."""

from __future__ import annotations

from attnbench.analysis.axes import label, slices, varying
from attnbench.analysis.highlights import SLICE, SUMMARY, hardest_case, summary_rows
from attnbench.base.units import escape, table
from attnbench.report import scaling
from attnbench.report.content import Content

MOST_FAILURES = 20
MOST_VERDICTS, MOST_CROSSINGS = 60, 20


def render(content: Content) -> str:
    """Return the run in short: sentences, the hardest case of each slice, what failed, the time."""
    blocks = [
        f"## attnbench: {escape(content.run.run_id)}",
        escape(" · ".join(content.facts())),
        "\n".join(f"- {escape(sentence)}" for sentence in content.sentences()),
        *_hardest(content),
        *_growth(content),
        *_limits(content),
        *_failures(content),
        *_spent(content),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _hardest(content: Content) -> list[str]:
    blocks = []
    headers = [column.header for _, column in SUMMARY.items()]
    for values, rows in slices(content.cells, SLICE):
        case = hardest_case(rows)
        if case.empty:
            continue
        names = [name for name in varying(rows) if name not in SLICE]
        title = " ".join(
            [*(str(value) for value in values.values()), label(case.iloc[0], names or ["seq_len"])]
        )
        lines = [[row[name] for name in SUMMARY.names()] for row in summary_rows(case)]
        blocks += [f"### {escape(title)}", table(headers, lines)]
    return blocks


def _growth(content: Content) -> list[str]:
    """Verdicts, the refuted first, and where the lead changes."""
    if not scaling.anything(content.scaling, content.crossovers):
        return []
    found = scaling.verdicts(content.scaling)
    rows = [row.texts for row in found if not row.goes_without_saying]
    blocks = ["### How cost grows"]
    if found:
        blocks.append(f"Verdicts on declared laws: {scaling.counts(content.scaling)}.")
    if len(rows) < len(found):
        blocks.append(
            f"Of these, {len(found) - len(rows)} are FLOPs and workspace that are as predicted and"
            " grow as declared (in report.html); the others are:"
        )
    if rows:
        blocks += [
            table(scaling.HEADERS, rows[:MOST_VERDICTS], text_columns=len(scaling.HEADERS)),
            *_more(len(rows) - MOST_VERDICTS, "verdicts"),
        ]
    tables, left_out = scaling.crossover_tables(content.crossovers)
    pairs = [[part.same, *row] for part in tables for row in part.rows]
    crossing = [c for c in content.crossovers if c.outcome == "crosses"]
    if not pairs:
        return blocks
    header = scaling.CROSSOVER_HEADERS
    return [
        *blocks,
        f"Crossovers: the lead changes in {len(crossing)} of {len(content.crossovers)} pairs.",
        table(header, pairs[:MOST_CROSSINGS], text_columns=len(header)),
        *_more(len(pairs) - MOST_CROSSINGS + left_out, "pairs"),
    ]


def _more(count: int, what: str) -> list[str]:
    return [f"… and {count} more {what} in report.html"] if count > 0 else []


def _limits(content: Content) -> list[str]:
    rows = [[row["limit"], row["measured"], row["datasheet"]] for row in content.limits()]
    if not rows:
        return []
    return ["### Limits measured in this run", table(["limit", "measured", "datasheet"], rows)]


def _failures(content: Content) -> list[str]:
    rows = content.failures()
    if not rows:
        return []
    header = ["status", "implementation", "cells", "n", "reason"]
    lines = [[r["status"], r["impl"], r["cells"], r["n"], r["reason"]] for r in rows]
    blocks = ["### Cells without a result", table(header, lines[:MOST_FAILURES], text_columns=5)]
    more = len(lines) - MOST_FAILURES
    return [*blocks, f"… and {more} more reasons in report.html"] if more > 0 else blocks


def _spent(content: Content) -> list[str]:
    rows = [[row["stage"], row["time"], row["share"]] for row in content.spent()]
    return ["### Wall time", table(["stage", "time", "share"], rows)] if rows else []
