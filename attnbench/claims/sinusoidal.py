"""Claims on attention's blindness to order, and on sinusoidal positions."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import PERSPECTIVES, Answer, identity
from attnbench.claims.exact import Array, decide, draws, error, said
from attnbench.claims.formulas import attention, frequencies, rotated, sinusoidal

_WIDTHS = (4, 32, 512)
_SHIFTS = (1, -1, 7, 1000)
_PLACES = np.arange(0.0, 200.0)


@identity(
    "order-unseen",
    PERSPECTIVES,
    "Positional Encoding",
    "self-attention takes no account of a token's place: without positions, order does not matter",
    reading="without a mask; a causal mask tells tokens apart by how many they see",
)
def order_is_unseen() -> Answer:
    """Shuffled tokens give the shuffled outputs."""
    worst = 0.0
    for n in (3, 17, 128):
        rng = draws(30, n)
        q, k, v = rng.normal(size=(3, n, 16))
        order = rng.permutation(n)
        shuffled = attention(q[order], k[order], v[order])
        worst = max(worst, error(shuffled, attention(q, k, v)[order]))
    return decide(worst)


@identity(
    "sinusoidal-frequencies",
    PERSPECTIVES,
    "Absolute Positional Information",
    "the frequency falls from one pair of dimensions to the next, like the digits of a number",
)
def frequencies_fall() -> Answer:
    """Frequencies of several widths, and how often the columns of P change sign."""
    falling, rarer = True, True
    for width in _WIDTHS:
        falling &= bool(np.all(np.diff(frequencies(width)) < 0))
        turns = (np.diff(np.sign(sinusoidal(_PLACES, width)[:, 1::2]), axis=0) != 0).sum(axis=0)
        rarer &= bool(np.all(np.diff(turns) <= 0))
    changes = [int(turns[0]), int(turns[-1])]
    reason = (
        f"over {len(_PLACES)} places the first pair changes sign {changes[0]} times,"
        f" the last {changes[1]}"
    )
    return said(falling and rarer, reason, first_changes=changes[0], last_changes=changes[1])


def shift_matrix(width: int, shift: float) -> Array:
    """The printed A for every pair: [[cos δω, sin δω], [−sin δω, cos δω]] along the diagonal."""
    matrix_EE = np.zeros((width, width))
    for j, omega in enumerate(frequencies(width)):
        cos, sin = np.cos(shift * omega), np.sin(shift * omega)
        matrix_EE[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cos, sin], [-sin, cos]]
    return matrix_EE


@identity(
    "sinusoidal-projection",
    PERSPECTIVES,
    "Relative Positional Information",
    "one matrix A, the same at every place, turns the position vector at i into that at i + δ",
)
def projection() -> Answer:
    """The printed A at all places, for several shifts and widths."""
    worst = 0.0
    for width in _WIDTHS:
        for shift in _SHIFTS:
            moved = sinusoidal(_PLACES, width) @ shift_matrix(width, shift).T
            worst = max(worst, error(moved, sinusoidal(_PLACES + shift, width)))
    return decide(worst)


@identity(
    "sinusoidal-tokens",
    PERSPECTIVES,
    "Relative Positional Information",
    "so any token can be projected to another one by the same matrix, given their distance",
    wrong="A moves position vectors, not tokens: a row of X + P also holds what the token says",
)
def tokens_are_not_projected() -> Answer:
    """A applied to rows of X + P, and to rows of P."""
    printed, corrected = np.inf, 0.0
    for width in _WIDTHS:
        p, x = sinusoidal(_PLACES, width), draws(31, width).normal(size=(len(_PLACES), width))
        a = shift_matrix(width, 1)
        printed = min(printed, error((x + p)[:-1] @ a.T, (x + p)[1:]))
        corrected = max(corrected, error(p[:-1] @ a.T, p[1:]))
    return decide(float(printed), corrected)


@identity(
    "sinusoidal-relative",
    PERSPECTIVES,
    "Relative Positional Information",
    "added sinusoidal positions let every token treat its neighbours in the same way,"
    " wherever they stand",
    wrong="the score of (x + p_i) and (y + p_j) changes when both move: p_i·p_j depends on i − j"
    " alone, but x·p_j and p_i·y do not, nor does p_iᵀMp_j for learned weights. Scores that"
    " depend on the distance alone are what rotary positions give",
)
def neighbours_differ() -> Answer:
    """Scores of the same contents when both places move: added positions against rotated ones."""
    printed, corrected, products = np.inf, 0.0, 0.0
    for width in _WIDTHS:
        x, y = draws(32, width).normal(size=(2, 1, width))
        at, near = np.arange(100.0), np.arange(100.0) + 2
        p, p_near = sinusoidal(at, width), sinusoidal(near, width)
        added = ((x + p) * (y + p_near)).sum(axis=-1)
        printed = min(printed, _spread(added))
        products = max(products, _spread((p * p_near).sum(axis=-1)))
        turned = rotated(np.repeat(x, 100, 0), at) * rotated(np.repeat(y, 100, 0), near)
        reach = float(np.linalg.norm(x) * np.linalg.norm(y))
        corrected = max(corrected, float(np.ptp(turned.sum(axis=-1))) / reach)
    corrected = max(corrected, products)
    return decide(float(printed), corrected, of="change of a score when both places move,")


def _spread(values: Array) -> float:
    """Range relative to the largest value."""
    return float(np.ptp(values) / np.max(np.abs(values)))
