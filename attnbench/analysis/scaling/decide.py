"""Does a measured exponent agree with a declared one? The rule, and nothing but the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnbench.analysis.scaling.remarks import power_text
from attnbench.analysis.scaling.results import Estimate
from attnbench.schema.finding import Verdict

TOLERANCE = 0.15  # of the exponent: what the ends of its interval may lie beside the law
TOP_TOLERANCE = 0.2  # of the slope of the top octave
TO_HOLD, TO_REFUTE = 3.0, 2.0  # octaves of usable range
LEAST_SIZES = 3
_ROUNDING = 1e-9
_JUMPY = "the time jumps between two sizes, as it may"

Decision = tuple[Verdict, str]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the sizes that count say, beside what is declared.

    `exponent` is their slope, `top` that of the top octave, both in log-log. `octaves` is the
    range they span, a jump left out, `sizes` how many differ. `power` is the declared exponent,
    `bound` whether it is an upper bound; `logs` is the slope that the law's logarithms add on this
    range, None where it has none. `noun` names the axis. `cut_short` says why sizes do not count
    where some do not; `jump` describes a sudden change between two sizes, and `jump_last` says
    that less than an octave lies beyond it. `lowest` and `highest` are the ends of the interval
    whichever change that the times allow were taken out; a refutation has to stand even so.
    `bend` is 1 where the slope surely rises with size, −1 where it falls. `disturbed` says which
    of the times are not to be compared by; what disturbed them may have raised the exponent by
    `lower` at most, or lowered it by `higher`.
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
    jump: str | None = None
    jump_last: bool = False
    lowest: float | None = None
    highest: float | None = None
    bend: int = 0
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


def decide(evidence: Evidence) -> Decision:
    """The verdict on the declared exponent, and one sentence that says why.

    `O(n^p)` holds if the exponent's interval ends at p + 0.15 or below and the top octave's at
    p + 0.2 or below, over three octaves; it is refuted if the interval begins above p + 0.15, over
    two. Exactly n^p also needs an interval that begins at p − 0.15 or above, and is refuted by one
    that ends below that. Three things turn a refutation into "inconclusive", since the law may well
    be right: a jump that may be there and would explain it; one after which less than an octave is
    left, unless the octave that holds it is against the law as well; and a series that still bends
    towards the law and whose top octave reaches it (a floor or a term of lower order weighs on the
    small sizes). A law with logarithms cannot hold
    on such ranges: n log n has the slope 1 + 1/ln n, as some power of n has.
    """
    for rule in (_too_little, _above, _below, _jump_last, _logs, _short, _loose):
        found = rule(evidence)
        if found is not None:
            return _unless_disturbed(evidence, found)
    aside = "; a log factor would not show on this range"
    over = f"over {evidence.octaves:.1f} octaves{_jumped(evidence)}"
    return _unless_disturbed(evidence, ("holds", f"{_measured(evidence)} {over}{aside}"))


def _unless_disturbed(evidence: Evidence, found: Decision) -> Decision:
    """Disturbed times refute only what no such disturbance explains.

    And a jump among them may be the machine's own.
    """
    verdict, reason = found
    if not evidence.disturbed or verdict == "inconclusive":
        return found
    if verdict == "holds" and not evidence.jump:
        return found
    explained = _explained(evidence)
    if verdict == "refuted" and explained is not None:
        at_most = f"which changes the exponent by {explained:.2g} at most"
        return verdict, f"{reason}; {evidence.disturbed}, {at_most}"
    return "inconclusive", f"{evidence.disturbed}: measure again; {reason}"


def _explained(evidence: Evidence) -> float | None:
    """How far off disturbances may have put an exponent that is off the law in any case.

    That it is off even if a jump were taken out is known by then. A jump and a disturbance are not
    assumed together: the scatter that makes a jump likely is the disturbance's.
    """
    exponent = evidence.exponent
    if exponent is None:
        return None
    if _low(exponent) - evidence.lower > evidence.most:
        return evidence.lower
    off = not evidence.bound and _high(exponent) + evidence.higher < evidence.least
    return evidence.higher if off else None


def _too_little(evidence: Evidence) -> Decision | None:
    if (
        evidence.exponent is not None
        and evidence.sizes >= LEAST_SIZES
        and evidence.octaves >= TO_REFUTE - _ROUNDING
    ):
        return None
    return "inconclusive", f"too short: {_range(evidence)}, a verdict needs two octaves at least"


def _jump_last(evidence: Evidence) -> Decision | None:
    if not evidence.jump_last:
        return None
    return (
        "inconclusive",
        f"{evidence.jump}, and less than an octave lies beyond it: measure larger sizes",
    )


def _above(evidence: Evidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    if exponent is None or _low(exponent) <= evidence.most:
        return None
    if evidence.jump_last and (top is None or _low(top) <= evidence.most):
        return None
    if top is not None and evidence.bend < 0 and _low(top) <= evidence.most:
        return "inconclusive", f"{_measured(evidence)}: still falling towards {evidence.law}"
    if evidence.lowest is not None and evidence.lowest <= evidence.most:
        return "inconclusive", f"{_measured(evidence)}, or {evidence.lowest:.2f} if {_JUMPY}"
    over = f"grows faster than {evidence.law}"
    return "refuted", f"{over}: {_measured(evidence)}{_jumped(evidence)}"


def _below(evidence: Evidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    if evidence.bound or exponent is None or _high(exponent) >= evidence.least:
        return None
    if evidence.jump_last and (top is None or _high(top) >= evidence.least):
        return None
    if top is not None and evidence.bend > 0 and _high(top) >= evidence.least:
        return "inconclusive", f"{_measured(evidence)}: still rising towards {evidence.law}"
    if evidence.highest is not None and evidence.highest >= evidence.least:
        return "inconclusive", f"{_measured(evidence)}, or {evidence.highest:.2f} if {_JUMPY}"
    over = f"grows more slowly than {evidence.law}"
    return "refuted", f"{over}: {_measured(evidence)}{_jumped(evidence)}"


def _logs(evidence: Evidence) -> Decision | None:
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


def _short(evidence: Evidence) -> Decision | None:
    if evidence.octaves >= TO_HOLD - _ROUNDING:
        return None
    left = f"{_range(evidence)}, to hold a law needs three{_jumped(evidence)}"
    return "inconclusive", f"too short: {left}; {_measured(evidence)} so far"


def _loose(evidence: Evidence) -> Decision | None:
    exponent, top = evidence.exponent, evidence.top
    assert exponent is not None, "what has no exponent is too short"
    outside = [
        (_high(exponent) > evidence.most, f"the interval reaches past {evidence.most:.2f}"),
        (
            not evidence.bound and _low(exponent) < evidence.least,
            f"the interval reaches below {evidence.least:.2f}",
        ),
        (
            top is None or _high(top) > evidence.power + TOP_TOLERANCE,
            f"the top octave's slope {_shown(top)} reaches past"
            f" {evidence.power + TOP_TOLERANCE:.2f}",
        ),
    ]
    reasons = [text for is_so, text in outside if is_so]
    if not reasons:
        return None
    said = "; ".join(reasons)
    return "inconclusive", f"{_measured(evidence)}: {said}{_jumped(evidence)}"


def _low(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def _measured(evidence: Evidence) -> str:
    top = "" if evidence.top is None else f", top octave {_shown(evidence.top)}"
    return f"{evidence.noun}^{_shown(evidence.exponent)}{top}"


def _shown(estimate: Estimate | None) -> str:
    """As `2.01 [1.97, 2.05]`."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _range(evidence: Evidence) -> str:
    sizes = f"{evidence.sizes} size{'' if evidence.sizes == 1 else 's'}"
    over = f"{evidence.octaves:.1f} octaves" if evidence.sizes > 1 else "no octave"
    why = f" ({evidence.cut_short})" if evidence.cut_short else ""
    return f"{sizes} count{'s' if evidence.sizes == 1 else ''}, over {over}{why}"


def _jumped(evidence: Evidence) -> str:
    return f"; {evidence.jump}, taken out" if evidence.jump else ""
