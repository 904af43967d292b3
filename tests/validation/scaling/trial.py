"""Draw the kernels' times, have them judged as `attnbench verify` does, and count the answers."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnbench.analysis.scaling.exponents import fit_many
from attnbench.analysis.scaling.results import ExponentFit, Series
from attnbench.base.stats import median
from attnbench.schema.finding import Verdict
from attnbench.theory.law import parse
from tests.validation.scaling.kernels import KERNELS, LAWS, Kernel, Range, right
from tests.validation.scaling.noise import one_process, several_processes
from tests.validation.scaling.usual import usual

Judge = Callable[[Sequence[Series]], list[ExponentFit]]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How often a kernel got each verdict on one law, over a range; `right` is None for unresolved.

    `span` is the range in octaves, `octaves` what of it the floor does not drown.
    """

    over: str
    span: float
    octaves: float
    kernel: str
    law: str
    own: bool
    right: Verdict | None
    counts: dict[Verdict, int]

    @property
    def draws(self) -> int:
        """How often it was asked."""
        return sum(self.counts.values())

    @property
    def wrong(self) -> int:
        """How often the opposite of what is right was said."""
        opposite: dict[Verdict | None, Verdict] = {"holds": "refuted", "refuted": "holds"}
        return self.counts[opposite[self.right]] if self.right else 0


@dataclass(frozen=True, kw_only=True)
class Picks:
    """How often the usual rule picked each curve for a kernel."""

    over: str
    kernel: str
    counts: dict[str, int]


def drawn(kernel: Kernel, over: Range, draws: int, seed: int) -> list[Series]:
    """Series of the kernel with noise and a floor measured at n = 1, half from one process.

    Their law is not set. The same seed gives the same series whatever else is drawn.
    """
    clean = [kernel.floor_us(over), *(kernel.time_us(n, over) for n in over.sizes)]
    names = tuple(kernel.name(n) for n in over.sizes)
    rng = np.random.default_rng([seed, zlib.crc32(f"{names}{clean}".encode())])
    found = []
    for index in range(draws):
        floor, *times = (one_process, several_processes)[index % 2](clean, rng)
        found.append(
            Series(
                impl="kernel", workload="attention", axis="n", same="imagined",
                sizes=tuple(map(float, over.sizes)), times_us=tuple(times), overhead_us=floor,
                kernels=names,
            )
        )  # fmt: skip
    return found


def ask(
    name: str, over: Range, draws: int, seed: int, judge: Judge = fit_many
) -> tuple[list[Answers], Picks]:
    """Every law asked of one kernel over one range, and what the usual rule picks."""
    kernel = KERNELS[name]
    series = drawn(kernel, over, draws, seed)
    answers = []
    for text in LAWS:
        law = parse(text)
        fits = judge([replace(one, law=law) for one in series])
        said = Counter(fit.finding.verdict for fit in fits if fit.finding is not None)
        answers.append(
            Answers(
                over=over.label, span=over.octaves, octaves=kernel.octaves(over),
                kernel=name, law=text, own=text == kernel.law, right=right(kernel, text, over),
                counts={v: said[v] for v in ("holds", "refuted", "inconclusive")},
            )
        )  # fmt: skip
    picked = Counter(usual(one.sizes, [median(t) for t in one.times_us]) for one in series)
    return answers, Picks(over=over.label, kernel=name, counts=dict(picked))
