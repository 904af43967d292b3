"""Does a measured exponent agree with a declared one? The rule, and nothing but the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnbench.analysis.scaling.results import Estimate, power_text
from attnbench.schema.finding import Verdict

TOLERANCE = 0.15  # of the exponent: how far the ends of its interval may lie from the law
TOP_TOLERANCE = 0.2  # of the slope of the top octave
TO_HOLD, TO_REFUTE = 3.0, 2.0  # octaves of usable range
LEAST_SIZES = 3
_ROUNDING = 1e-9

Decision = tuple[Verdict, str]


@dataclass(frozen=True, kw_only=True)
class ExponentEvidence:
    """What the sizes that count say, beside what is declared.

    `exponent` is their slope, `top` that of the top octave, both in log-log. `octaves` is the
    range they span, a changepoint left out, `sizes` how many differ. `power` is the declared
    exponent, `bound` whether it is an upper bound; `logs` is the slope that the law's logarithms
    add on this range, None where it has none. `noun` names the axis. `cut_short` says why sizes do
    not count where some do not; `changepoint` describes a sudden change between two sizes, and
    `change_in_top` says that less than an octave lies beyond it. `lowest` and `highest` are the
    ends of the interval whichever change that the times allow were taken out; a refutation has to
    stand even so. `curvature` is 1 where the slope surely rises with size, −1 where it falls.
    `disturbed` says which of the times cannot be trusted; what disturbed them may have raised the
    exponent by `lower` at most, or lowered it by `higher`.
    """

    exponent: Estimate | None
    top: Estimate | None
    octaves: float
    sizes: int
    power: float
    bound: bool = False
    logs: float | None = None
    noun: str = "n"
    cut_short: str | None = None
    changepoint: str | None = None
    change_in_top: bool = False
    lowest: float | None = None
    highest: float | None = None
    curvature: int = 0
    disturbed: str | None = None
    lower: float = math.inf
    higher: float = math.inf

    @property
    def least(self) -> float:
        """The least exponent that agrees with the law, were it exact."""
        return self.power - TOLERANCE

    @property
    def most(self) -> float:
        """The largest exponent that agrees with the law."""
        return self.power + TOLERANCE + (self.logs or 0.0)

    @property
    def law(self) -> str:
        """What is decided, as `n^2` or `O(n^2)`."""
        text = power_text(self.noun, self.power) + (" with log factors" if self.logs else "")
        return f"O({text})" if self.bound else text


def decide(evidence: ExponentEvidence) -> Decision:
    """The verdict on the declared exponent, and one sentence that says why.

    `O(n^p)` holds if the exponent's interval ends at p + 0.15 or below and the top octave's at
    p + 0.2 or below, over three octaves; it is refuted if the interval begins above p + 0.15, over
    two. Exactly n^p also needs an interval that begins at p − 0.15 or above, and is refuted by one
    that ends below that. Three things turn a refutation into "inconclusive", since the law may well
    be right: a changepoint that may be there and would explain it; one after which less than an
    octave is left, unless the octave that holds it is against the law as well; and a series that
    still curves towards the law and whose top octave reaches it (an overhead or a term of lower
    order weighs on the small sizes). A law with logarithms cannot hold on such ranges: n log n has
    the slope 1 + 1/ln n, as some power of n has.
    """
    for rule in (_too_little, _above, _below, _change_in_top, _logs, _short, _loose):
        found = rule(evidence)
        if found is not None:
            return _unless_disturbed(evidence, found)
    aside = "; a log factor would not show on this range"
    over = f"over {evidence.octaves:.1f} octaves{_changed(evidence)}"
    return _unless_disturbed(evidence, ("holds", f"{_measured(evidence)} {over}{aside}"))


def _unless_disturbed(evidence: ExponentEvidence, found: Decision) -> Decision:
    """Disturbed times refute only what no such disturbance explains.

    And a changepoint among them may be the machine's own.
    """
    verdict, reason = found
    harmless = verdict == "holds" and not evidence.changepoint
    if not evidence.disturbed or verdict == "inconclusive" or harmless:
        return found
    most = _most_disturbance(evidence) if verdict == "refuted" else None
    if most is None:
        return "inconclusive", f"{evidence.disturbed}: measure again; {reason}"
    at_most = f"which changes the exponent by {most:.2g} at most"
    return verdict, f"{reason}; {evidence.disturbed}, {at_most}"


def _most_disturbance(evidence: ExponentEvidence) -> float | None:
    """How far off disturbances may have put an exponent that is off the law in any case.

    That it is off even if a changepoint were taken out is known by then. A changepoint and a
    disturbance are not assumed together: the scatter that makes the one likely is the other's.
    """
    exponent = evidence.exponent
    if exponent is None:
        return None
    if _low(exponent) - evidence.lower > evidence.most:
        return evidence.lower
    off = not evidence.bound and _high(exponent) + evidence.higher < evidence.least
    return evidence.higher if off else None


def _too_little(evidence: ExponentEvidence) -> Decision | None:
    enough = evidence.sizes >= LEAST_SIZES and evidence.octaves >= TO_REFUTE - _ROUNDING
    if evidence.exponent is not None and enough:
        return None
    return "inconclusive", f"too short: {_range(evidence)}, a verdict needs two octaves at least"


def _above(evidence: ExponentEvidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    if exponent is None or _low(exponent) <= evidence.most:
        return None
    reaches = top is not None and _low(top) <= evidence.most
    if evidence.change_in_top and (top is None or reaches):
        return None
    if reaches and evidence.curvature < 0:
        return "inconclusive", f"{_measured(evidence)}: still falling towards {evidence.law}"
    if evidence.lowest is not None and evidence.lowest <= evidence.most:
        return "inconclusive", _if_changed(evidence, evidence.lowest)
    over = f"grows faster than {evidence.law}"
    return "refuted", f"{over}: {_measured(evidence)}{_changed(evidence)}"


def _below(evidence: ExponentEvidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    if evidence.bound or exponent is None or _high(exponent) >= evidence.least:
        return None
    reaches = top is not None and _high(top) >= evidence.least
    if evidence.change_in_top and (top is None or reaches):
        return None
    if reaches and evidence.curvature > 0:
        return "inconclusive", f"{_measured(evidence)}: still rising towards {evidence.law}"
    if evidence.highest is not None and evidence.highest >= evidence.least:
        return "inconclusive", _if_changed(evidence, evidence.highest)
    over = f"grows more slowly than {evidence.law}"
    return "refuted", f"{over}: {_measured(evidence)}{_changed(evidence)}"


def _change_in_top(evidence: ExponentEvidence) -> Decision | None:
    if not evidence.change_in_top:
        return None
    beyond = "and less than an octave lies beyond it: measure larger sizes"
    return "inconclusive", f"{evidence.changepoint}, {beyond}"


def _logs(evidence: ExponentEvidence) -> Decision | None:
    """A bound with logarithms holds where it would without them."""
    exponent = evidence.exponent
    if evidence.logs is None or exponent is None:
        return None
    if evidence.bound and _high(exponent) <= evidence.power + TOLERANCE:
        return None
    return (
        "inconclusive",
        f"unresolved: log factors. {_measured(evidence)} agrees with {evidence.law}, and as well"
        f" with a power of {evidence.noun} alone",
    )


def _short(evidence: ExponentEvidence) -> Decision | None:
    if evidence.octaves >= TO_HOLD - _ROUNDING:
        return None
    needed = f"{_range(evidence)}, to hold a law needs three{_changed(evidence)}"
    return "inconclusive", f"too short: {needed}; {_measured(evidence)} so far"


def _loose(evidence: ExponentEvidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    assert exponent is not None, "what has no exponent is too short"
    top_most = evidence.power + TOP_TOLERANCE
    reasons = []
    if _high(exponent) > evidence.most:
        reasons.append(f"the interval reaches past {evidence.most:.2f}")
    if not evidence.bound and _low(exponent) < evidence.least:
        reasons.append(f"the interval reaches below {evidence.least:.2f}")
    if top is None or _high(top) > top_most:
        reasons.append(f"the top octave's slope {_shown(top)} reaches past {top_most:.2f}")
    if not reasons:
        return None
    return "inconclusive", f"{_measured(evidence)}: {'; '.join(reasons)}{_changed(evidence)}"


def _low(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def _if_changed(evidence: ExponentEvidence, exponent: float) -> str:
    change = "the constant changes between two sizes, as it may"
    return f"{_measured(evidence)}, or {exponent:.2f} if {change}"


def _measured(evidence: ExponentEvidence) -> str:
    top = "" if evidence.top is None else f", top octave {_shown(evidence.top)}"
    return f"{evidence.noun}^{_shown(evidence.exponent)}{top}"


def _shown(estimate: Estimate | None) -> str:
    """As `2.01 [1.97, 2.05]`."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _range(evidence: ExponentEvidence) -> str:
    sizes = f"{evidence.sizes} size{'' if evidence.sizes == 1 else 's'}"
    over = f"{evidence.octaves:.1f} octaves" if evidence.sizes > 1 else "no octave"
    why = f" ({evidence.cut_short})" if evidence.cut_short else ""
    return f"{sizes} count{'s' if evidence.sizes == 1 else ''}, over {over}{why}"


def _changed(evidence: ExponentEvidence) -> str:
    return f"; {evidence.changepoint}, taken out" if evidence.changepoint else ""
