"""Claims on generating token by token, with a cache and without."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import CHAPTER, Answer, LackingError, identity, of_run
from attnbench.claims.counts import alike, is_sum_of, split
from attnbench.claims.evidence import Evidence
from attnbench.claims.exact import Array, decide, draws, error, said
from attnbench.claims.formulas import Tally, attention
from attnbench.schema.case import Case

LONG = 4  # widths: from here on two thirds of the FLOPs of a rerun are quadratic
O_TOLERANCE = 0.15  # of an exponent, as for every other law


@identity(
    "cache-exact",
    CHAPTER,
    "3.2. Detailed Math",
    "attention of the new token over cached keys and values is that over recomputed ones",
)
def cached_is_exact() -> Answer:
    """Token by token with a cache against the causal layer over all tokens."""
    worst = 0.0
    for n, width in ((1, 4), (9, 8), (70, 16)):
        x, (w_q, w_k, w_v) = _layer(n, width)
        whole = attention(x @ w_q, x @ w_k, x @ w_v, admitted_LS=np.tri(n))
        k, v = np.zeros((0, width)), np.zeros((0, width))
        steps = []
        for t in range(n):
            k, v = np.vstack((k, x[t : t + 1] @ w_k)), np.vstack((v, x[t : t + 1] @ w_v))
            steps.append(attention(x[t : t + 1] @ w_q, k, v)[0])
        worst = max(worst, error(np.array(steps), whole))
    return decide(worst)


def _layer(n: int, width: int) -> tuple[Array, Array]:
    rng = draws(70, n)
    return rng.normal(size=(n, width)), rng.normal(size=(3, width, width)) / np.sqrt(width)


def step_flops(t: int, width: int, *, cached: bool) -> tuple[int, int]:
    """FLOPs counted at step t for one head: of the projections, and of attention.

    Without a cache the layer is run again over all t tokens.
    """
    projections, core = Tally(), Tally()
    x, weights = np.ones((t, width)), np.ones((3, width, width)) / width
    new = x[-1:] if cached else x
    q, k, v = (projections.product(new, w) for w in weights)
    if cached:  # the earlier keys and values are there
        k, v = np.broadcast_to(k, (t, width)), np.broadcast_to(v, (t, width))
    attention(q, k, v, tally=core)
    return projections.flops, core.flops


def total_flops(tokens: int, *, cached: bool, core_only: bool = False) -> int:
    """FLOPs of generating `tokens` tokens at width 2, so that n is long beside d."""
    steps = (step_flops(t, 2, cached=cached) for t in range(1, tokens + 1))
    return sum(core if core_only else projections + core for projections, core in steps)


@identity(
    "total-cached",
    CHAPTER,
    "Multi-Head Attention (decoding)",
    "over a long sequence the attention of all steps adds up to about n²",
    reading="with a cache, projections left out, as the note says",
)
def total_with_a_cache() -> Answer:
    """Growth of the counted total from 128 to 256 tokens."""
    small, large = (total_flops(t, cached=True, core_only=True) for t in (128, 256))
    growth = float(np.log2(large / small))
    reason = f"counted FLOPs of attention grow as T^{growth:.2f} from 128 to 256 tokens"
    return said(abs(growth - 2) < O_TOLERANCE, reason, growth=growth)


@identity(
    "total-uncached",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "feeding the whole sequence through the layers again at every step costs O(t²) for t tokens",
    wrong="O(t³·d + t²·d²): a run over t tokens is itself O(t²·d + t·d²). With a cache the total is"
    " O(t²·d + t·d²)",
    reading="of operations, at a given width",
)
def total_without_a_cache() -> Answer:
    """Growth of the counted total from 128 to 256 tokens, without a cache and with one."""
    again = [total_flops(t, cached=False) for t in (128, 256)]
    cached = [total_flops(t, cached=True) for t in (128, 256)]
    printed, beside = (float(np.log2(b / a)) for a, b in (again, cached))
    reason = f"counted FLOPs grow as T^{printed:.2f} by rerunning, T^{beside:.2f} with a cache"
    figures = {"growth_rerun": printed, "growth_cached": beside}
    if abs(printed - 3) > O_TOLERANCE:
        reason += ", which is not the cube either"
        return Answer(verdict="inconclusive", reason=reason, figures=figures)
    return said(printed <= 2 + O_TOLERANCE, reason, **figures)


def _one(case: Case) -> float:
    return float(case.batch * case.model_width * case.heads * case.head_dim)


def _context(case: Case) -> float:
    """Keys that a new token sees on average: n + (T + 1)/2."""
    keys = case.seq_len + ((case.new_tokens or 1) + 1) / 2
    return keys * case.batch * case.heads * case.head_dim


def _context_weights(case: Case) -> float:
    return _context(case) * case.model_width


def _context_squared(case: Case) -> float:
    """Mean of the squares of the lengths during generation."""
    lengths = [case.seq_len + t + 1 for t in range(case.new_tokens or 1)]
    mean = sum(length**2 for length in lengths) / len(lengths)
    return mean * case.batch * case.heads * case.head_dim


@of_run(
    "cached-flops",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "with a cache a new token costs O(1) for its own key and value and O(t) for its attention",
    kind="counted",
)
def cached_flops(evidence: Evidence) -> Answer:
    """Counted FLOPs a token told apart into d² and n·d."""
    cells = alike(evidence.cells(workload="decode", cache="static", impl="naive"))
    found = split(cells, "flops_counted", {"d^2": _one, "n d": _context})
    return is_sum_of(found, "FLOPs a token")


@of_run(
    "recomputed-flops",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "recomputing the keys and values of all t tokens, with one query, costs O(t) a token",
    kind="counted",
    reading="the step as section 2 describes it: O(t·d²) for keys and values beside O(t·d) for"
    " attention",
)
def recomputed_flops(evidence: Evidence) -> Answer:
    """Counted FLOPs a token of cache `none`: growth over its top octaves."""
    return _linear(evidence, "none")


@of_run(
    "rerun-flops",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "without a cache, feeding the whole sequence through the layers costs O(t) a token",
    kind="counted",
    wrong="O(t·d² + t²·d) a token: every token attends again. O(t·d²) is the cost of recomputing"
    " keys and values for a single query",
    reading="of operations; as a number of tokens fed it would be t",
)
def rerun_flops(evidence: Evidence) -> Answer:
    """Counted FLOPs a token of cache `rerun`: growth over its top octaves."""
    return _linear(evidence, "rerun")


def _linear(evidence: Evidence, cache: str) -> Answer:
    """Whether counted FLOPs have no term in n², beside those in n and 1."""
    cells = alike(evidence.cells(workload="decode", cache=cache, impl="naive"))
    terms = {"d^2": _one, "n d^2": _context_weights, "n^2 d": _context_squared}
    if len({r.cell.case.model_width for r in cells}) > 1:  # else n·d is part of n·d²
        terms["n d"] = _context
    found = split(cells, "flops_counted", terms)
    if found.residual > 1e-2:
        raise LackingError(f"FLOPs of cache {cache} are no sum of {', '.join(terms)}")
    share = found.shares["n^2 d"]
    n = max(r.cell.case.seq_len for r in cells)
    reason = f"FLOPs a token = {found.text}: {100 * abs(share):.2g} % are quadratic at n = {n}"
    return said(share < 1e-2, reason, **found.figures("FLOPs a token"))


@of_run(
    "cached-time",
    CHAPTER,
    "Multi-Head Attention (decoding)",
    "with a cache the time of a token grows at most linearly with the context",
    kind="timed",
)
def cached_time(evidence: Evidence) -> Answer:
    """Exponent of a token's time over the top two octaves of the context."""
    found = evidence.exponents(workload="decode", cache="static")
    return evidence.at_most(found, 1 + O_TOLERANCE, "a token's time grows as", exponent=True)


@of_run(
    "rerun-time",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "without a cache the time of a token grows linearly with the context",
    kind="timed",
    wrong="by rerunning the layer it tends to n², once n is long beside the width",
)
def rerun_time(evidence: Evidence) -> Answer:
    """Exponent of a token's time over the top two octaves of the context."""
    longest = max(
        r.cell.case.seq_len / r.cell.case.model_width
        for r in evidence.cells(workload="decode", cache="rerun")
    )
    if longest < LONG:
        raise LackingError(f"n ends at {longest:.2g} widths; its square shows from {LONG} on")
    found = evidence.exponents(workload="decode", cache="rerun")
    return evidence.at_most(found, 1 + O_TOLERANCE, "a token's time grows as", exponent=True)


@of_run(
    "cache-speed",
    CHAPTER,
    "5. Why Is Key-Value Caching Important?",
    "a cache speeds up decoding significantly",
    kind="timed",
    reading="at least twice as fast as recomputing keys and values, at the longest context",
)
def cache_speed(evidence: Evidence) -> Answer:
    """Time a token with keys and values recomputed / with a preallocated cache."""
    pairs = evidence.pairs({"cache": "none"}, {"cache": "static"}, workload="decode")
    compared = evidence.ratios(evidence.at_largest(pairs))
    return evidence.more_than(compared, 2.0, "time a token recomputed / cached")


@of_run(
    "cache-grows",
    CHAPTER,
    "Multi-Head Attention (decoding): Increasing Memory Footprint",
    "the cache grows linearly with the sequence: a key and a value per token and head",
    kind="counted",
)
def cache_grows(evidence: Evidence) -> Answer:
    """Bytes that a preallocated cache holds, per token of context and new."""

    def tokens(case: Case) -> float:
        per_token = case.batch * case.kv_heads * (case.head_dim + case.value_dim)
        return float(per_token * (case.seq_len + (case.new_tokens or 1)) * case.element_bytes)

    cells = evidence.cells(workload="decode", cache="static", impl="sdpa", position="none")
    found = split(cells, "memory_prepared_bytes", {"cache bytes": tokens})
    held = found.residual < 0.02 and abs(found.coefficients["cache bytes"] - 1) < 0.02
    reason = f"bytes held = {found.coefficients['cache bytes']:.4f} × 2·B·G·(n + T)·D·element"
    return said(held, reason, **found.figures("bytes"))


@of_run(
    "cache-concatenated",
    CHAPTER,
    "3.2. Detailed Math",
    "with a cache a step just concatenates the new key and value to the old ones",
    kind="counted",
    wrong="concatenation makes the whole cache anew at every step: workspace of the cache's size,"
    " and its traffic several times over. Written in place it takes none",
    reading="as a step that costs no more than its one token",
)
def concatenation_copies(evidence: Evidence) -> Answer:
    """Workspace of a step by concatenation and in place, in caches, at the longest context."""
    pairs = evidence.pairs(
        {"cache": "concat"}, {"cache": "static"}, workload="decode", impl="naive"
    )
    above, below = evidence.at_largest(pairs)[0]
    case = above.cell.case
    per_token = case.batch * case.kv_heads * (case.head_dim + case.value_dim)
    whole = per_token * case.seq_len * case.element_bytes
    grown, in_place = (r.metrics.get("memory_workspace_bytes") for r in (above, below))
    if grown is None or in_place is None:
        raise LackingError("no measured workspace for decode")
    figures = {"concat_in_caches": grown / whole, "static_in_caches": in_place / whole}
    reason = (
        f"at n = {case.seq_len} a step takes {grown / whole:.2f} caches of workspace by"
        f" concatenation, {in_place / whole:.2f} in place"
    )
    if in_place > 0.5 * whole:
        return Answer(verdict="inconclusive", reason=reason, figures=figures)
    return said(grown < 0.5 * whole, reason, **figures)
