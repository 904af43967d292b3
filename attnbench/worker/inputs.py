"""Seeded input tensors: normal random numbers, never zeros, with needles where a check asks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from attnbench.schema.case import Case, Mask
from attnbench.worker.positions import needle_bias, rotated, rotated_back

Tensors = dict[str, torch.Tensor]

# A key that must not be lost gets a logit this far above ln(keys): it then carries nearly all
# of its query's weight, and dropping it moves the output by the size of v itself.
_NEEDLE_LOGIT = 6.0
_NEEDLES = 15
_GAP = 64  # elements: what is aligned stays so
_REACH = 32  # tokens that local inputs are smoothed over, to either side


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How inputs are drawn: the seed, their amplitude, gradients, and whether to plant needles.

    `gradient` is the layout of do: `expanded` along its dims, as `o.sum(-1)` leaves it, or
    `transposed`, rows for columns. What of q, k and v has its letter in `without_gradient` requires
    none. Those in `strided` have a gap behind each row, and begin at an offset; those in `expanded`
    are the same for all heads, with stride 0. `score_offset` is added to every score. `local` makes
    attention what it is in trained models, where approximations hope for it: each query has most of
    its weight on keys near its own place.
    """

    seed: int = 0
    needles: bool = False
    query_amplitude: float = 1.0
    gradient: Literal["expanded", "transposed"] | None = None
    without_gradient: str = ""
    strided: str = ""
    expanded: str = ""
    score_offset: float = 0.0
    local: bool = False


def empty(case: Case, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised tensor of the case's dtype on its device."""
    return torch.empty(shape, dtype=getattr(torch, case.dtype), device=case.device)


def _offset(case: Case, shape: tuple[int, ...]) -> torch.Tensor:
    """As `empty`, at an offset in its storage; before it is NaN, which no kernel may read."""
    flat = empty(case, (_GAP + math.prod(shape),))
    flat[:_GAP] = math.nan
    return flat[_GAP:].view(shape)


def inputs_of(case: Case) -> Tensors:
    """q_BHLD, k_BGSD, v_BGSV, still to be filled, in memory as the case's layout has them."""
    sizes = {
        "q": (case.heads, case.seq_len, case.head_dim),
        "k": (case.kv_heads, case.kv_len, case.head_dim),
        "v": (case.kv_heads, case.kv_len, case.value_dim),
    }
    if case.layout == "BHLD":
        return {name: empty(case, (case.batch, *own)) for name, own in sizes.items()}
    widths = [heads * dim for heads, _, dim in sizes.values()]
    rows = (
        _offset(case, (case.batch, case.seq_len, sum(widths))).split_with_sizes(widths, -1)
        if case.layout == "packed"
        else [_offset(case, (case.batch, n, heads * dim)) for heads, n, dim in sizes.values()]
    )
    return {
        name: x.view(*x.shape[:2], heads, dim).transpose(1, 2).detach()
        for (name, (heads, _, dim)), x in zip(sizes.items(), rows, strict=True)
    }


def with_gradients(tensors: Tensors, draw: Draw) -> Tensors:
    """Such tensors, strided and with do as the draw has it, and the gradients that it asks for."""
    found = {}
    for name, x in tensors.items():
        requires_grad, x = x.requires_grad and name not in draw.without_gradient, x.detach()
        if name == "do" and draw.gradient is not None:
            once = x[..., :1].expand_as(x)
            x = once if draw.gradient == "expanded" else x.mT.contiguous().mT
        elif name in draw.strided:
            gap = x.new_ones(*x.shape[:-1], _GAP)  # finite: what is read of it can be explained
            x = torch.cat((gap, x), -1)[..., _GAP:]
        elif name in draw.expanded:
            x = x[:, :1].expand_as(x)
        found[name] = x.requires_grad_(requires_grad)
    return found


def fill_sinks(sink_H: torch.Tensor, keys: int, seed: int) -> None:
    """Overwrite by ln(`keys`) and a number from N(0, 1): each weighs about as much as all keys."""
    fill_normal([sink_H], seed + 1)
    with torch.no_grad():
        sink_H.add_(math.log(keys))


def fill_normal(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Overwrite each tensor in place with numbers from N(0, 1), the same for the same seed.

    Drawn in float32 in the order of the axes, whatever the layout and the dtype; where a tensor is
    expanded, once.
    """
    tensors = list(tensors)
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    for x in tensors:
        once = x.detach()[tuple(slice(None if stride else 1) for stride in x.stride())]
        once.copy_(torch.randn(once.shape, generator=generator, device=x.device))


def fill_local(
    q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, scale: float, seed: int
) -> None:
    """Overwrite k and v by numbers that vary slowly along the tokens, and q by the key it sits at.

    Neighbours are alike over about 16 tokens. A query's own key has a logit 4 above the logarithm
    of the number of keys, so that it and its neighbours carry nearly all of the weight.
    """
    generator = torch.Generator(device=k_BGSD.device).manual_seed(seed)
    queries, keys, d = q_BHLD.shape[2], k_BGSD.shape[2], k_BGSD.shape[3]
    steps = torch.arange(-_REACH, _REACH + 1, device=k_BGSD.device)
    weights = torch.exp(-0.5 * (steps / (_REACH / 4)) ** 2)
    weights = (weights / weights.square().sum().sqrt()).view(1, 1, -1)

    def smooth(like: torch.Tensor, tokens: int) -> torch.Tensor:
        sizes = like.shape[0], like.shape[1], like.shape[3]
        drawn = torch.randn((*sizes, tokens + 2 * _REACH), generator=generator, device=like.device)
        slow = torch.nn.functional.conv1d(drawn.view(-1, 1, drawn.shape[-1]), weights)
        return slow.view(*sizes, tokens).mT

    longer = max(queries, keys)
    k_BGTD = smooth(k_BGSD, longer)
    with torch.no_grad():
        k_BGSD.copy_(k_BGTD[:, :, longer - keys :])
        v_BGSV.copy_(smooth(v_BGSV, keys))
        own_BHLD = k_BGTD[:, :, longer - queries :].repeat_interleave(
            q_BHLD.shape[1] // k_BGSD.shape[1], dim=1
        )
        q_BHLD.copy_(own_BHLD * ((math.log(keys) + 4) / (d * scale)))


def needle_pairs(mask: Mask, queries: int, keys: int, seed: int) -> list[tuple[int, int]]:
    """(query, key) pairs with distinct keys: span ends, block ends, random ones, hidden ones.

    A hidden needle lies just outside the query's span: a mask that is off by one lets it in. Of a
    mask that differs between batch items, each in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[int, int] = {}
    for query in torch.randperm(queries, generator=generator)[: 4 * _NEEDLES].tolist():
        item = len(chosen) // 5 % mask.items
        first, last = mask.span(query, queries, keys, item)
        if last <= first:
            continue
        any_key = first + int(torch.randint(last - first, (1,), generator=generator))
        block_end = min(last - 1, max(first, any_key // 64 * 64 - 1))
        hidden = last if last < keys else first - 1
        key = (last - 1, first, any_key, block_end, hidden)[len(chosen) % 5]
        if key >= 0 and key not in chosen.values():
            chosen[query] = key
        if len(chosen) == _NEEDLES:
            break
    return list(chosen.items())


def wanted_keys(
    case: Case, rows_BGMD: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, count: int
) -> torch.Tensor:
    """Projected keys (B, M, G·D), at `keys`, that align with the queries at `places`, in float64.

    Their logits are ln(`count`) + 6, `count` being the keys that compete for the weight.
    """
    rows = rotated(rows_BGMD.double(), case.position, places, case.kv_len)
    aligned = rotated_back(rows, case.position, keys, case.kv_len)
    size = aligned.square().sum(-1, keepdim=True).clamp_min(1e-3) * case.softmax_scale
    logit = math.log(count) + _NEEDLE_LOGIT
    # Nor may a needle far off grow so long that it is one to all other queries, too.
    logit_GM1 = (logit - needle_bias(case, places, keys).clamp(min=-8.0)).unsqueeze(-1)
    return (aligned * logit_GM1 / size).transpose(1, 2).flatten(2)
