"""Claims that compare attention with recurrent networks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnbench.base.units import ratio
from attnbench.claims.claim import SCRATCH, Answer, LackingError, identity, of_run
from attnbench.claims.evidence import Evidence, Pairs
from attnbench.claims.exact import Array, draws, said
from attnbench.claims.formulas import attention
from attnbench.schema.finding import Figure, Verdict
from attnbench.schema.record import Record

Step = Callable[[Array], Array]
CLAIMED = 100.0


def steps_between(step: Step, state: Array, first: int, last: int) -> int:
    """How often `step` must be applied until a change of token `first` reaches token `last`."""
    changed = state.copy()
    changed[first] += 0.5
    for count in range(1, len(state) + 1):
        state, changed = step(state), step(changed)
        if not np.array_equal(state[last], changed[last]):
            return count
    return 0  # never


@identity(
    "path-length",
    SCRATCH,
    "2. Long-Range Dependencies",
    "from word 1 to word 100 a recurrent network takes 99 steps and attention one",
)
def path_length() -> Answer:
    """A change of the first word, followed until it reaches the last."""
    rng = draws(80)
    x = rng.normal(size=(100, 4))
    recurrent = np.linalg.qr(rng.normal(size=(4, 4)))[0]

    def recur(h: Array) -> Array:
        """Every word's state from that of the word before it.

        Linear and orthogonal: with tanh the change would vanish in float64 on the way.
        """
        before = np.vstack((h[:1] * 0, h[:-1]))
        return np.asarray(before @ recurrent + x)

    serial = steps_between(recur, x.copy(), 0, 99)
    direct = steps_between(lambda h: attention(h, h, h), x, 0, 99)
    reason = (
        f"a change of word 1 reaches word 100 after {serial} steps of recurrence,"
        f" {direct} of attention"
    )
    return said((serial, direct) == (99, 1), reason, recurrent=serial, attention=direct)


def against_layer(evidence: Evidence) -> Pairs:
    """Recurrent cells, each with the fused layer of the same width, length, batch and pass.

    Raises:
        LackingError: no two cells are so alike.
    """
    layers = {
        _alike(record): record
        for record in evidence.cells(workload="layer", impl="sdpa")
        if record.cell.case.projection in (None, "fused")
    }
    recurrent = evidence.cells(workload="recurrent")
    pairs = [(r, layers[_alike(r)]) for r in recurrent if _alike(r) in layers]
    if not pairs:
        raise LackingError("no recurrent cell has a layer of its width, length and pass")
    return pairs


def _alike(record: Record) -> tuple[object, ...]:
    case = record.cell.case
    return case.device, case.dtype, case.pass_, case.batch, case.model_width, case.seq_len


@of_run(
    "recurrent-100x",
    SCRATCH,
    "1. Parallel Processing",
    "attention trains 100 times faster than a recurrent network on GPUs",
    kind="timed",
    wrong="there is no such factor: it grows with the number of serial steps until n²·d overtakes"
    " them, and depends on width, batch, device and kernel",
    reading="at every length measured, by the time of a layer (sdpa) against a GRU of equal width;"
    " a run on a CPU shows its own factors and decides nothing about GPUs",
)
def hundredfold(evidence: Evidence) -> Answer:
    """Time of the GRU / of the layer: refuted by one GPU length that is clearly below 100."""
    pairs = against_layer(evidence)
    on_gpu = [pair for pair in pairs if pair[0].cell.case.device == "cuda"]
    compared = evidence.ratios(on_gpu or pairs)
    least = min(compared, key=lambda one: one.value)
    most = max(compared, key=lambda one: one.value)
    figures: dict[str, Figure] = {
        "least_ratio": least.value,
        "least_at": least.label,
        "most_ratio": most.value,
        "most_at": most.label,
        "compared": len(compared),
    }
    reason = f"GRU / layer: {least.text(ratio)} to {most.text(ratio)}"
    if not on_gpu:
        reason += "; on a CPU, while the note speaks of GPUs"
    verdict: Verdict = "inconclusive"
    if on_gpu and any(one.below(CLAIMED) for one in compared):
        verdict = "refuted"
    elif on_gpu and all(one.above(CLAIMED) for one in compared):
        verdict = "holds"
    return Answer(verdict=verdict, reason=reason, figures=figures)
