"""Attention and rotary positions in numpy, as the notes write them; sizes are last in a name.

Arrays are float64. Leading axes, such as heads, are carried along.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnbench.claims.exact import Array


def softmax(scores: Array) -> Array:
    """Over the last axis; the largest score is subtracted, which changes nothing but overflow."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@dataclass
class Tally:
    """Counts what is really multiplied (2 FLOPs a product) and exponentiated."""

    flops: int = 0
    exponentials: int = 0

    def product(self, a: Array, b: Array) -> Array:
        """A matrix product, counted."""
        found = np.asarray(a @ b)
        self.flops += 2 * found.size * a.shape[-1]
        return found

    def softmax(self, scores: Array) -> Array:
        """A softmax over the last axis, counted."""
        self.exponentials += scores.size
        return softmax(scores)


def attention(
    q_LD: Array,
    k_SD: Array,
    v_SV: Array,
    *,
    admitted_LS: Array | None = None,
    tally: Tally | None = None,
) -> Array:
    """softmax(QKᵀ/√D)V; pairs where `admitted_LS` is 0 are left out."""
    count = tally or Tally()
    scores_LS = count.product(q_LD, k_SD.swapaxes(-1, -2)) / np.sqrt(q_LD.shape[-1])
    if admitted_LS is not None:
        scores_LS = np.where(admitted_LS > 0, scores_LS, -np.inf)
    return count.product(count.softmax(scores_LS), v_SV)


def split(x_LE: Array, heads: int) -> Array:
    """(L, H·D) into (H, L, D): view, then swap the first two axes."""
    return x_LE.reshape(x_LE.shape[0], heads, -1).swapaxes(0, 1)


def merge(o_HLV: Array) -> Array:
    """The inverse of `split`."""
    return o_HLV.swapaxes(0, 1).reshape(o_HLV.shape[1], -1)


def multi_head(x_LE: Array, w_3EE: Array, heads: int, tally: Tally | None = None) -> Array:
    """The heads' outputs side by side, (L, E): projections by w_3EE, no output projection."""
    count = tally or Tally()
    q, k, v = (split(count.product(x_LE, w_EE), heads) for w_EE in w_3EE)
    return merge(attention(q, k, v, tally=count))


def frequencies(dims: int) -> Array:
    """θ of each pair of dimensions: 10000^(−2j/D), j < D/2."""
    return np.asarray(10000.0 ** (-2 * np.arange(dims // 2) / dims))


def rotated(x_LD: Array, places_L: Array) -> Array:
    """RoPE elementwise: neighbours (2j, 2j+1) turned by place · θ_j."""
    angle_LP = np.multiply.outer(places_L, frequencies(x_LD.shape[-1]))
    cos, sin = np.cos(angle_LP), np.sin(angle_LP)
    even, odd = x_LD[..., 0::2], x_LD[..., 1::2]
    turned = np.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
    return np.asarray(turned.reshape(x_LD.shape))


def rotation_matrix(dims: int, place: float) -> Array:
    """RoPE as a matrix: D/2 blocks of a rotation by place · θ_j along the diagonal."""
    matrix_DD = np.zeros((dims, dims))
    for j, theta in enumerate(frequencies(dims)):
        cos, sin = np.cos(place * theta), np.sin(place * theta)
        matrix_DD[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cos, -sin], [sin, cos]]
    return matrix_DD


def sinusoidal(places_L: Array, width: int) -> Array:
    """Positions to be added, (L, E): sin in the even columns, cos in the odd ones."""
    angle_LP = np.multiply.outer(places_L, frequencies(width))
    return np.stack((np.sin(angle_LP), np.cos(angle_LP)), axis=-1).reshape(len(places_L), width)
