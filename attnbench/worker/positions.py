"""Position encodings of tensors: rotary ones of q and k inside the timed call, and their reference.

In each pair of dimensions the vector at place m is rotated by the angle m·θ; what the encodings of
`schema/position.py` differ in is θ, which dimensions are paired, and a factor on the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnbench.api.bias import BY_DISTANCE, learned, relative_vectors
from attnbench.schema.axes import AXES
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


_ROTATE = {"halves": _rotate_halves, "neighbours": _rotate_neighbours}


def _paired(position: Position, pairs: int) -> tuple[slice, slice]:
    """The first and the second members of all pairs."""
    if position.encoding.layout == "halves":
        return slice(pairs), slice(pairs, 2 * pairs)
    return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)


def turns(position: Position, dims: int, places: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Float64 cos and sin of place × θ, (places, pairs), times the factor; of `length` places."""
    frequencies = position.encoding.frequencies(position.values, dims, length)
    theta_P = torch.tensor(frequencies, dtype=torch.float64, device=places.device)
    angle_LP, factor = places.double().unsqueeze(-1) * theta_P, position.encoding.factor
    return [x.mul_(factor(position.values)) for x in (angle_LP.cos(), angle_LP.sin())]


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

    def at(self, places_BL: torch.Tensor) -> Rotation:
        """The rotation of tokens whose places differ between batch items."""
        return Rotation(self.rotate, tuple(table[places_BL].unsqueeze(1) for table in self.tables))


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
        # `contiguous` would leave an axis of size 1, and that of products, a stride unlike 1.
        rotation_LDD = columns_DLD.permute(1, 2, 0).to(dtype).flatten().view(count, dims, dims)
        return Rotation(partial(torch.einsum, "...ld,...led->...le"), (rotation_LDD,))
    tables = turns(case.position, dims, places, length)
    return Rotation(_ROTATE[encoding.layout], tuple(x.to(dtype) for x in tables))


def addition(case: Case, tokens: int) -> torch.Tensor | None:
    """What is added to x_BLE, (`tokens`, E) in the case's dtype; None where nothing is.

    `sinusoidal`: sines in the even dimensions and cosines in the odd ones, of place × θ.
    """
    position, width = case.position, case.model_width
    if position.encoding.kind != "additive":
        return None
    if "length" in position.values:
        added_LE = learned(tokens, width, case.device)
    else:
        cos_LP, sin_LP = turns(position, width, torch.arange(tokens, device=case.device), tokens)
        added_LE = torch.zeros(tokens, width, dtype=torch.float64, device=case.device)
        first, second = slice(0, 2 * cos_LP.shape[1], 2), slice(1, None, 2)
        added_LE[:, first], added_LE[:, second] = sin_LP, cos_LP
    return added_LE.to(getattr(torch, case.dtype))


def placed(x_BLE: torch.Tensor, case: Case) -> torch.Tensor:
    """The reference form: x with what its places add, exactly and then in x's own dtype."""
    added_LE = addition(replace(case, dtype="float64"), x_BLE.shape[1])
    return x_BLE if added_LE is None else x_BLE + added_LE.to(x_BLE.dtype)


def reason_against_position(case: Case) -> str | None:
    """Why the case's position encoding has no place in its workload, or None."""
    position, tokens = case.position, case.total_len
    if position.encoding.kind != "additive":
        return None
    if not AXES["width"].applies(case.workload):
        return f"{position.name} is added to x; {case.workload} is given q, k and v"
    if 0 < position.values.get("length", 0) < tokens:
        return f"{position.text} has no vector for the place of token {tokens}"
    return None


def bias_scores(
    case: Case, q_NRID: torch.Tensor, query_I: torch.Tensor, group_N: torch.Tensor
) -> torch.Tensor:
    """The reference form of a position bias: what is added to the scaled scores, (N, R, I, S).

    Of scaled queries; `group_N` is the key/value head of each slice. Evaluated pair by pair.
    """
    distance_IS = _distances(case, query_I)
    if by_distance := BY_DISTANCE.get(case.position.name):
        bias_HIS = by_distance(case, distance_IS).to(q_NRID.dtype)
        return bias_HIS.view(case.kv_heads, -1, *distance_IS.shape)[group_N]
    vectors_CD = relative_vectors(case, str(q_NRID.device)).to(q_NRID.dtype)
    column_IS = _clipped(case, distance_IS)
    bias_NRIC: torch.Tensor = q_NRID @ vectors_CD.mT
    return bias_NRIC.gather(-1, column_IS.expand(*bias_NRIC.shape[:-1], -1))


def bias_gradient(
    case: Case, ds_NRIS: torch.Tensor, query_I: torch.Tensor, *, squares: bool = False
) -> torch.Tensor | float:
    """Gradient of scaled queries through `bias_scores`, (N, R, I, D), or of squared summands."""
    if case.position.name in BY_DISTANCE:
        return 0.0
    ds_NRIS = ds_NRIS.to(torch.promote_types(ds_NRIS.dtype, torch.float32))
    vectors_CD = relative_vectors(case, str(ds_NRIS.device)).to(ds_NRIS.dtype)
    column_IS = _clipped(case, _distances(case, query_I)).expand_as(ds_NRIS)
    sums_NRIC = ds_NRIS.new_zeros(*ds_NRIS.shape[:-1], len(vectors_CD))
    sums_NRIC.scatter_add_(-1, column_IS, ds_NRIS)
    gradient: torch.Tensor = sums_NRIC @ (vectors_CD.square() if squares else vectors_CD)
    return gradient


def needle_bias(case: Case, places_M: torch.Tensor, keys_M: torch.Tensor) -> torch.Tensor:
    """What a bias by distance adds to scores of the first head of each group, (G, M); else 0."""
    by_distance = BY_DISTANCE.get(case.position.name)
    if by_distance is None:
        return torch.zeros(case.kv_heads, len(keys_M), dtype=torch.float64, device=keys_M.device)
    return by_distance(case, keys_M - places_M)[:: case.heads // case.kv_heads]


def _distances(case: Case, query_I: torch.Tensor) -> torch.Tensor:
    place_I = query_I + (case.kv_len - case.seq_len)
    return torch.arange(case.kv_len, device=query_I.device) - place_I.unsqueeze(-1)


def _clipped(case: Case, distance: torch.Tensor) -> torch.Tensor:
    clip: int = case.position.values["clip"]
    return distance.clamp(-clip, clip) + clip


def _mixed(x: torch.Tensor, position: Position, *by: torch.Tensor) -> torch.Tensor:
    """Each pair (a, b) as (a·by[0] + b·by[1], a·by[2] + b·by[0])."""
    first, second = _paired(position, by[0].shape[-1])
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
    cos_LP, sin_LP = (y.to(x.dtype) for y in turns(position, x.shape[-1], places, length))
    return _mixed(x, position, cos_LP, -sin_LP, sin_LP)


def rotated_last(x: torch.Tensor, position: Position, length: int) -> torch.Tensor:
    """As `rotated`, of tokens at the last of `length` places."""
    return rotated(x, position, torch.arange(length - x.shape[-2], length, device=x.device), length)


def rotated_squares(
    x: torch.Tensor, position: Position, places: torch.Tensor, length: int
) -> torch.Tensor:
    """Squares of independent errors in the dimensions of x, after x was rotated either way."""
    if position.encoding.kind != "rotary":
        return x
    tables = turns(position, x.shape[-1], places, length)
    cos_LP, sin_LP = (y.square().to(x.dtype) for y in tables)
    return _mixed(x, position, cos_LP, sin_LP, sin_LP)


def rotated_back(
    gradient: torch.Tensor, position: Position, places: torch.Tensor, length: int
) -> torch.Tensor:
    """Gradient with respect to x of `rotated`: a rotation's transpose turns the other way."""
    return rotated(gradient, position, -places, length)
