"""Least squares over every part of a few terms at once, and with that the non-negative ones.

The least squares over any set of terms with no coefficient negative are the plain least squares
over some part of the set: with at most seven terms every part is tried, and for hundreds of
resamplings at once, since the matrices do not change with them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from attnbench.analysis.scaling.model_terms import Array, Bools

Indices = NDArray[np.intp]

_COLLINEAR = 1e-7  # of the largest eigenvalue of unit columns: below, terms are one term


class Parts:
    """Least squares over every part of the terms; A are the relative rows, m × p."""

    def __init__(self, relative: Array) -> None:
        self.scale = np.sqrt((relative**2).mean(axis=0))
        self.rows = relative / self.scale
        self.gram = self.rows.T @ self.rows
        self.parts = parts_of(relative.shape[1])
        self.inverses, self.usable = self._inverses()

    def _inverses(self) -> tuple[Array, Bools]:
        """The inverse of each part's own block of the Gram matrix, zero elsewhere."""
        count = len(self.parts)
        inverses, usable = np.zeros((count, *self.gram.shape)), np.zeros(count, dtype=bool)
        for where, inside in _by_size(self.parts.shape[1]):
            rows, columns = inside[:, :, None], inside[:, None, :]
            values, vectors = np.linalg.eigh(self.gram[rows, columns])
            fine = values[:, 0] > _COLLINEAR * values[:, -1]
            values = np.where(fine[:, None], values, np.inf)  # its inverse is 0
            usable[where] = fine
            inverses[where[:, None, None], rows, columns] = np.einsum(
                "sik,sk,sjk->sij", vectors, 1 / values, vectors
            )
        return inverses, usable

    def solve(self, targets: Array) -> tuple[Array, Array]:
        """Coefficients (parts × p × draws, of the scaled columns) and squared misfit.

        `targets` are m × draws; the misfit is infinite where a coefficient is negative or the
        part's terms cannot be told apart.
        """
        moments = self.rows.T @ targets
        found = self.inverses @ moments
        misfit = (targets**2).sum(axis=0) - np.einsum("spd,pd->sd", found, moments)
        bad = (found < 0).any(axis=1) | ~self.usable[:, None]
        return found, np.where(bad, np.inf, np.maximum(misfit, 0.0))


@lru_cache(maxsize=8)
def parts_of(count: int) -> Bools:
    """Every part of `count` terms but the empty one, the smallest first."""
    found = [part for part in product((False, True), repeat=count) if any(part)]
    return np.array(sorted(found, key=sum))


@lru_cache(maxsize=8)
def _by_size(count: int) -> list[tuple[Indices, Indices]]:
    """Parts of as many terms each: which they are, and the terms of each."""
    parts = parts_of(count)
    sizes = parts.sum(axis=1)
    places = [np.flatnonzero(sizes == size) for size in range(1, count + 1)]
    return [(where, np.nonzero(parts[where])[1].reshape(len(where), -1)) for where in places]


@lru_cache(maxsize=8)
def parts_within(count: int) -> Bools:
    """Which parts lie within which: [of, within]."""
    parts = parts_of(count)
    outside: Bools = parts[None, :, :] & ~parts[:, None, :]
    inside: Bools = np.logical_not(outside.any(axis=2))
    return inside
