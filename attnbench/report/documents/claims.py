"""Claims held against a run: what each says, what was measured, whether that was expected."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from attnbench.analysis.claims.judging import Judged, agrees, exit_code
from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.report import document as doc
from attnbench.schema.finding import VERDICTS
from attnbench.store.runs import Run

COLUMNS = {
    "claim": "claim", "says": "what is claimed", "where": "where", "measured": "measured",
    "verdict": "verdict", "expected": "expected", "agrees": "", "relation": "",
}  # fmt: skip
SIGNS: dict[ExitCode, doc.Sign] = {ExitCode.OK: "good", ExitCode.FINDING: "bad"}


def document(found: Judged, run: Run) -> doc.Document:
    """A row for each claim; what is right where a statement is not."""
    code = exit_code(found)
    against = ", ".join(claim.id for claim, finding in found if not agrees(claim, finding))
    return doc.Document(
        kind="claims", exit_code=code,
        conclusion=doc.Finding(
            sign=SIGNS.get(code, "open"), subject=run.run_id,
            verdict=f"not as expected: {against}" if against else "as expected",
            reason=units.tally((finding.verdict for _, finding in found), VERDICTS),
        ),
        sections=[
            doc.Section("Claims", [
                doc.Table(columns=COLUMNS, rows=list(_rows(found)), spare=("where", "expected"))
            ]),
            doc.Section("What is right", [doc.Text(list(_notes(found)))]),
        ],
        commands=[("run", str(run.path)),
                  ("report", f"attnbench report {shlex.quote(str(run.path))}")],
    )  # fmt: skip


def _rows(found: Judged) -> Iterator[list[doc.Cell]]:
    for claim, its in found:
        sign: doc.Sign = "good" if agrees(claim, its) else "bad"
        verdict = doc.Finding(
            sign="open" if its.verdict == "inconclusive" else sign,
            verdict=its.verdict + ", as expected" * (its.verdict == claim.expected == "refuted"),
            subject=claim.id, reason=its.reason, figures=doc.numbers(its.figures),
            test=(claim.source, claim.id),
        )  # fmt: skip
        where, expected = f"{claim.source} · {claim.place}", claim.expected or "either"
        yield [claim.id, claim.says, where, its.reason, verdict, expected,
               doc.Value(sign == "good"), claim.relation.text]  # fmt: skip


def _notes(found: Judged) -> Iterator[str]:
    for claim, _ in found:
        if claim.right or claim.note:
            read_as = f" (read as: {claim.reading})" if claim.reading else ""
            what = "right is" if claim.right else "note"
            yield f"{claim.id}, {what}: {claim.right or claim.note}{read_as}"
