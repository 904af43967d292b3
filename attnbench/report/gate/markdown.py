"""A gate run in short, for a pull request: `gate.md`, and the summary of a CI job."""

from __future__ import annotations

import os
from pathlib import Path

from attnbench.base.units import escape, table
from attnbench.gate.decide.data import GateRun, Outcome
from attnbench.report.gate import texts

SUMMARY = "GITHUB_STEP_SUMMARY"  # the variable that names the file
MOST_ROWS = 60  # a summary is cut off by its reader at a megabyte
LONGEST = 400  # letters of a reason


def render(run: GateRun, outcome: Outcome, file: Path) -> str:
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
