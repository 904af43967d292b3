"""Claims on rotary positions (RoPE)."""

from __future__ import annotations

import numpy as np

from attnbench.claims import formulas
from attnbench.claims.claim import BASICS, CHAPTER, Answer, identity, of_run
from attnbench.claims.evidence import Evidence
from attnbench.claims.exact import Array, decide, draws, error
from attnbench.claims.formulas import attention, frequencies, rotated

_WIDTHS = (2, 8, 64, 128)
_PLACES = ((0, 0), (5, 2), (3, 40), (1000, 4096))  # (m, n), of query and key


def _vectors(d: int) -> tuple[Array, Array]:
    q, k = draws(20, d).normal(size=(2, 1, d))
    return q, k


def _score(q: Array, k: Array, m: float, n: float) -> Array:
    return rotated(q, np.array([m])) @ rotated(k, np.array([n])).T


@identity(
    "rope-relative",
    BASICS,
    "Physical Meaning of RoPE",
    "after the rotation the score of a query at m and a key at n depends on m − n alone",
)
def relative() -> Answer:
    """The score before and after both places are moved by the same amount."""
    worst = 0.0
    for d in _WIDTHS:
        q, k = _vectors(d)
        reach = float(np.linalg.norm(q) * np.linalg.norm(k))
        for m, n in _PLACES:
            moved = max(abs(float((_score(q, k, m + s, n + s) - _score(q, k, m, n))[0, 0]))
                        for s in (1, 17, 1000))  # fmt: skip
            worst = max(worst, moved / reach)
    return decide(worst, of="largest change of a score when both places move,")


@identity(
    "rope-matrix",
    CHAPTER,
    "3.1. Rotation in a 2D Subspace",
    "the rotation as a block-diagonal matrix and the elementwise form with sines and cosines"
    " are the same, and keep every vector's length",
)
def matrix_form() -> Answer:
    """Both forms at several places and widths."""
    worst = 0.0
    for d in _WIDTHS:
        x, _ = _vectors(d)
        for place in (0, 1, 7, 4096):
            turned = formulas.rotated(x, np.array([place]))
            product = (formulas.rotation_matrix(d, place) @ x[0])[None]
            longer = abs(float(np.linalg.norm(turned) / np.linalg.norm(x)) - 1)
            worst = max(worst, error(turned, product), longer)
    return decide(worst)


@identity(
    "rope-product-matrix",
    CHAPTER,
    "3.2. Applying RoPE to Queries and Keys",
    "the rotated product is qᵀMk with a matrix M that holds nothing but the distance i − j",
)
def product_matrix() -> Answer:
    """M = R_iᵀR_j against the rotation by j − i, and the product against qᵀMk."""
    worst = 0.0
    for d in _WIDTHS:
        q, k = _vectors(d)
        for i, j in _PLACES:
            m = formulas.rotation_matrix(d, i).T @ formulas.rotation_matrix(d, j)
            reach = float(np.linalg.norm(q) * np.linalg.norm(k))
            off = abs(float((q @ m @ k.T - _score(q, k, i, j))[0, 0])) / reach
            worst = max(worst, error(m, formulas.rotation_matrix(d, j - i)), off)
    return decide(worst)


def expansion(q: Array, k: Array, distance: float, sign: int) -> float:
    """Σ [q₁k₁ + q₂k₂] cos(distance·θ) + sign · [q₂k₁ − q₁k₂] sin(distance·θ) over the pairs."""
    angle = distance * frequencies(q.shape[-1])
    (q1, q2), (k1, k2) = ((x[0, 0::2], x[0, 1::2]) for x in (q, k))
    terms = (q1 * k1 + q2 * k2) * np.cos(angle) + sign * (q2 * k1 - q1 * k2) * np.sin(angle)
    return float(terms.sum())


PRINTED_SIGN, RIGHT_SIGN = 1, -1


@identity(
    "rope-expansion",
    BASICS,
    "Physical Meaning of RoPE",
    "the rotated product is Σ [q₁k₁ + q₂k₂] cos((m−n)θ) + [q₂k₁ − q₁k₂] sin((m−n)θ)",
    wrong="the sine's bracket has the other sign: [q₁k₂ − q₂k₁] sin((m−n)θ)",
    reading="both brackets stand under the sum over the pairs",
)
def printed_expansion() -> Answer:
    """Printed and corrected against the product of the rotated vectors."""
    worst = {PRINTED_SIGN: 0.0, RIGHT_SIGN: 0.0}
    for d in _WIDTHS:
        q, k = _vectors(d)
        reach = float(np.linalg.norm(q) * np.linalg.norm(k))
        for m, n in _PLACES:
            wanted = float(_score(q, k, m, n)[0, 0])
            for sign in worst:
                off = abs(expansion(q, k, m - n, sign) - wanted) / reach
                worst[sign] = max(worst[sign], off)
    return decide(worst[PRINTED_SIGN], worst[RIGHT_SIGN], of="error of the product")


_MOVES = ((0, 1), (500, 1), (0, 3))  # first place, and how far apart tokens are


@identity(
    "rope-absolute",
    CHAPTER,
    "Rotary Positional Embeddings",
    "RoPE lets the model know both the absolute place of a token and its distances",
    wrong="distances alone reach the output: moving all tokens by the same number of places"
    " changes no score and no output. Each rotated vector has an absolute angle, but only"
    " products of two are used",
    reading="of what attention computes from q, k and v that were made without positions",
)
def absolute_place() -> Answer:
    """How far the output changes when all places move by 500, and when distances triple."""
    moved, stretched = 0.0, np.inf
    for n, d in ((8, 16), (64, 64)):
        q, k, v = draws(21, n).normal(size=(3, n, d))
        near, far, wide = (
            attention(rotated(q, places), rotated(k, places), v)
            for places in (first + step * np.arange(n, dtype=float) for first, step in _MOVES)
        )
        moved, stretched = max(moved, error(far, near)), min(stretched, error(wide, near))
    # The statement wants a change of at least the size that changed distances make.
    unseen = max(0.0, 1 - moved / stretched)
    return decide(
        unseen,
        moved,
        of="share of the place that the output does not show,",
        change_when_moved=moved,
        change_when_stretched=float(stretched),
    )


NEGLIGIBLE = 1.1


@of_run(
    "rope-overhead",
    CHAPTER,
    "In essence (Positional Embeddings)",
    "RoPE costs next to nothing",
    kind="timed",
    misleading="it turns n·d numbers beside n²·d products, so its share falls as 1/n: little"
    " at large n, and far from little at small n",
    reading=f"at most {NEGLIGIBLE:g} × the time of the attention core at the largest n measured",
    machine=True,
)
def overhead(evidence: Evidence) -> Answer:
    """Time with rope against the time without it, at the largest n."""
    pairs = evidence.pairs({"position": "rope"}, {"position": "none"}, workload="attention")
    compared = evidence.ratios(evidence.at_largest(pairs))
    return evidence.at_most(compared, NEGLIGIBLE, "time with RoPE / without")
