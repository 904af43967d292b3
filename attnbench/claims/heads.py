"""Claims on heads: shapes, weights, combining them, and what a head is not."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import BASICS, CHAPTER, LLAMA, PERSPECTIVES, Answer, identity
from attnbench.claims.exact import Array, decide, draws, error, said
from attnbench.claims.formulas import attention, merge, softmax, split

_SIZES = ((4, 8, 2), (5, 12, 3), (64, 64, 8))  # (n, E, H)


def product_shape(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, ...] | None:
    """The shape of the product of two matrices; None where it is undefined."""
    try:
        return (np.zeros(first) @ np.zeros(second)).shape
    except ValueError:
        return None


@identity(
    "head-weight-shapes",
    BASICS,
    "Mathematical Form of Multi-Head Attention",
    "each head's W^Q, W^K and W^V are square, d_k × d_k and d_v × d_v",
    wrong="d_model × d_k and d_model × d_v: a head maps the whole width to its own",
    reading="with d_k = d_model/h, as in the same note's code. Read as heads of full width they"
    " would fit, but take h times the parameters of that code",
)
def square_weights() -> Answer:
    """Eight heads of a model of width 512: whether x · W_i is defined, and fits W^O."""
    n, width, heads, d = 10, 512, 8, 64
    printed, right = product_shape((n, width), (d, d)), product_shape((n, width), (width, d))
    figures = {
        "parameters_in_the_notes_code": 3 * width * width,
        "parameters_d_model_by_d_k": heads * 3 * width * d,
        "parameters_square_at_full_width": heads * 3 * width * width,
    }
    if right != (n, d):
        return Answer(verdict="inconclusive", reason="the correction does not fit either")
    reason = f"({n}, {width}) × ({d}, {d}) is {printed or 'undefined'}; × ({width}, {d}) is {right}"
    return said(printed == (n, d), reason, **figures)


@identity(
    "weight-times-token",
    CHAPTER,
    "A Simple Example",
    "a token of width 8 is projected as W × token, with W of shape 8 × 4 for each of two heads",
    wrong="token × W: an 8 × 4 matrix takes rows of 8 from the left; W × token needs 4 × 8",
    reading="the orientation is given with one head, where W is square, and the shape with two",
)
def weight_before_token() -> Answer:
    """Both orders of the product."""
    printed, right = product_shape((8, 4), (8, 1)), product_shape((1, 8), (8, 4))
    if right != (1, 4):
        return Answer(verdict="inconclusive", reason="the correction does not fit either")
    reason = f"(8, 4) × (8, 1) is {printed or 'undefined'}; (1, 8) × (8, 4) is {right}"
    return said(printed is not None, reason, printed=str(printed), corrected=str(right))


@identity(
    "embedding-width",
    PERSPECTIVES,
    "Self-Attention",
    "embedded tokens form a matrix with as many columns as the vocabulary has words",
    wrong="its columns are the embedding's width; only one-hot rows are as wide as the vocabulary",
    reading="v is called the size of the vocabulary there, and serves as the width ever after",
)
def embedding_width() -> Answer:
    """Seven tokens of a vocabulary of 1000 looked up in a table of width 64."""
    table_VE = draws(50).normal(size=(1000, 64))
    rows_LE = table_VE[draws(51).integers(1000, size=7)]
    reason = f"7 tokens of a vocabulary of 1000, embedded in 64: {rows_LE.shape}"
    return said(rows_LE.shape == (7, 1000), reason, columns=rows_LE.shape[1])


def heads_of(n: int, width: int, heads: int) -> tuple[Array, Array]:
    """Tokens (n, E), and weights of each head for q, k and v: (3, H, E, D)."""
    rng = draws(52, n)
    shape = (3, heads, width, width // heads)
    return rng.normal(size=(n, width)), rng.normal(size=shape) / np.sqrt(width)


def one_by_one(x: Array, weights_3HED: Array) -> Array:
    """The literal formula: a head at a time, then side by side."""
    w_q, w_k, w_v = weights_3HED
    rows = zip(w_q, w_k, w_v, strict=True)
    return np.concatenate([attention(x @ q, x @ k, x @ v) for q, k, v in rows], axis=-1)


def side_by_side(weights_HED: Array) -> Array:
    """[W⁽¹⁾ W⁽²⁾ …], (E, H·D)."""
    return np.concatenate(list(weights_HED), axis=-1)


@identity(
    "combined-matrix",
    PERSPECTIVES,
    "Multi-Head Attention",
    "the heads' matrices can be combined into one for q, one for k and one for v",
    reading="as far as the projections go; for the attention after it see combined-softmax",
)
def combined_projection() -> Answer:
    """Blocks of the combined product, split into heads, against the literal formula."""
    worst = 0.0
    for n, width, heads in _SIZES:
        x, weights = heads_of(n, width, heads)
        q, k, v = (split(x @ side_by_side(w), heads) for w in weights)
        worst = max(worst, error(merge(attention(q, k, v)), one_by_one(x, weights)))
    return decide(worst)


@identity(
    "combined-softmax",
    PERSPECTIVES,
    "Multi-Head Attention",
    "one attention over the combined projections, f(QW, KW, VW) of width h·d, gives all heads",
    wrong="that is a single head h times as wide, with one softmax over the sum of the heads'"
    " scores: split the columns into heads first, and give each its own softmax",
)
def one_softmax() -> Answer:
    """One f over the whole width, and over the split one, against the literal formula."""
    printed, corrected = np.inf, 0.0
    for n, width, heads in _SIZES:
        x, weights = heads_of(n, width, heads)
        q, k, v = (x @ side_by_side(w) for w in weights)
        wanted = one_by_one(x, weights)
        printed = min(printed, error(attention(q, k, v), wanted))
        parts = merge(attention(*(split(y, heads) for y in (q, k, v))))
        corrected = max(corrected, error(parts, wanted))
    return decide(float(printed), corrected)


@identity(
    "combined-flexibility",
    BASICS,
    "2. QKV Projection & Splitting",
    "one matrix for q, k and v limits what a head's own projection can be",
    wrong="every choice of per-head matrices is a choice of the combined one, and vice versa",
)
def combined_is_as_flexible() -> Answer:
    """Arbitrary per-head matrices rebuilt from one (3E, E) matrix as the note stores it."""
    lost = 0.0
    for n, width, heads in _SIZES:
        x, weights = heads_of(n, width, heads)
        qkv = np.concatenate([side_by_side(w) for w in weights], axis=-1).T
        q, k, v = (split(y, heads) for y in np.split(x @ qkv.T, 3, axis=-1))
        lost = max(lost, error(merge(attention(q, k, v)), one_by_one(x, weights)))
    reason = f"random per-head matrices come out of one (3E, E) matrix up to {lost:.1g}"
    return said(lost > 1e-3, reason, largest_error=lost)


@identity(
    "similarity",
    PERSPECTIVES,
    "Multi-Head Attention",
    "with weights the similarity of queries and keys is Q W_Q W_Kᵀ Kᵀ",
)
def learned_similarity() -> Answer:
    """Both orders of the product."""
    worst = 0.0
    for n, width, heads in _SIZES:
        x, (w_q, w_k, _) = heads_of(n, width, heads)
        for q, k in zip(w_q, w_k, strict=True):
            worst = max(worst, error((x @ q) @ (x @ k).T, x @ (q @ k.T) @ x.T))
    return decide(worst)


@identity(
    "heads-view",
    LLAMA,
    "Step 2",
    "viewing the width as heads × head dim and swapping axes is cutting the matrix into blocks of"
    " columns, one a head",
)
def view_is_blocks() -> Answer:
    """Against slices of columns, for the note's 4 × 6 in two heads and others."""
    worst = 0.0
    for n, width, heads in ((4, 6, 2), *_SIZES):
        x = draws(53, n).random(size=(n, width))
        worst = max(worst, error(split(x, heads), np.array(np.split(x, heads, axis=-1))))
    return decide(worst)


@identity(
    "heads-merge",
    LLAMA,
    "Step 4",
    "swapping the axes back and reshaping undoes the split, and puts the heads side by side",
)
def merge_undoes_split() -> Answer:
    """Merged after split, and against concatenation."""
    worst = 0.0
    for n, width, heads in _SIZES:
        x = draws(54, n).normal(size=(n, width))
        parts = split(x, heads)
        beside = np.concatenate(list(parts), axis=-1)
        worst = max(worst, error(merge(parts), x), error(beside, x))
    return decide(worst)


@identity(
    "heads-batched",
    LLAMA,
    "Step 3",
    "two products over stacked matrices compute the attention of every head separately",
)
def stacked_products() -> Answer:
    """All heads at once against a loop over them."""
    worst = 0.0
    for n, width, heads in _SIZES:
        q, k, v = draws(55, n).normal(size=(3, heads, n, width // heads))
        looped = np.array([attention(q[h], k[h], v[h]) for h in range(heads)])
        worst = max(worst, error(attention(q, k, v), looped))
    return decide(worst)


# The indentation of the printed forward: its first line is deeper than the next.
_PRINTED = "def forward(x):\n            n = len(x)\n        return n\n"
_MENDED = "def forward(x):\n    n = len(x)\n    return n\n"


def _compiles(code: str) -> bool:
    try:
        compile(code, "note", "exec")
    except SyntaxError:
        return False
    return True


@identity(
    "llama-code",
    LLAMA,
    "Multi-head Attention",
    "the printed forward of LlamaAttention runs and is that model's attention",
    wrong="its first line is indented too far, which Python refuses; and it leaves out the mask"
    " and the rotation, which its arguments and __init__ provide, and o_proj, which Step 5 adds:"
    " as printed every token sees the future",
    reading="the note says that only the core was kept; what is printed is checked all the same",
)
def llama_code() -> Answer:
    """Its indentation, and whether a later token changes earlier outputs, with a mask and not."""
    if not _compiles(_MENDED):
        return Answer(verdict="inconclusive", reason="the mended indentation is refused, too")
    q, k, v = draws(56).normal(size=(3, 2, 9, 4))
    leak = []
    for mask in (None, np.tri(9)):
        before = attention(q, k, v, admitted_LS=mask)[:, :-1]
        k_later, v_later = k.copy(), v.copy()
        k_later[:, -1], v_later[:, -1] = 3.0, -3.0
        after = attention(q, k_later, v_later, admitted_LS=mask)[:, :-1]
        leak.append(error(after, before))
    runs = "compiles" if _compiles(_PRINTED) else "does not compile"
    reason = (
        f"the indentation {runs}; a changed last token changes earlier outputs by {leak[0]:.2g}"
    )
    if leak[1] > 0:
        return Answer(verdict="inconclusive", reason=f"{reason}, with a mask by {leak[1]:.2g}")
    reason += ", with a causal mask by 0"
    return said(_compiles(_PRINTED) and leak[0] == 0, reason, leak=leak[0], leak_masked=leak[1])


@identity(
    "parameter-free",
    PERSPECTIVES,
    "Self-Attention",
    "self-attention is f(X, X, X): keys and values are the tokens themselves, nothing is learned",
    misleading="so defined it is no more than an average of similar tokens: scores are symmetric,"
    " and where tokens have entries of order 1 each looks almost only at itself once the width is"
    " large. In a Transformer Q, K and V are three learned projections of X",
)
def parameter_free() -> Answer:
    """Shapes and convexity as stated; the weight on itself, with and without projections."""
    fits = True
    own: dict[int, float] = {}
    projected: dict[int, float] = {}
    for n, width, heads in _SIZES:
        x, _ = heads_of(n, width, heads)
        y = attention(x, x, x)
        fits &= y.shape == x.shape and bool(np.all(y <= x.max(0) + 1e-12))
        fits &= bool(np.all(y >= x.min(0) - 1e-12))
        w_q, w_k = draws(57, n).normal(size=(2, width, width)) / np.sqrt(width)
        for into, scores in ((own, x @ x.T), (projected, (x @ w_q) @ (x @ w_k).T)):
            into[n] = float(np.diag(softmax(scores / np.sqrt(width))).mean())
    reason = (
        f"shape and averages as stated; at n = 64, width 64 a token gives {100 * own[64]:.0f} % of"
        f" its weight to itself, with random projections {100 * projected[64]:.1f} %"
    )
    return said(fits, reason, own_weight=own[64], own_weight_projected=projected[64])
