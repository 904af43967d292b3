"""The ledger: every claim with its finding, and what the whole of them comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attnbench.analysis.claims import statement
from attnbench.analysis.claims.quantities import Cells, LackingError, Observed, observe
from attnbench.analysis.claims.reading import EXTREMES, PAIRED
from attnbench.analysis.claims.statement import Claim, Quantity, Range, Where
from attnbench.base.registry import Registry
from attnbench.errors import ExitCode
from attnbench.execution.store import Run
from attnbench.schema.finding import VERDICTS, WORST_FIRST, Figure, Finding, Verdict

Ledger = tuple[tuple[Claim, Finding], ...]


def ledger(claims: Registry[Claim], run: Run, only: Iterable[str] | None = None) -> Ledger:
    """Hold every claim, or those whose ids are in `only`, against the run.

    Raises:
        UnknownNameError: a name in `only` is no claim's id; the message gives the nearest.
    """
    chosen = [claims.get(name) for name in (claims.names() if only is None else only)]
    cells = Cells(run)
    return tuple((claim, finding(claim, cells)) for claim in chosen)


def finding(claim: Claim, cells: Cells) -> Finding:
    """Hold one claim against a run's cells; inconclusive, with a command, where they lack."""
    figures: dict[str, Figure] = {}
    try:
        verdict, reason = _judged(claim, observe(claim.quantity, cells), figures)
    except LackingError as lack:
        needed = command(claim.quantity)
        verdict, reason = "inconclusive", f"{lack}; it needs: {needed}" if needed else str(lack)
    return Finding(
        subject=claim.id, question=claim.says, law=claim.right or claim.says,
        verdict=verdict, reason=reason, figures=figures,
    )  # fmt: skip


def _judged(claim: Claim, seen: Observed, figures: dict[str, Figure]) -> tuple[Verdict, str]:
    """The verdict on all observations, and the sharpest of those that it rests on."""
    assert claim.relation is not None, "only what is unmeasured has none"
    verdicts = [claim.relation.verdict(one.low, one.high) for one in seen.observations]
    verdict = min(verdicts, key=WORST_FIRST.index)  # refuted if one is, else holds if one does
    if claim.cells == "alike" and {"holds", "refuted"} <= set(verdicts):
        verdict = "inconclusive"
    judged = list(zip(seen.observations, verdicts, strict=True))
    telling = [one for one, its in judged if its == verdict or verdict not in verdicts]
    one = min(telling, key=lambda one: one.width)
    ends = {"low": one.low, "high": one.high}
    known = {n: e if e is not None and math.isfinite(e) else None for n, e in ends.items()}
    counts = {str(name): verdicts.count(name) for name in VERDICTS}
    figures |= {"value": one.value, **known, "at": one.at, **counts}
    reason = f"{seen.what} {one.text(seen.written)} at {one.at}, claimed {claim.relation.text}"
    if len(verdicts) > 1:
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        reason += f" (the sharpest of {len(verdicts)}: {listed})"
    return verdict, reason


def agrees(claim: Claim, found: Finding) -> bool:
    """Whether the finding contradicts nothing: an inconclusive one never does."""
    return found.verdict == "inconclusive" or claim.expected in (None, found.verdict)


def exit_code(found: Iterable[tuple[Claim, Finding]]) -> ExitCode:
    """1 if a verdict is not the expected one, 3 if none was reached, else 0."""
    rows = list(found)
    if not all(agrees(claim, of) for claim, of in rows):
        return ExitCode.FINDING
    undecided = all(of.verdict == "inconclusive" for _, of in rows)
    return ExitCode.INCONCLUSIVE if undecided else ExitCode.OK


# Which command would measure what a claim needs.

# Sizes that serve where a claim asks for an extreme, a range, or growth; others take `1,2`.
_USUAL = {"seq_len": "1,128..2048", "heads": "1,2,4", "head_dim": "64,128,256", "mask": "full"}
_FLAGS = {name: f"--{name.replace('_', '-')}s" for name in PAIRED} | {
    "workload": "--workload", "device": "--device", "pass": "--passes", "batch": "--batch-sizes",
    "heads": "--heads", "kv_heads": "--kv-heads", "new_tokens": "--new-tokens",
}  # fmt: skip


def command(quantity: Quantity) -> str | None:
    """The command that would measure what a quantity needs; None where none does."""
    if isinstance(quantity, statement.Unmeasured):
        return None
    if isinstance(quantity, statement.Share):
        return "attnbench verify --sweep"
    growing = isinstance(quantity, (statement.Exponent, statement.Crossover))
    varied = ["seq_len"] * growing + getattr(quantity, "free", [])
    ways: list[Where] = [getattr(quantity, name, {}) for name in ("first", "second")]
    sides = [{**quantity.where, **way} for way in ways]
    if len({str(side.get("workload")) for side in sides}) > 1:
        return " and ".join(_sweep([side], []) for side in sides)
    return _sweep(sides, varied)


def _sweep(sides: list[Where], varied: list[str]) -> str:
    """A sweep of all values that the sides name, and of usual sizes where they name none."""
    words = ["attnbench sweep"]
    for name, flag in _FLAGS.items():
        selectors = [side[name] for side in sides if name in side]
        values = [v for s in selectors for v in (s if isinstance(s, list) else [s])]
        known = [str(v) for v in values if not isinstance(v, Range) and v not in EXTREMES]
        if name in varied or len(known) < len(values):
            known = [_USUAL.get(name, "1,2")]
        words += [f"{flag} {','.join(dict.fromkeys(known))}"] * bool(known)
    return " ".join(words)
