"""The section "How cost grows": verdicts and crossovers as texts, and the figures beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import matplotlib as mpl

from attnbench.analysis.crossovers import Crossover
from attnbench.analysis.scaling.results import Estimate, ExactFit, ModelFit, Scaling
from attnbench.base import units
from attnbench.report import exact, fits, forest, growth, shares, style
from attnbench.report.plots import Plot
from attnbench.schema.finding import VERDICTS, WORST_FIRST, Finding, Verdict

MOST_FINDINGS = 400  # in a page
MOST_CROSSOVERS = 120
ORDER = {"crosses": 0, "none": 1, "no difference": 2}


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """One finding as texts; `mark` is its verdict with a sign."""

    subject: str
    question: str
    law: str
    figure: str
    top: str
    verdict: Verdict
    mark: str
    reason: str
    counted: bool = False

    @property
    def goes_without_saying(self) -> bool:
        """True for FLOPs and workspace that are what they should be."""
        return self.counted and self.verdict == "holds"

    @property
    def texts(self) -> tuple[str, ...]:
        """As a row of a table."""
        return (
            self.subject, self.question, self.law, self.figure, self.top, self.mark, self.reason,
        )  # fmt: skip


HEADERS = ("subject", "question", "law", "measured", "top octave", "verdict", "reason")
CROSSOVER_HEADERS = ("on equal cases", "pair", "crossing")


def verdicts(scaling: Scaling) -> list[VerdictRow]:
    """Every finding: what was refuted first, then by verdict; counts that hold come last."""
    rows = [
        *(
            _row(f.finding, growth.interval(f.exponent), f.top)
            for f in scaling.exponents
            if f.finding
        ),
        *(_row(fit.finding, _error_of(fit)) for fit in scaling.models if fit.finding),
        *(_row(finding, units.UNKNOWN) for finding in scaling.problems),
        *(
            replace(_row(fit.finding, _growth_of(fit)), counted=True)
            for fit in scaling.exact
            if fit.finding
        ),
    ]
    return sorted(rows, key=lambda row: (row.goes_without_saying, WORST_FIRST.index(row.verdict)))


def counts(scaling: Scaling) -> str:
    """How many verdicts there are of each kind: `12 hold, 1 refuted, 3 inconclusive`."""
    found = [finding.verdict for finding in scaling.findings]
    words = {"holds": "hold" if found.count("holds") != 1 else "holds"}
    return ", ".join(f"{found.count(v)} {words.get(v, v)}" for v in VERDICTS if v in found)


def _row(finding: Finding | None, figure: str, top: Estimate | None = None) -> VerdictRow:
    assert finding is not None
    return VerdictRow(
        subject=finding.subject, question=finding.question, law=growth.raised(finding.law),
        figure=figure, top=growth.interval(top), verdict=finding.verdict,
        mark=growth.mark(finding.verdict), reason=finding.reason,
    )  # fmt: skip


def _growth_of(fit: ExactFit) -> str:
    found = exact.ratios(fit)
    if not found:
        return units.UNKNOWN
    worst = max((ratio for _, ratio in found), key=lambda ratio: abs(ratio - 1))
    return f"{units.digits(worst)}× predicted" if abs(worst - 1) > 5e-4 else "as predicted"


def _error_of(fit: ModelFit) -> str:
    if fit.held_out is None:
        return units.UNKNOWN
    return f"{100 * fit.held_out:+.1f} %".replace("-", "−") + " at the held-out n"


@dataclass(frozen=True)
class CrossoverTable:
    """The crossovers on equal cases: the pairs and what became of each, the crossings first."""

    same: str
    rows: tuple[tuple[str, str], ...]


def crossover_tables(found: Sequence[Crossover]) -> tuple[list[CrossoverTable], int]:
    """The crossovers by what each pair shares, and how many were left out for length."""
    known = sorted(((c.same, ORDER[c.outcome], c) for c in found), key=lambda row: row[1])
    shown = known[:MOST_CROSSOVERS]
    order = {same: i for i, same in enumerate(dict.fromkeys(c.same for c in found))}
    shown = sorted(shown, key=lambda row: (order[row[0]], row[1]))
    tables = [
        CrossoverTable(same, tuple((_pair(c), _text(c)) for _, _, c in rows))
        for same, rows in groupby(shown, key=lambda row: row[0])
    ]
    return tables, len(known) - len(shown)


def _pair(crossover: Crossover) -> str:
    kind = "" if crossover.by == "impl" else f"{crossover.by} "
    return f"{kind}{crossover.first}, {crossover.second}"


def _text(crossover: Crossover) -> str:
    if not crossover.left_out:
        return crossover.text
    return f"{crossover.text} (no time above 0 at {', '.join(map(str, crossover.left_out))})"


def draw_all(scaling: Scaling, folder: Path) -> list[Plot]:
    """Draw every figure of growth that has data, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        *(fit.series.impl for fit in scaling.exponents),
        *(fit.impl for fit in scaling.exact),
        *(fit.impl for fit in scaling.models),
    }
    looks = style.looks(sorted(names))
    with mpl.rc_context(style.RC):
        return [
            *forest.draw_all(scaling.exponents, looks, folder),
            *fits.draw_all(scaling.exponents, looks, folder),
            *shares.draw_all(scaling.models, looks, folder),
            *exact.draw_all(scaling.exact, looks, folder),
        ]


def anything(scaling: Scaling, found: Sequence[Crossover]) -> bool:
    """Whether there is a series that could be asked, or a pair that could be compared."""
    return bool(scaling.exponents or scaling.exact or scaling.models or found)
