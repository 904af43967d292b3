"""Claims on FLOPs, memory and time that a run's sweeps over n, d and heads decide."""

from __future__ import annotations

from attnbench.claims.claim import BASICS, CHAPTER, PERSPECTIVES, Answer, LackingError, of_run
from attnbench.claims.counts import alike, is_sum_of, split
from attnbench.claims.evidence import Evidence, Pairs, combined
from attnbench.claims.exact import said
from attnbench.schema.case import Case
from attnbench.schema.record import Record

# In half precision naive holds the scores twice in float32 beside the weights: five in all.
MOST_BUFFERS = 5.5
_PLAIN = {"pass": "forward", "mask": "full"}


def rows_width(case: Case) -> float:
    """What n · d² stands for: B·n·E·H·D."""
    return float(case.batch * case.seq_len * case.model_width * case.heads * case.head_dim)


def square_width(case: Case) -> float:
    """What n² · d stands for: B·n²·H·D."""
    return float(case.batch * case.seq_len**2 * case.heads * case.head_dim)


@of_run(
    "total-flops",
    CHAPTER,
    "2. Multi-Head Attention, E. Total Cost",
    "a layer costs n·d² for projections and n²·d for attention, and nothing else of that order",
    kind="counted",
)
def layer_flops(evidence: Evidence) -> Answer:
    """Counted FLOPs of the layer, told apart into the two terms."""
    cells = alike(evidence.cells(workload="layer", impl="naive", **_PLAIN))
    found = split(cells, "flops_counted", {"n d^2": rows_width, "n^2 d": square_width})
    return is_sum_of(found, "FLOPs")


@of_run(
    "total-time",
    CHAPTER,
    "2. Multi-Head Attention, E. Total Cost",
    "the time of a layer grows as O(n·d² + n²·d)",
    kind="timed",
)
def layer_time(evidence: Evidence) -> Answer:
    """The verdicts of the models fitted to the layer's times."""
    return combined(m.finding for m in evidence.scaling.models if m.workload == "layer")


@of_run(
    "attention-time",
    CHAPTER,
    "Comparison and Key Points",
    "the time of attention grows quadratically with n",
    kind="timed",
    reading="of a core that forms the scores (naive), where the launch no longer weighs",
)
def attention_time(evidence: Evidence) -> Answer:
    """The verdicts of the exponents fitted to the times of naive along n."""
    fits = (fit for fit in evidence.scaling.exponents if fit.series.axis == "n")
    wanted = ("naive", "attention")
    return combined(f.finding for f in fits if (f.series.impl, f.series.workload) == wanted)


def fixed_width(evidence: Evidence, impl: str) -> Pairs:
    """Cells of the most and the fewest heads that share n, batch and H·D.

    Raises:
        LackingError: no two cells differ so.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in evidence.cells(workload="attention", impl=impl, **_PLAIN):
        case = record.cell.case
        if case.kv_heads == case.heads and case.value_dim == case.head_dim:
            key = (case.seq_len, case.kv_len, case.batch, case.heads * case.head_dim)
            rest = (case.device, case.dtype, case.position.text)
            groups.setdefault((*key, *rest), []).append(record)
    ordered = [sorted(rows, key=lambda r: r.cell.case.heads) for rows in groups.values()]
    pairs = [(r[-1], r[0]) for r in ordered if r[-1].cell.case.heads > r[0].cell.case.heads]
    if not pairs:
        raise LackingError(f"no cells of {impl} share a width H·D and differ in H")
    return pairs


def _metrics(pairs: Pairs, name: str) -> list[tuple[float, float, Case, Case]]:
    found = [
        (float(a.metrics[name]), float(b.metrics[name]), a.cell.case, b.cell.case)
        for a, b in pairs
        if a.metrics.get(name) and b.metrics.get(name)
    ]
    if not found:
        raise LackingError(f"no cells of that kind have {name}")
    return found


@of_run(
    "heads-flops",
    CHAPTER,
    "2. Multi-Head Attention, B. Attention Score Computation per Head",
    "at the same total width attention takes the same FLOPs for any number of heads",
    kind="counted",
)
def heads_flops(evidence: Evidence) -> Answer:
    """Counted FLOPs at the most and the fewest heads."""
    found = _metrics(fixed_width(evidence, "naive"), "flops_counted")
    worst = max(abs(many / few - 1) for many, few, _, _ in found)
    many, few, case, other = found[-1]
    reason = (
        f"{many:.4g} FLOPs with H = {case.heads}, {few:.4g} with H = {other.heads}"
        f" (n = {case.seq_len}, H·D = {case.heads * case.head_dim})"
    )
    return said(worst == 0, reason, largest_difference=worst)


@of_run(
    "heads-memory",
    CHAPTER,
    "Comparison and Key Points",
    "H heads store H score matrices of n × n where one head stores one",
    kind="counted",
    reading="of a core that stores them (naive), at the same total width",
)
def heads_memory(evidence: Evidence) -> Answer:
    """Workspace added by each further head, in score matrices: a few are held at once."""
    found = _metrics(fixed_width(evidence, "naive"), "memory_workspace_bytes")
    buffers = []
    for many, few, case, other in found:
        matrix = case.batch * case.seq_len**2 * case.element_bytes
        buffers.append((many - few) / ((case.heads - other.heads) * matrix))
    reason = f"each further head adds {min(buffers):.2f} to {max(buffers):.2f} matrices of n × n"
    held = all(0.95 < count < MOST_BUFFERS for count in buffers)
    return said(held, reason, least_matrices=min(buffers), most_matrices=max(buffers))


@of_run(
    "heads-time",
    CHAPTER,
    "A Simple Example, Case 2: Two-Head Attention",
    "two half-sized heads are not free: half and half is more than the whole",
    kind="timed",
    reading="of naive at the same total width, the most heads against the fewest, at the largest n",
)
def heads_time(evidence: Evidence) -> Answer:
    """Time of the most heads / of the fewest."""
    pairs = evidence.at_largest(fixed_width(evidence, "naive"))
    return evidence.more_than(evidence.ratios(pairs), 1.0, "time of most heads / of fewest")


@of_run(
    "heads-parallel",
    CHAPTER,
    "Comparison and Key Points",
    "computing all heads at once may improve throughput over one after another",
    kind="timed",
    misleading="at small n it does, by the launches saved; on a CPU a head at a time keeps its"
    " scores in cache, and the loop can win at large n",
    reading="naive (batched) against naive-heads (a loop over heads), at every size",
    machine=True,
)
def heads_parallel(evidence: Evidence) -> Answer:
    """Time of the loop / time of all heads at once."""
    pairs = evidence.pairs(
        {"impl": "naive-heads"}, {"impl": "naive"}, workload="attention", **_PLAIN
    )
    return evidence.more_than(evidence.ratios(pairs), 1.0, "loop over heads / all at once")


def _scores(case: Case) -> float:
    return float(case.batch * case.heads * case.seq_len * case.kv_len)


def _scores_bytes(case: Case) -> float:
    return _scores(case) * case.element_bytes


def _rows_bytes(case: Case) -> float:
    return float(case.batch * case.heads * case.seq_len * case.head_dim * case.element_bytes)


@of_run(
    "scores-memory",
    CHAPTER,
    "Sources of Inefficiency: Memory Footprint",
    "the scores take B·h·n² elements",
    kind="counted",
    reading="of a core that stores them (naive), which has two or three such buffers at once",
)
def scores_memory(evidence: Evidence) -> Answer:
    """Workspace of naive told apart into B·H·n² and B·H·n·D."""
    fields = {"workload": "attention", "impl": "naive", "position": "none", **_PLAIN}
    # At small n what a block is rounded up to would count.
    cells = [r for r in alike(evidence.cells(**fields)) if r.cell.case.seq_len >= 64]
    terms = {"B H n^2": _scores_bytes, "B H n D": _rows_bytes}
    found = split(cells, "memory_workspace_bytes", terms)
    buffers = found.coefficients["B H n^2"]
    reason = f"workspace = {found.text} elements"
    held = 0.95 < buffers < MOST_BUFFERS and found.residual < 0.05
    return said(held, reason, buffers=buffers, **found.figures("elements"))


def _least_workspace(evidence: Evidence, impl: str) -> tuple[float, int]:
    """Workspace of `impl` at its largest n, in score matrices of all heads, and that n."""
    cells = evidence.cells(workload="attention", impl=impl, **_PLAIN)
    known = [r for r in cells if r.metrics.get("memory_workspace_bytes") is not None]
    if not known:
        raise LackingError(f"no cell of {impl} has a measured workspace")
    top = max(known, key=lambda r: r.cell.case.seq_len)
    case = top.cell.case
    if case.seq_len < 16 * case.head_dim:
        raise LackingError(f"n = {case.seq_len} of {impl} is too short to tell n² from n·d")
    matrix = _scores_bytes(case)
    return top.metrics["memory_workspace_bytes"] / matrix, case.seq_len


@of_run(
    "scores-needed",
    CHAPTER,
    "Comparison and Key Points",
    "attention needs to store its n × n matrices, so memory is quadratic in n",
    kind="counted",
    wrong="only if they are formed whole: with blocks and a running softmax (chunked, SDPA) the"
    " workspace is O(n)",
)
def scores_needed(evidence: Evidence) -> Answer:
    """Workspace of chunked beside that of naive, in score matrices, at the largest n."""
    (least, n), (whole, _) = (_least_workspace(evidence, impl) for impl in ("chunked", "naive"))
    figures = {"chunked_in_matrices": least, "naive_in_matrices": whole, "n": n}
    reason = (
        f"chunked holds {100 * least:.2g} % of the scores at n = {n}, naive {100 * whole:.0f} %"
    )
    if whole < 0.95:
        return Answer(verdict="inconclusive", reason=reason, figures=figures)
    return said(least >= 0.95, reason, **figures)


@of_run(
    "fused-memory",
    BASICS,
    "5. Scaled Dot-Product Attention Core",
    "scaled_dot_product_attention uses a fused kernel that saves memory",
    kind="counted",
    reading="its workspace is below half of the score matrices, on the run's device; the note says"
    " CUDA",
)
def fused_memory(evidence: Evidence) -> Answer:
    """Workspace of sdpa in score matrices at the largest n."""
    least, n = _least_workspace(evidence, "sdpa")
    reason = f"sdpa allocates {100 * least:.2g} % of the score matrices at n = {n}"
    return said(least < 0.5, reason, sdpa_in_matrices=least, n=n)


@of_run(
    "fused-projection",
    BASICS,
    "Parameter Initialization Deep Dive",
    "one combined QKV matrix uses the hardware better than three",
    kind="timed",
    misleading="FLOPs and weights are the same; two launches and two readings of x are saved, which"
    " shows where they weigh: at small sizes",
    reading="faster by more than 3 %, at every size measured",
    machine=True,
)
def fused_projection(evidence: Evidence) -> Answer:
    """Time of the layer with three matrices / with one."""
    return _projections(evidence, "separate")


@of_run(
    "per-head-projection",
    PERSPECTIVES,
    "Multi-Head Attention",
    "in practice the heads' matrices are combined, not applied one by one",
    kind="timed",
    reading="because that is faster by more than 3 %, at every size measured",
    machine=True,
)
def per_head_projection(evidence: Evidence) -> Answer:
    """Time of the layer with a matrix per head / with one."""
    return _projections(evidence, "per-head")


def _projections(evidence: Evidence, other: str) -> Answer:
    pairs = evidence.pairs({"projection": other}, {"projection": "fused"}, workload="layer")
    compared = evidence.ratios(pairs)
    return evidence.more_than(compared, 1.03, f"time with {other} projections / fused")
