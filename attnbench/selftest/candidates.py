"""What could be taken as the reported time: how the default estimator is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attnbench.registry import Registry
from attnbench.selftest.spread import quantile
from attnbench.stats import ESTIMATORS, median

# From the times of one process, in µs and in the order of their rounds, to one time.
Candidate = Callable[[Sequence[float]], float]
_BLOCKS = 8


def windows(times_us: Sequence[float], width: int) -> list[Sequence[float]]:
    """Consecutive windows of `width` samples; what is left over joins the last one.

    Fewer samples than `width` are one window.
    """
    starts = list(range(0, len(times_us) - width + 1, width)) or [0]
    ends = [*starts[1:], len(times_us)]
    return [times_us[start:end] for start, end in zip(starts, ends, strict=True)]


def blocks(times_us: Sequence[float], count: int) -> list[Sequence[float]]:
    """`count` consecutive blocks of nearly equal length; fewer where there are fewer samples."""
    return windows(times_us, max(1, len(times_us) // count))


def _window_minima(times_us: Sequence[float], *, width: int) -> float:
    return median([min(window) for window in windows(times_us, width)])


def _window_medians(times_us: Sequence[float], *, width: int) -> float:
    return min(median(window) for window in windows(times_us, width))


def _block_minima(times_us: Sequence[float]) -> float:
    return median([min(block) for block in blocks(times_us, _BLOCKS)])


def _default(times_us: Sequence[float]) -> float:
    return median(ESTIMATORS["windows"](times_us))


CANDIDATES: Registry[tuple[str, Candidate]] = Registry("estimator")
CANDIDATES.add("median", ("median of every sample", median))
CANDIDATES.add(
    "default", ("median of window minima, width by number: the default on CPU", _default)
)
for _width in (2, 4, 8, 16):
    CANDIDATES.add(
        f"minima-{_width}",
        (f"median of minima of {_width} samples", partial(_window_minima, width=_width)),
    )
CANDIDATES.add("blocks", (f"median of minima of {_BLOCKS} blocks", _block_minima))
CANDIDATES.add("medians", ("lowest median of 8 samples", partial(_window_medians, width=8)))
CANDIDATES.add("p10", ("10th percentile", partial(quantile, share=0.1)))
CANDIDATES.add("p20", ("20th percentile", partial(quantile, share=0.2)))
CANDIDATES.add("minimum", ("minimum", min))
