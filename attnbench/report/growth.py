"""How cost grows: what verdicts rest on, and what the figures of growth share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnbench.analysis.ratios import PREFERRED
from attnbench.analysis.scaling.results import Uncertain
from attnbench.report.document import Sign
from attnbench.report.render.written import LOOKS
from attnbench.schema.finding import Verdict
from attnbench.theory.traits import TRAITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnbench.report.looks import Look

SIGNS: dict[Verdict, Sign] = {"holds": "good", "refuted": "bad", "inconclusive": "open"}
# Panels of a figure, and such figures for one workload and axis; the table has every verdict.
PAGES = (6, 1)
AXIS_NAMES = {
    "d": "head dim D", "heads": "heads H", "heads at fixed width": "heads H at fixed width",
    "batch": "batch B", "T": "new tokens T",
}  # fmt: skip


def mark(verdict: Verdict | None) -> str:
    """A verdict with its sign, readable without colour; nothing where there is none."""
    return f"{LOOKS[SIGNS[verdict]].letter} {verdict}" if verdict else ""


def raised(text: str) -> str:
    """A law with whole powers raised: `n^2 d` as `n² d`; others stay, as `n^1.5`."""
    digits = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return re.sub(r"\^(\d+)(?![\d./])", lambda found: found[1].translate(digits), text)


def interval(estimate: Uncertain) -> str:
    """An exponent with its interval: `1.98 (1.95 … 2.01)`."""
    value = f"{estimate.value:.2f}"
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval)"
    return f"{value} ({estimate.low:.2f} … {estimate.high:.2f})"


def axis_name(axis: str, workload: str) -> str:
    """What stands below an axis along which a series runs."""
    if axis == "n":
        return TRAITS.get(workload).n_name
    return "model width E" if axis == "d" and workload != "attention" else AXIS_NAMES[axis]


def by_name(impl: str) -> tuple[bool, str]:
    """A key for sorting implementations: naive first."""
    return impl != PREFERRED[0], impl


def points(
    ax: Axes, found: Sequence[tuple[float, Uncertain]], look: Look, style: Mapping[str, Any]
) -> None:
    """Draw (size, time) with intervals, those that a logarithmic axis can show.

    An end that is 0 or infinite, since nothing bounds the time, is the panel's own.
    """
    known = [(x, e) for x, e in found if math.isfinite(e.value) and e.value > 0]
    if not known:
        return
    least, most = ax.get_ylim()
    below = [max(0.0, e.value - max(least, e.ends[0])) for _, e in known]
    above = [max(0.0, min(most, e.ends[1]) - e.value) for _, e in known]
    ax.errorbar(
        [x for x, _ in known], [e.value for _, e in known], yerr=[below, above], color=look.colour,
        marker=look.marker, linestyle="none", elinewidth=1.0, clip_on=False, **style,
    )  # fmt: skip
