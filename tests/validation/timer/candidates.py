"""What could be taken as the reported time: how the estimator was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attnbench.base.registry import Registry
from attnbench.base.stats import fastest_of_windows, median
from tests.validation.timer.spread import quantile

# The times of all blocks of one process, in µs, turn by turn, to one time.
Turns = Sequence[Sequence[float]]
Candidate = Callable[[Turns], float]


def _fastest(turns: Turns) -> list[float]:
    return [min(turn) for turn in turns]


def _every(turns: Turns) -> list[float]:
    return [time_us for turn in turns for time_us in turn]


def _of_fastest(turns: Turns) -> float:
    return median(_fastest(turns))


def _of_medians(turns: Turns) -> float:
    return median([median(turn) for turn in turns])


def _of_windows(turns: Turns, *, width: int) -> float:
    return median(fastest_of_windows(_fastest(turns), width))


def _low(turns: Turns, *, share: float) -> float:
    return quantile(_fastest(turns), share=share)


CANDIDATES: Registry[tuple[str, Candidate]] = Registry("estimator")
CANDIDATES.add("every", ("median of every block", lambda turns: median(_every(turns))))
CANDIDATES.add("medians", ("median of the turns' medians", _of_medians))
CANDIDATES.add("fastest", ("median of the turns' fastest blocks", _of_fastest))
for _width in (2, 4, 8):
    CANDIDATES.add(
        f"minima-{_width}",
        (f"the same, of the fastest of {_width} turns", partial(_of_windows, width=_width)),
    )
for _share in (0.25, 0.1):
    CANDIDATES.add(
        f"low-{_share:.0%}"[:-1],
        (f"the fastest blocks' {_share:.0%} quantile", partial(_low, share=_share)),
    )
CANDIDATES.add("minimum", ("minimum", lambda turns: min(_every(turns))))
