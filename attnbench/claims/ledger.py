"""The ledger: every claim with its finding, and what the whole of them comes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnbench.claims import (
    caching,
    cost,
    examples,
    growth,
    heads,
    masks,
    recurrent,
    rotary,
    sinusoidal,
    softmax,
    unmeasured,
)
from attnbench.claims.claim import CLAIMS, Claim
from attnbench.claims.evidence import Evidence
from attnbench.errors import ExitCode
from attnbench.execution.store import Run
from attnbench.schema.finding import Finding

SUBJECTS = (cost, growth, caching, heads, softmax, masks, rotary, sinusoidal, recurrent, examples,
            unmeasured)  # fmt: skip

Ledger = tuple[tuple[Claim, Finding], ...]


def ledger(run: Run | None, only: Sequence[str] | None = None) -> Ledger:
    """Check every claim, or those named in `only`; without a run, what needs one is inconclusive.

    Raises:
        UnknownNameError: a name in `only` is no claim's; the message gives the nearest.
    """
    names = dict.fromkeys(only) if only is not None else CLAIMS.names()
    claims = [CLAIMS.get(name) for name in names]
    evidence = None if run is None else Evidence(run)
    return tuple((claim, claim.finding(evidence)) for claim in claims)


def exit_code(found: Iterable[tuple[Claim, Finding]]) -> ExitCode:
    """1 if a verdict contradicts theory, 3 if none was reached, else 0."""
    rows = list(found)
    if not all(claim.agrees(finding) for claim, finding in rows):
        return ExitCode.FINDING
    reached = any(finding.verdict != "inconclusive" for _, finding in rows)
    return ExitCode.OK if reached else ExitCode.INCONCLUSIVE
