"""Laws held against a run: how cost grows, what is refuted, and what keeps the rest open."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from attnbench.analysis.notes import keeping, remedy
from attnbench.analysis.scaling.results import ExactFit, Scaling, Uncertain
from attnbench.analysis.table import load
from attnbench.base.units import tally
from attnbench.errors import ExitCode
from attnbench.report import document as doc
from attnbench.report.growth import SIGNS, raised
from attnbench.schema.finding import COSTS, VERDICTS, WORST_FIRST, LawFinding, Verdict, exit_code
from attnbench.store.runs import Run

ENDS: dict[ExitCode, tuple[doc.Sign, str]] = {
    ExitCode.OK: ("good", "nothing is refuted"), ExitCode.FINDING: ("bad", "refuted"),
    ExitCode.INCONCLUSIVE: ("open", "inconclusive"),
}  # fmt: skip
HOLD = {"holds": "hold"}  # of several
MOST = 400  # rows of a table
MEASURED = (
    "Measured is the exponent of the times; of several series the median and the range. Of counts"
    " and workspace it is the ratio to the prediction, the one furthest from 1. Of a model of"
    " several terms it is the error at the largest n, which is not fitted."
)
SUMMARY = {
    "series": "series", "question": "question", "law": "law", "measured": "measured",
    "verdict": "verdicts",
}  # fmt: skip
COLUMNS = {
    "subject": "series", "question": "question", "law": "law", "measured": "measured",
    "top": "last two doublings", "verdict": "verdict",
    **dict.fromkeys(("impl", "workload", "quantity", "axis"), ""),
}  # fmt: skip
_Row = tuple[LawFinding, doc.Value, Uncertain | None]


def document(
    found: Scaling, run: Run, *, strict: bool = False, every: bool = False
) -> doc.Document:
    """All findings; `every` also shows what holds, and why, where details are folded."""
    code = exit_code(found.findings, strict=strict)
    (sign, verdict), where = ENDS[code], shlex.quote(str(run.path))
    return doc.Document(
        kind="verify", exit_code=code, created=run.info.get("created") or "",
        conclusion=doc.Finding(
            sign=sign, verdict=verdict, subject=run.run_id, reason=_counts(found.findings)
        ),
        sections=[doc.Section("How cost grows", list(laws(found, every=every)))],
        commands=[("run", str(run.path)), *decisive(found, run), *_kept(found, run),
                  ("plots", f"attnbench report {where}"), ("each", f"attnbench verify {where} -v")],
    )  # fmt: skip


def _kept(found: Scaling, run: Run) -> list[tuple[str, str]]:
    """The command that measures without page faults, where they hide sizes of an open law."""
    hidden = {
        fit.series.impl
        for fit in found.exponents
        if fit.finding and fit.finding.verdict == "inconclusive" and fit.hidden
    }
    frame = load(run) if hidden else None
    return [] if frame is None else [("keep", keeping(run, frame[frame["impl"].isin(hidden)]))]


def decisive(found: Scaling, run: Run) -> list[tuple[str, str]]:
    """The command that measures all sizes of open laws for longer, if that could decide them."""
    if not found.missing:
        return []
    frame, cells = load(run), found.missing
    impls, workloads = {cell.impl for cell in cells}, {cell.case.workload for cell in cells}
    command = remedy(run, frame[frame["impl"].isin(impls) & frame["workload"].isin(workloads)])
    return [("decide", command)] if command else []


def _counts(found: Sequence[LawFinding]) -> str:
    """`flops 48 hold; time 5 hold, 43 inconclusive`."""
    of: dict[str, list[str]] = {name: [] for name in (*COSTS, "run")}
    for one in found:
        of[one.quantity or "run"].append(HOLD.get(one.verdict, one.verdict))
    words = [HOLD.get(verdict, verdict) for verdict in VERDICTS]
    return "; ".join(f"{name} {tally(own, words)}" for name, own in of.items() if own)


def laws(found: Scaling, *, every: bool = False) -> Iterator[doc.Part]:
    """A row for each law of an implementation; the series that it was asked of are folded."""
    rows = sorted(_rows(found), key=lambda row: WORST_FIRST.index(row[0].verdict))
    exact = [fit.finding for fit in found.exact]
    as_predicted = {id(one) for one in exact if one and one.verdict == "holds"}
    held = [row for row in rows if id(row[0]) in as_predicted]
    others = [row for row in rows if id(row[0]) not in as_predicted]
    asked: dict[tuple[str, ...], list[_Row]] = {}
    for row in others:
        of = row[0]
        name = f"{of.impl}, {of.workload}" if of.impl else of.subject
        asked.setdefault((name, of.question, of.law), []).append(row)
    summary = [_summary(own, *key) for key, own in asked.items()]
    yield doc.Table(columns=SUMMARY, rows=summary, intervals={"measured": "range"}, most=MOST)
    notes: list[doc.Words] = [MEASURED]
    if held:
        notes.append(f"{len(held)} series of FLOPs and workspace are as predicted.")
    if left_out := max(0, len(others) - MOST) + max(0, len(held) - MOST):
        notes.append(f"{left_out} series are not shown here.")
    yield doc.Text(notes, quiet=True)
    # Of what is open one of each kind: the others differ in their figures.
    firsts = [own[0] for own in asked.values() if own[0][0].verdict != "holds"]
    refuted = [row for row in others if row[0].verdict == "refuted"]
    yield from map(_finding, {id(row[0]): row for row in (*refuted, *firsts)}.values())
    yield doc.Section(
        "Every series", [_table(others[:MOST]), *map(_finding, others)], folded=not every
    )
    if held:
        title = "FLOPs and workspace as predicted"
        yield doc.Section(title, [_table(held[:MOST])], folded=not every)


def _summary(rows: Sequence[_Row], name: str, question: str, law: str) -> Sequence[doc.Cell]:
    """The law, the median of what was measured with the least and the largest, and the verdicts."""
    verdicts = [of.verdict for of, *_ in rows]
    sign: doc.Sign = SIGNS[min(verdicts, key=("refuted", "inconclusive", "holds").index)]
    telling: Verdict = "refuted" if "refuted" in verdicts else "holds"
    count = f"{verdicts.count(telling)} of {len(rows)} {HOLD.get(telling, telling)}"
    count = count if telling in verdicts else f"{len(rows)} inconclusive"
    verdict = doc.Finding(sign=sign, verdict=count if len(rows) > 1 else verdicts[0], subject=name)
    seen = sorted(x for _, value, _ in rows if isinstance(x := value.number, float) and x == x)
    middle = rows[0][1]
    if len(seen) > 1:
        middle = doc.Value(seen[len(seen) // 2], middle.unit, seen[0], seen[-1], mark=middle.mark)
    return name, question, raised(law), middle, verdict


def _rows(found: Scaling) -> Iterator[_Row]:
    """Every finding, what was measured, and the slope over the largest octave."""
    yield from ((finding, doc.Value(None), None) for finding in found.problems)
    for fit in found.exponents:
        if fit.finding:
            seen = fit.exponent or Uncertain(value=math.nan)  # shown as unknown
            yield fit.finding, doc.Value(seen.value, "exponent", seen.low, seen.high), fit.top
    for model in found.models:
        if model.finding:
            off = doc.Value(model.held_out, "share", mark=" off")
            yield model.finding, off, None
    for exact in found.exact:
        if exact.finding:
            yield exact.finding, _growth_of(exact), None


def _growth_of(fit: ExactFit) -> doc.Value:
    ratios = [
        measured / predicted if predicted else 1.0  # nothing over nothing is 1
        for _, measured, predicted in fit.rows
        if measured is not None and predicted is not None and (predicted or not measured)
    ]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
    if worst is None or abs(worst - 1) > 5e-4:
        return doc.Value(worst, "ratio", mark=" predicted")
    return doc.Value("as predicted")


def _finding(row: _Row) -> doc.Finding:
    of = row[0]
    return doc.Finding(
        sign=SIGNS[of.verdict], verdict=of.verdict, subject=f"{of.subject}, {of.question}",
        reason=of.reason, test=(of.subject, of.question), figures=doc.numbers(of.figures),
    )  # fmt: skip


def _table(rows: Sequence[_Row]) -> doc.Table:
    cells: list[Sequence[doc.Cell]] = [
        (of.subject, of.question, raised(of.law), measured,
         doc.Value(top.value if top else None, "exponent"), _finding(row), doc.Value(of.impl),
         doc.Value(of.workload), doc.Value(of.quantity), doc.Value(of.axis))
        for row in rows for of, measured, top in (row,)
    ]  # fmt: skip
    return doc.Table(columns=COLUMNS, rows=cells, spare=("top", "law"), most=MOST)
