"""Position encodings applied to q and k inside the timed call: rotary, in both pairings.

Rotary position embedding (Su et al. 2021, arXiv:2104.09864): in each pair of dimensions, the
vector at position m is rotated by the angle m·θ_i, θ_i = base^(−2i/D). Where D is odd the last
dimension stays as it is, and D counts the rotated dimensions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnbench.base.registry import Registry
from attnbench.schema.case import Case, Position

DEFAULT_BASE = 10000.0


Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Encoding(NamedTuple):
    """One position encoding: which dimensions form pair i, and how the pairs are rotated.

    `pairs(D)` gives the first and the second members of all pairs; the reference rotates by them
    alone. `rotate(x, cos, sin)` is the fast form that is timed.
    """

    doc: str
    pairs: Callable[[int], tuple[slice, slice]]
    rotate: Rotate | None


def _rotate_half_split(x: torch.Tensor, cos_LP: torch.Tensor, sin_LP: torch.Tensor) -> torch.Tensor:
    half = cos_LP.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = (first * cos_LP - second * sin_LP, second * cos_LP + first * sin_LP)
    return torch.cat((*rotated, x[..., 2 * half :]), dim=-1)


def _rotate_interleaved(
    x: torch.Tensor, cos_LP: torch.Tensor, sin_LP: torch.Tensor
) -> torch.Tensor:
    even = 2 * cos_LP.shape[-1]
    first, second = x[..., 0:even:2], x[..., 1:even:2]
    rotated = torch.stack(
        (first * cos_LP - second * sin_LP, second * cos_LP + first * sin_LP), dim=-1
    ).flatten(-2)
    return rotated if even == x.shape[-1] else torch.cat((rotated, x[..., even:]), dim=-1)


POSITIONS: Registry[Encoding] = Registry("position encoding", "--positions")
POSITIONS.add("none", Encoding("q and k as they are", lambda dims: (slice(0), slice(0)), None))
POSITIONS.add(
    "rope",
    Encoding(
        "rotary, halves paired as in Llama",
        lambda dims: (slice(dims // 2), slice(dims // 2, dims // 2 * 2)),
        _rotate_half_split,
    ),
)
POSITIONS.add(
    "rope-interleaved",
    Encoding(
        "rotary, neighbours paired as in RoFormer",
        lambda dims: (slice(0, dims // 2 * 2, 2), slice(1, dims // 2 * 2, 2)),
        _rotate_interleaved,
    ),
)


def angles(position: Position, dims: int, places: torch.Tensor) -> torch.Tensor:
    """Float64 angles (places, pairs): place × base^(−2i/D), D the rotated dimensions."""
    first, _ = POSITIONS.get(position.name).pairs(dims)
    count = len(range(dims)[first])
    i = torch.arange(count, dtype=torch.float64, device=places.device)
    base = DEFAULT_BASE if position.base is None else position.base
    return places.double().unsqueeze(-1) * base ** (-2 * i / max(1, 2 * count))


@dataclass(frozen=True)
class Rotation:
    """Turns x (…, L, D) by prepared tables: `cos_LP` and `sin_LP` hold one row a place."""

    rotate: Rotate
    cos_LP: torch.Tensor
    sin_LP: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn x; one place a token."""
        return self.rotate(x, self.cos_LP, self.sin_LP)

    def window(self, first: int, count: int) -> Rotation:
        """The rotation of `count` tokens from the `first` row on; shares the tables."""
        rows = slice(first, first + count)
        return Rotation(self.rotate, self.cos_LP[rows], self.sin_LP[rows])


def rotation(case: Case, first_place: int, count: int) -> Rotation | None:
    """The rotation of x (…, `count`, D) at places `first_place` …; None for `none`.

    Its tables are made in float64 and held in the case's dtype: the rotation alone is timed.
    """
    rotate = POSITIONS.get(case.position.name).rotate
    if rotate is None:
        return None
    places = torch.arange(first_place, first_place + count, device=case.device)
    angle_LP = angles(case.position, case.head_dim, places)
    dtype = getattr(torch, case.dtype)
    return Rotation(rotate, angle_LP.cos().to(dtype), angle_LP.sin().to(dtype))


def _mixed(x: torch.Tensor, position: Position, *by: torch.Tensor) -> torch.Tensor:
    """Each pair (a, b) as (a·by[0] + b·by[1], a·by[2] + b·by[0])."""
    encoding = POSITIONS.get(position.name)
    if encoding.rotate is None:
        return x
    first, second = encoding.pairs(x.shape[-1])
    out = x.clone()
    out[..., first] = x[..., first] * by[0] + x[..., second] * by[1]
    out[..., second] = x[..., first] * by[2] + x[..., second] * by[0]
    return out


def rotated(x: torch.Tensor, position: Position, places: torch.Tensor) -> torch.Tensor:
    """The reference form: each pair as a complex number times e^{i·angle}, in x's own dtype.

    By the definition (`pairs`), not by the formula that is timed, with tables in x's dtype.
    """
    angle_LP = angles(position, x.shape[-1], places)
    cos_LP, sin_LP = angle_LP.cos().to(x.dtype), angle_LP.sin().to(x.dtype)
    return _mixed(x, position, cos_LP, -sin_LP, sin_LP)


def rotated_squares(x: torch.Tensor, position: Position, places: torch.Tensor) -> torch.Tensor:
    """Squares of independent errors in the dimensions of x, after x was rotated either way."""
    cos_LP = angles(position, x.shape[-1], places).cos().square().to(x.dtype)
    return _mixed(x, position, cos_LP, 1 - cos_LP, 1 - cos_LP)


def rotated_back(gradient: torch.Tensor, position: Position, places: torch.Tensor) -> torch.Tensor:
    """Gradient with respect to x of `rotated`: a rotation's transpose turns the other way."""
    return rotated(gradient, position, -places)
