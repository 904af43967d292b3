"""The finding: a verdict on a law, a claim or a comparison, with its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from attnbench.errors import ExitCode

Verdict = Literal["holds", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
WORST_FIRST: tuple[Verdict, ...] = ("refuted", "holds", "inconclusive")
Cost = Literal["flops", "workspace", "time"]
COSTS: tuple[Cost, ...] = get_args(Cost)
Figure = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was asked of a run, and what it answered.

    `subject` is what it is about (`naive, attention forward`), `question` what was asked of it
    (`time in n`), `law` what should be so, `reason` one sentence that says why the verdict is
    what it is. `figures` are the numbers it rests on, by names that carry their unit.

    Raises:
        ValueError: an unknown verdict, or no reason.
    """

    subject: str
    question: str
    law: str
    verdict: Verdict
    reason: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"unknown verdict {self.verdict!r}")
        if not self.reason:
            raise ValueError(f"{self.verdict} without a reason")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"figures": dict(self.figures)}


@dataclass(frozen=True, kw_only=True)
class LawFinding(Finding):
    """A verdict on growth; a model has no one axis, a finding on a whole run none of the four."""

    impl: str | None = None
    workload: str | None = None
    quantity: Cost | None = None
    axis: str | None = None


def exit_code(findings: Iterable[LawFinding], *, strict: bool = False) -> ExitCode:
    """1 if anything is refuted, 3 if of some implementation nothing holds (or nothing was asked).

    Else 0; with `strict` 3 if anything is inconclusive.
    """
    of: dict[str | None, set[Verdict]] = {}
    for finding in findings:
        of.setdefault(finding.impl, set()).add(finding.verdict)
    if any("refuted" in verdicts for verdicts in of.values()):
        return ExitCode.FINDING
    decided = bool(of) and all("holds" in verdicts for verdicts in of.values())
    left_open = strict and any("inconclusive" in verdicts for verdicts in of.values())
    return ExitCode.OK if decided and not left_open else ExitCode.INCONCLUSIVE
