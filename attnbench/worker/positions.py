"""Position encodings of tensors: rotary ones of q and k inside the timed call, and their reference.

In each pair of dimensions the vector at place m is rotated by the angle m·θ; what the encodings of
`schema/position.py` differ in is θ, which dimensions are paired, and a factor on the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnbench.schema.case import Case
from attnbench.schema.position import Position

Rotate = Callable[..., torch.Tensor]


def _rotate_halves(x: torch.Tensor, cos_LP: torch.Tensor, sin_LP: torch.Tensor) -> torch.Tensor:
    half = cos_LP.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = (first * cos_LP - second * sin_LP, second * cos_LP + first * sin_LP)
    return torch.cat((*rotated, x[..., 2 * half :]), dim=-1)


def _rotate_neighbours(x: torch.Tensor, cos_LP: torch.Tensor, sin_LP: torch.Tensor) -> torch.Tensor:
    even = 2 * cos_LP.shape[-1]
    first, second = x[..., 0:even:2], x[..., 1:even:2]
    rotated = torch.stack(
        (first * cos_LP - second * sin_LP, second * cos_LP + first * sin_LP), dim=-1
    ).flatten(-2)
    return rotated if even == x.shape[-1] else torch.cat((rotated, x[..., even:]), dim=-1)


def _rotate_by_matrix(x_BHLD: torch.Tensor, rotation_LDD: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhld,led->bhle", x_BHLD, rotation_LDD)


_ROTATE = {"halves": _rotate_halves, "neighbours": _rotate_neighbours}


def _paired(position: Position, dims: int, pairs: int) -> tuple[slice, slice]:
    """The first and the second members of all pairs."""
    if position.encoding.layout == "halves":
        return slice(pairs), slice(pairs, 2 * pairs)
    return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)


def angles(position: Position, dims: int, places: torch.Tensor, length: int) -> torch.Tensor:
    """Float64 angles (places, pairs), place × θ; `length` is the number of places in all."""
    frequencies = position.encoding.frequencies(position.values, dims, length)
    theta_P = torch.tensor(frequencies, dtype=torch.float64, device=places.device)
    return places.double().unsqueeze(-1) * theta_P


@dataclass(frozen=True)
class Rotation:
    """Turns x (B, heads, L, D) by prepared tables, which hold one row a place."""

    rotate: Rotate
    tables: tuple[torch.Tensor, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn x; one place a token."""
        return self.rotate(x, *self.tables)

    def window(self, first: int, count: int) -> Rotation:
        """The rotation of `count` tokens from the `first` row on; shares the tables."""
        return Rotation(self.rotate, tuple(table[first : first + count] for table in self.tables))


def rotation(case: Case, first_place: int, count: int, length: int) -> Rotation | None:
    """The rotation of x (…, `count`, D) at places `first_place` …; None where none is rotary.

    Its tables are made in float64 and held in the case's dtype: the rotation alone is timed.
    """
    encoding, dims = case.position.encoding, case.head_dim
    if encoding.kind != "rotary":
        return None
    places = torch.arange(first_place, first_place + count, device=case.device)
    dtype = getattr(torch, case.dtype)
    if encoding.matrix:
        unit_DLD = torch.eye(dims, dtype=torch.float64, device=case.device)
        unit_DLD = unit_DLD.unsqueeze(1).expand(-1, count, -1)
        columns_DLD = rotated(unit_DLD, case.position, places, length)
        return Rotation(_rotate_by_matrix, (columns_DLD.permute(1, 2, 0).to(dtype).contiguous(),))
    angle_LP, factor = angles(case.position, dims, places, length), encoding.factor
    tables = (x.mul_(factor(case.position.values)) for x in (angle_LP.cos(), angle_LP.sin()))
    return Rotation(_ROTATE[encoding.layout], tuple(x.to(dtype) for x in tables))


def _mixed(x: torch.Tensor, position: Position, *by: torch.Tensor) -> torch.Tensor:
    """Each pair (a, b) as (a·by[0] + b·by[1], a·by[2] + b·by[0])."""
    first, second = _paired(position, x.shape[-1], by[0].shape[-1])
    out = x.clone()
    out[..., first] = x[..., first] * by[0] + x[..., second] * by[1]
    out[..., second] = x[..., first] * by[2] + x[..., second] * by[0]
    return out


def rotated(x: torch.Tensor, position: Position, places: torch.Tensor, length: int) -> torch.Tensor:
    """The reference form: each pair as a complex number times e^{i·angle}, in x's own dtype.

    By the definition, not by the formula that is timed, with tables in x's dtype.
    """
    if position.encoding.kind != "rotary":
        return x
    angle_LP = angles(position, x.shape[-1], places, length)
    factor = position.encoding.factor(position.values)
    cos_LP, sin_LP = (y.mul_(factor).to(x.dtype) for y in (angle_LP.cos(), angle_LP.sin()))
    return _mixed(x, position, cos_LP, -sin_LP, sin_LP)


def rotated_squares(
    x: torch.Tensor, position: Position, places: torch.Tensor, length: int
) -> torch.Tensor:
    """Squares of independent errors in the dimensions of x, after x was rotated either way."""
    if position.encoding.kind != "rotary":
        return x
    factor = position.encoding.factor(position.values) ** 2
    cos_LP = angles(position, x.shape[-1], places, length).cos().square()
    cos_LP, sin_LP = ((y * factor).to(x.dtype) for y in (cos_LP, 1 - cos_LP))
    return _mixed(x, position, cos_LP, sin_LP, sin_LP)


def rotated_back(
    gradient: torch.Tensor, position: Position, places: torch.Tensor, length: int
) -> torch.Tensor:
    """Gradient with respect to x of `rotated`: a rotation's transpose turns the other way."""
    return rotated(gradient, position, -places, length)
