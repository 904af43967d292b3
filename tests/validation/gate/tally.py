"""Counts over judged gate runs, live or resampled: wrong, found, undecided, and how surely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.base.stats import median
from attnbench.errors import ExitCode
from attnbench.gate.decide.outcome import Outcome, Row
from tests.validation.gate.schedule import Kind

Figures = dict[str, Any]
_AGAINST = ("incorrect", "regressed")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One gate run with what is known of it: `cell` was slowed by the share of its kind.

    `truth` is the ratio of each cell that the run's rounds scatter about.
    """

    kind: Kind
    cell: int | None
    truth: tuple[float, ...]
    outcome: Outcome
    seconds: float
    rounds: int

    @property
    def named(self) -> bool:
        """Whether the slowed cell was found."""
        return self.cell is not None and self.outcome.rows[self.cell].verdict in _AGAINST

    @property
    def wrongly(self) -> tuple[int, ...]:
        """The cells that were called slower, or wrong, and are not."""
        rows = enumerate(self.outcome.rows)
        return tuple(i for i, row in rows if i != self.cell and row.verdict in _AGAINST)

    @property
    def ending(self) -> str:
        """How the run ended; `blind` decided every cell, and did not see its control."""
        outcome = self.outcome
        if outcome.exit_code == ExitCode.INCONCLUSIVE:
            undecided = any(row.verdict == "inconclusive" for row in outcome.rows)
            return "inconclusive" if undecided else "blind"
        return _ENDINGS[outcome.exit_code]

    def ratios(self, *, slowed: bool) -> list[tuple[Row, float]]:
        """The row of the slowed cell, or those of the others, each with the true ratio."""
        both = enumerate(zip(self.outcome.rows, self.truth, strict=True))
        return [pair for i, pair in both if (i == self.cell) == slowed]

    @property
    def suspects(self) -> bool:
        """Whether any cell needed confirmation."""
        return any(row.stage == "confirm" for row in self.outcome.rows)


_ENDINGS = {
    ExitCode.OK: "passed",
    ExitCode.FINDING: "regressed",
    ExitCode.USAGE: "nothing comparable",
    ExitCode.ENVIRONMENT: "untrusted",
}


def clopper_pearson(hits: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval (low, high) of a share that was hit `hits` times `of` so many.

    Source: Clopper & Pearson, "The use of confidence or fiducial limits illustrated in the case
    of the binomial", Biometrika 26 (1934). Nothing tried says nothing: (0, 1).

    Raises:
        ValueError: fewer than no hits, or more than tries.
    """
    from scipy.stats import beta

    if not 0 <= hits <= of:
        raise ValueError(f"{hits} hits of {of}")
    tail = (1 - confidence) / 2
    low = beta.ppf(tail, hits, of - hits + 1) if hits else 0.0
    high = beta.ppf(1 - tail, hits + 1, of - hits) if hits < of else 1.0
    return float(low), float(high)


def share(hits: int, of: int) -> Figures:
    """A share with its bounds; None where nothing was tried."""
    low, high = clopper_pearson(hits, of)
    return {"hits": hits, "of": of, "share": hits / of if of else None, "low": low, "high": high}


def tally(runs: Sequence[Judged]) -> Figures:
    """All figures of runs of one kind."""
    kind = runs[0].kind
    endings = [run.ending for run in runs]
    slowed = [pair for run in runs for pair in run.ratios(slowed=True)]
    alike = [pair for run in runs for pair in run.ratios(slowed=False)]
    return {
        "label": kind.label,
        "planted": kind.share,
        "threshold": kind.threshold,
        "runs": len(runs),
        "false_alarms": share(sum(bool(run.wrongly) for run in runs), len(runs)),
        "found": share(sum(run.named for run in runs), len(runs)) if kind.share else None,
        "endings": {name: share(endings.count(name), len(runs)) for name in dict.fromkeys(endings)},
        "unfit": share(sum(e in ("blind", "untrusted") for e in endings), len(runs)),
        "inconclusive": share(endings.count("inconclusive"), len(runs)),
        "seconds": _spread([run.seconds for run in runs]),
        "seconds_clean": _spread([run.seconds for run in runs if not run.suspects]),
        "seconds_suspects": _spread([run.seconds for run in runs if run.suspects]),
        "rounds": _spread([float(run.rounds) for run in runs]),
        "slowed": _ratios(slowed) if slowed else None,
        "alike": _ratios(alike),
    }


def by_cell(runs: Iterable[Judged], cells: Sequence[str]) -> list[Figures]:
    """For each cell: how often it was wrongly named, and found where it was slowed."""
    every = list(runs)
    return [_of_cell(every, number, name) for number, name in enumerate(cells)]


def _of_cell(runs: Sequence[Judged], number: int, name: str) -> Figures:
    slowed = [run for run in runs if run.cell == number]
    alike = [run for run in runs if run.cell != number]
    return {
        "cell": name,
        "wrongly": share(sum(number in run.wrongly for run in alike), len(alike)),
        "suspected": sum(run.outcome.rows[number].stage == "confirm" for run in alike),
        "alike": _ratios([(run.outcome.rows[number], run.truth[number]) for run in alike]),
        "found": share(sum(run.named for run in slowed), len(slowed)),
    }


def _ratios(pairs: Sequence[tuple[Row, float]]) -> Figures:
    """How far ratios lie from the truth, and how often their intervals hold it."""
    ends = [(r.low, r.high, truth) for r, truth in pairs if r.low is not None]
    intervals = [(low, high, truth) for low, high, truth in ends if high is not None]
    held = sum(low <= truth <= high for low, high, truth in intervals)
    errors = [row.ratio / truth - 1 for row, truth in pairs if row.ratio is not None]
    return {
        "covered": share(held, len(intervals)),
        "bias": median(errors) if errors else None,
        "off_most": max(errors, key=abs) if errors else None,
        "width": median([high / low - 1 for low, high, _ in intervals]) if intervals else None,
    }


def _spread(values: Sequence[float]) -> Figures:
    return {
        "of": len(values),
        "median": median(values) if values else None,
        "most": max(values, default=None),
    }
