"""Claims on causal masks."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import BASICS, CHAPTER, Answer, identity
from attnbench.claims.exact import Array, decide, draws, error, said
from attnbench.claims.formulas import attention
from attnbench.schema.case import parse_mask
from attnbench.theory.costs import admitted_pairs


def admitted(queries: int, keys: int) -> Array:
    """1 where query i sees key j ≤ i + (keys − queries), by that definition."""
    return np.array([[float(j <= i + keys - queries) for j in range(keys)] for i in range(queries)])


@identity(
    "mask-past",
    BASICS,
    "4. Attention Mask Construction",
    "tril(ones(S, S_full), diagonal = past length) is the causal mask of S tokens after a past",
    reading="S_full = past length + S",
)
def mask_with_a_past() -> Answer:
    """Against the definition, and its pairs against the count used for FLOPs everywhere here."""
    worst, lengths = 0.0, ((3, 0), (1, 9), (4, 4), (5, 130))
    for new, past in lengths:
        mask = np.tri(new, new + past, past)
        pairs = admitted_pairs(parse_mask("causal"), new, new + past)
        worst = max(worst, error(mask, admitted(new, new + past)), abs(mask.sum() - pairs))
    return decide(worst, of="largest difference of the mask")


@identity(
    "mask-parallel",
    BASICS,
    "4. Attention Mask Construction",
    "the mask hides the future and still lets all tokens of a training sequence go at once",
)
def one_pass_is_all_prefixes() -> Answer:
    """One masked pass against the last output of every prefix on its own."""
    worst = 0.0
    for n in (2, 9, 65):
        q, k, v = draws(40, n).normal(size=(3, n, 8))
        whole = attention(q, k, v, admitted_LS=np.tri(n))
        alone = [attention(q[t : t + 1], k[: t + 1], v[: t + 1])[0] for t in range(n)]
        worst = max(worst, error(whole, np.array(alone)))
    return decide(worst)


@identity(
    "window-linear",
    CHAPTER,
    "Strategies to Mitigate Inefficiency: Sparse or Limited Attention",
    "sparse patterns bring the pairs from O(n²) down to about O(n)",
    reading="a window of w keys, w fixed while n grows; other patterns are not measured here",
)
def window_is_linear() -> Answer:
    """Pairs of a window of 64, counted one by one, over four doublings of n."""
    sizes = [256 * 2**i for i in range(5)]
    near = [np.minimum(np.arange(n) + 1, 64).sum() for n in sizes]
    counted = [admitted_pairs(parse_mask("window:64"), n, n) for n in sizes]
    growth = float(np.log2(near[-1] / near[-2]))
    reason = f"pairs grow as n^{growth:.3f} from n = {sizes[-2]} to {sizes[-1]}"
    return said(counted == near and abs(growth - 1) < 0.05, reason, growth=growth)
