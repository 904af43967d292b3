"""Does a measured exponent agree with a declared one? The rule, and nothing but the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnbench.analysis.scaling.results import Slope, Uncertain, power_text
from attnbench.schema.finding import Verdict

TOLERANCE = 0.15  # of the exponent: how far the ends of its interval may lie from the law
TOP_TOLERANCE = 0.2  # of the slope of the last two doublings
# Where the last doubling does not count. A term of the next power that takes half of the time at
# the largest size adds 0.105 to the exponent of the three doublings below it.
FRESH_TOLERANCE = 0.1
TO_HOLD, TO_REFUTE = 3.0, 2.0  # octaves of usable range
LEAST_SIZES = 3
FINEST = 0.05  # of an exponent: what better times may settle where it lies too near a limit
_ROUNDING = 1e-9

Decision = tuple[Verdict, str]


@dataclass(frozen=True, kw_only=True)
class ExponentEvidence:
    """What the sizes that count say, beside what is declared.

    `sizes` is how many differ. `power` is the declared exponent, `bound` whether it is an upper
    bound; `logs` is the slope that the law's logarithms add on this range, None where it has none.
    `noun` names the axis. `cut_short` says why sizes do not count where some do not; `changepoint`
    describes a sudden change between two sizes. `executed` is the exponent of the executed FLOPs.
    `fresh` says that page faults of fresh memory hide the last doubling.
    """

    slope: Slope
    sizes: int
    power: float
    bound: bool = False
    logs: float | None = None
    noun: str = "n"
    cut_short: str | None = None
    changepoint: str | None = None
    executed: float | None = None
    fresh: bool = False

    @property
    def least(self) -> float:
        """The least exponent that agrees with the law, were it exact.

        Blocks that a causal mask cuts are computed whole: small sizes then execute more than their
        share, and time need not grow faster than what is executed.
        """
        executed = self.power if self.executed is None else self.executed
        return min(self.power, executed) - TOLERANCE

    @property
    def most(self) -> float:
        """The largest exponent that agrees with the law."""
        return self.power + TOLERANCE + (self.logs or 0.0)

    @property
    def most_held(self) -> float:
        """The largest exponent by which the law holds."""
        return self.most - (TOLERANCE - FRESH_TOLERANCE if self.fresh else 0.0)

    @property
    def law(self) -> str:
        """What is decided, as `n^2` or `O(n^2)`."""
        text = power_text(self.noun, self.power) + (" with log factors" if self.logs else "")
        return f"O({text})" if self.bound else text


def decide(evidence: ExponentEvidence) -> Decision:
    """The verdict on the declared exponent, and one sentence that says why.

    `O(n^p)` holds if the exponent's interval ends at p + 0.15 or below and that of the last two
    octaves at p + 0.2 or below, over three octaves; it is refuted if the interval begins above
    p + 0.15, over two. Exactly n^p also needs an interval that begins at p − 0.15 or above, and is
    refuted by one that ends below that. Where page faults hide the last octave the interval must
    end at p + 0.1. Three things turn a refutation into "inconclusive", since the law may well be
    right: a changepoint that may be there, or the end of a cache, that would explain it; a
    changepoint after which less than an octave is left, unless the octave that holds it is against
    the law as well; and a series that still curves towards the law and whose last octave reaches
    it (an overhead or a term of lower order weighs on the small sizes). A law with logarithms
    cannot hold on such ranges: n log n has the slope 1 + 1/ln n, as some power of n has.
    """
    slope, exponent = evidence.slope, evidence.slope.exponent
    measured, changed = _measured(evidence), _changed(evidence)
    if evidence.sizes < LEAST_SIZES or not exponent or slope.octaves < TO_REFUTE - _ROUNDING:
        return "inconclusive", f"too few sizes: {_range(evidence)}; any verdict takes 2 doublings"
    if off := _off(evidence):
        return off
    if slope.change_in_top:
        beyond = "and less than a doubling lies beyond it: measure larger sizes"
        return "inconclusive", f"{evidence.changepoint}, {beyond}"
    # A bound with logarithms holds where it would without them.
    within = evidence.bound and exponent.ends[1] <= evidence.most_held - (evidence.logs or 0.0)
    if evidence.logs is not None and not within:
        found = f"unresolved: log factors. {measured} agrees with {evidence.law}"
        return "inconclusive", f"{found}, and as well with a power of {evidence.noun} alone"
    if slope.octaves < TO_HOLD - _ROUNDING:
        short = f"too few sizes: {_range(evidence)}; confirming a law takes 3 doublings"
        return "inconclusive", f"{short}{changed}"
    if loose := _loose(evidence, exponent):
        return "inconclusive", f"{measured}: {'; '.join(loose)}{changed}"
    aside = "; a log factor would not show on this range"
    return "holds", f"{measured} over {slope.octaves:.1f} doublings{changed}{aside}"


def needed(evidence: ExponentEvidence) -> tuple[float, float] | None:
    """How well the times of all sizes, and of the top octave, must be known for a verdict.

    As relative half-widths: for that verdict which the exponent itself suggests. None where better
    times of these sizes decide nothing: the range is too short for it, or logarithms leave it open.
    """
    slope, top = evidence.slope, evidence.slope.top
    if slope.exponent is None or evidence.sizes < LEAST_SIZES:
        return None
    value = slope.exponent.value
    below = -math.inf if evidence.bound else evidence.least
    holds = below <= value <= evidence.most
    if slope.octaves < (TO_HOLD if holds else TO_REFUTE) - _ROUNDING:
        return None
    if holds and (evidence.logs is not None or slope.change_in_top):
        return None
    room = min(abs(value - evidence.most), abs(value - below)) - slope.exponent.scatter
    found = max(room, FINEST) / sum(slope.exponent.weights)
    if not holds or top is None:
        return found, math.inf
    top_room = evidence.power + TOP_TOLERANCE - top.value - top.scatter
    return found, max(top_room, FINEST) / sum(top.weights)


def _off(evidence: ExponentEvidence) -> Decision | None:
    """An exponent above the law, or below one that is no bound."""
    slope, last = evidence.slope, evidence.slope.last
    above = 1, evidence.most, slope.lowest, "falling", "faster"
    below = -1, evidence.least, slope.highest, "rising", "more slowly"
    for sign, limit, changed, still, how in (above,) if evidence.bound else (above, below):
        nearest = sign < 0  # of an interval's ends
        reaches, last_reaches = (
            found is None or sign * (found.ends[nearest] - limit) <= 0
            for found in (slope.exponent, last)
        )
        if reaches or (slope.change_in_top and last_reaches):
            continue
        measured = _measured(evidence)
        if last and last_reaches and slope.curvature == -sign:
            return "inconclusive", f"{measured}: still {still} towards {evidence.law}"
        if sign * (changed - limit) <= 0:
            change = "the constant changes between two sizes, as it may"
            return "inconclusive", f"{measured}, or {changed:.2f} if {change}"
        return "refuted", f"grows {how} than {evidence.law}: {measured}{_changed(evidence)}"
    return None


def _loose(evidence: ExponentEvidence, exponent: Uncertain) -> list[str]:
    """What of the exponent's interval, and of the top octave's, reaches past the law."""
    (low, high), top = exponent.ends, evidence.slope.top
    top_most = evidence.power + TOP_TOLERANCE
    reasons = []
    if high > evidence.most_held:
        reasons.append(f"the interval reaches past {evidence.most_held:.2f}")
    if not evidence.bound and low < evidence.least:
        reasons.append(f"the interval reaches below {evidence.least:.2f}")
    if top is None or top.ends[1] > top_most:
        past = "is unknown" if top is None else f"reaches past {top_most:.2f}"
        reasons.append(f"that of the last two doublings {past}")
    return reasons


def _measured(evidence: ExponentEvidence) -> str:
    top = evidence.slope.top
    octave = "" if top is None else f", last two doublings {_shown(top)}"
    return f"{evidence.noun}^{_shown(evidence.slope.exponent)}{octave}"


def _shown(estimate: Uncertain | None) -> str:
    """As `2.01 [1.97, 2.05]`."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _range(evidence: ExponentEvidence) -> str:
    why = f" ({evidence.cut_short})" if evidence.cut_short else ""
    if evidence.sizes < 2:
        return f"{evidence.sizes or 'none'} counts{why}"
    doubles = f"{evidence.noun} doubles {evidence.slope.octaves:.1f} times"
    return f"{doubles} over the {evidence.sizes} that count{why}"


def _changed(evidence: ExponentEvidence) -> str:
    """What the fit leaves out, and why the exponent may lie so far below the law."""
    found = []
    if evidence.changepoint:
        found.append(f"{evidence.changepoint}, left out of the fit")
    if evidence.fresh and evidence.cut_short:
        found.append(evidence.cut_short)
    if not evidence.bound and evidence.least < evidence.power - TOLERANCE - FINEST:
        executed = f"executed FLOPs grow as {evidence.noun}^{evidence.executed:.2f}"
        found.append(f"{executed}: from {evidence.least:.2f} on an exponent agrees")
    return "".join(f"; {text}" for text in found)
