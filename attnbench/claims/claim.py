"""The claim: one statement of a note, what theory says of it, and the function that checks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from attnbench.base.registry import Registry
from attnbench.schema.finding import Figure, Finding, Verdict

if TYPE_CHECKING:
    from attnbench.claims.evidence import Evidence

# The notes, by file name; sections are named by their titles.
BASICS = "000_4713515755139c7c.txt"
LLAMA = "001_a93b02f571b87ee2.txt"
PERSPECTIVES = "002_5e1c27b59ae1e324.txt"
SCRATCH = "003_fe3e4ba5f4e68f14.txt"
CHAPTER = "004_8d0828497be872df.txt"
NOTES = (BASICS, LLAMA, PERSPECTIVES, SCRATCH, CHAPTER)

RunKind = Literal["counted", "timed"]
Kind = Literal["identity", "counted", "timed", "not measured"]
Theory = Literal["right", "wrong", "misleading", "open"]
_EXPECTED: dict[Theory, Verdict | None] = {
    "right": "holds",
    "wrong": "refuted",
    "misleading": "holds",
    "open": None,
}
SWEEP = "attnbench verify --sweep"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a check found: the verdict, one sentence why, and the figures by name and unit."""

    verdict: Verdict
    reason: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


class LackingError(Exception):
    """The run has not the cells that a claim needs; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a note, in our words.

    `note` and `section` say where it stands, `reading` how it was read where it is ambiguous.
    `kind` says what decides: an identity, checked in float64 from nothing; counted FLOPs or bytes,
    or times, of a run; or nothing that is measured here. `theory` is what a derivation says: a
    misleading statement holds as written and suggests something that is not so, and of an open
    one theory says nothing. `right` is what is right instead. Where `machine` is set the answer
    depends on the machine and either verdict agrees with theory.

    Raises:
        ValueError: a wrong or misleading statement without what is right, or an unknown note.
    """

    id: str
    text: str
    note: str
    section: str
    kind: Kind
    check: Callable[[Evidence | None], Answer]
    theory: Theory = "right"
    right: str | None = None
    reading: str | None = None
    machine: bool = False

    def __post_init__(self) -> None:
        if (self.theory in ("wrong", "misleading")) == (self.right is None):
            raise ValueError(f"claim {self.id}: theory {self.theory}, right: {self.right}")
        if self.note not in NOTES:
            raise ValueError(f"claim {self.id}: no note is called {self.note}")

    @property
    def where(self) -> str:
        """The note's number and the section's title."""
        return f"{self.note[:3]} · {self.section}"

    @property
    def expected(self) -> Verdict | None:
        """The verdict that agrees with theory; None where either does."""
        return None if self.machine else _EXPECTED[self.theory]

    def finding(self, evidence: Evidence | None) -> Finding:
        """Check the statement; inconclusive, with the next command, where the run has no cells."""
        try:
            answer = self.check(evidence)
        except LackingError as lack:
            answer = Answer(verdict="inconclusive", reason=f"{lack}; next: {SWEEP}")
        return Finding(
            subject=self.id,
            question=self.text,
            law=self.right or self.text,
            verdict=answer.verdict,
            reason=answer.reason,
            figures={name: _known(value) for name, value in answer.figures.items()},
        )

    def agrees(self, finding: Finding) -> bool:
        """Whether the finding contradicts nothing.

        An inconclusive one doesn't, except for an identity, which needs no run to be decided.
        """
        if finding.verdict == "inconclusive":
            return self.kind != "identity"
        return self.expected in (None, finding.verdict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, without the function."""
        names = "id text note section kind theory right reading expected".split()
        return {name: getattr(self, name) for name in names}


def _known(value: Figure) -> Figure:
    """The figure, or None where it is no finite number, which JSON could not hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


CLAIMS: Registry[Claim] = Registry("claim", "--only")


def identity(
    id_: str, note: str, section: str, text: str, **theory: Any
) -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    """Register a check that needs no run. `theory` as for `_row`."""

    def register(check: Callable[[], Answer]) -> Callable[[], Answer]:
        _row(id_, note, section, text, kind="identity", check=lambda _: check(), **theory)
        return check

    return register


def of_run(
    id_: str,
    note: str,
    section: str,
    text: str,
    *,
    kind: RunKind,
    **theory: Any,
) -> Callable[[Callable[[Evidence], Answer]], Callable[[Evidence], Answer]]:
    """Register a check of what a run counted or timed. `theory` as for `_row`."""

    def register(check: Callable[[Evidence], Answer]) -> Callable[[Evidence], Answer]:
        def with_run(evidence: Evidence | None) -> Answer:
            if evidence is None:
                raise LackingError("needs a run")
            return check(evidence)

        _row(id_, note, section, text, kind=kind, check=with_run, **theory)
        return check

    return register


def unmeasured(id_: str, note: str, section: str, text: str, *, why: str, **theory: Any) -> None:
    """List a statement that nothing here measures; `why` says what it would take."""
    answer = Answer(verdict="inconclusive", reason=f"not measured: {why}")
    _row(id_, note, section, text, kind="not measured", check=lambda _: answer, **theory)


def _row(
    id_: str,
    note: str,
    section: str,
    text: str,
    *,
    kind: Kind,
    check: Callable[[Evidence | None], Answer],
    wrong: str | None = None,
    misleading: str | None = None,
    undecided: bool = False,
    reading: str | None = None,
    machine: bool = False,
) -> None:
    """Add one row. `wrong` or `misleading` say what is right; with neither the statement is."""
    theory: Theory = "wrong" if wrong else "misleading" if misleading else "right"
    claim = Claim(
        id=id_,
        text=text,
        note=note,
        section=section,
        kind=kind,
        check=check,
        theory="open" if undecided else theory,
        right=wrong or misleading,
        reading=reading,
        machine=machine,
    )
    CLAIMS.add(id_, claim)
