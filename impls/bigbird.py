"""BigBird: blocks of keys near each block of queries, global ones, and some at random.

Zaheer et al. 2020 (arXiv 2007.14062), section 2 and appendix D (the internal construction, ITC):
tokens are cut into blocks. A block of queries sees `window` blocks, its own in their middle, the
first `global_blocks`, and `random_blocks` of those that are left, the same for all heads; queries
of a global block see all, those before the first key draw none. Under `causal` what lies ahead is
left out, and random blocks are drawn from the earlier ones: each row's from `seed` and its number,
so that a longer sequence keeps the pattern of a shorter one. Under `full` it does not, since there
later blocks are drawn, too.

Computed are whole blocks. `bigbird` copies the keys of a block of queries side by side;
`bigbird-flex` hands their list to torch's FlexAttention (Dong et al. 2024, arXiv 2412.05496).
"""

from random import Random
from typing import Any

import torch
from attnbench_impls.tiles import Tile, places, tiled, tiled_flops, tiled_workspace

from attnbench.api import (
    AttentionCall,
    Case,
    Patterned,
    attention_builder,
    building_mask,
    compile_alone,
    reason_against_flex,
)


def blocks_seen(
    case: Case, *, block: int, window: int, global_blocks: int, random_blocks: int, seed: int
) -> dict[int, list[int]]:
    """For each block in which there are queries the blocks of keys that it sees, in order."""
    last, hides, found = (case.kv_len - 1) // block, case.mask.text == "causal", {}
    for own in range((case.kv_len - case.seq_len) // block, last + 1):
        there = range((own if hides else last) + 1)
        near = range(own - window // 2, own + window // 2 + 1)
        others = [n for n in there[global_blocks:] if n not in near] if own >= 0 else []
        drawn = Random(f"{seed} {own}").sample(others, min(random_blocks, len(others)))
        seen = {*range(global_blocks), *near, *drawn}.intersection(there)
        found[own] = sorted(there if 0 <= own < global_blocks else seen)
    return found


def cover(
    case: Case, *, block: int, window: int, global_blocks: int, random_blocks: int, seed: int
) -> list[Tile]:
    """Each block of queries with its blocks of keys; neighbours are one stretch."""
    offset, hides, tiles = case.kv_len - case.seq_len, case.mask.text == "causal", []
    more = {"global_blocks": global_blocks, "random_blocks": random_blocks, "seed": seed}

    def earlier(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        return key_J <= place_I1

    for own, seen in blocks_seen(case, block=block, window=window, **more).items():
        stretches: list[range] = []
        for number in seen:
            keys = range(number * block, min((number + 1) * block, case.kv_len))
            if stretches and stretches[-1].stop == keys.start:
                keys = range(stretches.pop().start, keys.stop)
            stretches.append(keys)
        first, end = max(own * block, offset), min((own + 1) * block, case.kv_len)
        queries = range(first - offset, end - offset)
        tiles.append(Tile(queries, tuple(stretches), earlier if hides else None))
    return tiles


def definition(
    case: Case, *, block: int, window: int, global_blocks: int, random_blocks: int, seed: int
) -> Patterned:
    """Softmax attention over the pairs whose blocks see each other."""
    (place_L1, key_S), causal = places(case), case.mask.text == "causal"
    more = {"global_blocks": global_blocks, "random_blocks": random_blocks, "seed": seed}
    found = blocks_seen(case, block=block, window=window, **more)
    sees = torch.zeros(len(found), (case.kv_len - 1) // block + 1, dtype=torch.bool)
    for row, seen in zip(sees, found.values(), strict=True):
        row[seen] = True
    row_L1 = place_L1.div(block, rounding_mode="floor") - min(found)
    admitted_LS = sees.to(case.device)[row_L1, key_S // block]
    return Patterned(case, admitted_LS & (key_S <= place_L1) if causal else admitted_LS)


def supports(case: Case, *, window: int) -> str | None:
    """Why the window is impossible, or None."""
    return None if window % 2 else "window must be odd: as many blocks on either side of the own"


def exact_at(case: Case, *, block: int) -> dict[str, int]:
    """A window that holds all blocks wherever its query stands."""
    return {"window": 2 * (max(case.seq_len, case.kv_len) // block + 1) + 1}


ROW: Any = {
    "family": "sparse", "time": "O(n d)", "memory": "O(n)", "definition": definition,
    "exact_at": exact_at, "flops": tiled_flops(cover), "useful": tiled_flops(cover, useful=True),
}  # fmt: skip


@attention_builder("bigbird", **ROW, workspace=tiled_workspace(cover), supports=supports)
def bigbird(
    case: Case,
    *,
    block: int = 64,
    window: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> AttentionCall:
    """Blocks of keys: near, global and drawn at random."""
    sizes = {"block": block, "window": window, "global_blocks": global_blocks}
    return tiled(case, cover(case, **sizes, random_blocks=random_blocks, seed=seed))


def flex_supports(case: Case, *, block: int, window: int) -> str | None:
    """Why FlexAttention or the window cannot take the case here, or None."""
    if case.seq_len != case.kv_len:
        return "FlexAttention's blocks of queries are those of keys: needs as many of both"
    if case.device == "cuda" and block % 128:
        return "FlexAttention needs blocks of a multiple of 128 on CUDA"
    return supports(case, window=window) or reason_against_flex(case)


@attention_builder(
    "bigbird-flex",
    **ROW,
    supports=flex_supports,
    dtypes=("float32", "bfloat16", "float16"),
    compiles=True,
    workloads=("attention", "layer"),
)
def bigbird_flex(
    case: Case,
    *,
    block: int = 128,
    window: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> AttentionCall:
    """The same by FlexAttention, under torch.compile."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    more = {"global_blocks": global_blocks, "random_blocks": random_blocks, "seed": seed}
    seen = blocks_seen(case, block=block, window=window, **more)
    hides = case.mask.text == "causal"

    def earlier(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query if hides else key >= 0

    def listed(lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks of keys each block of queries has, and which, (1, 1, Q) and (…, Q)."""
        rows = [row + [0] * (len(seen) - len(row)) for row in lists]
        like: Any = {"dtype": torch.int32, "device": case.device}
        return torch.tensor([[list(map(len, lists))]], **like), torch.tensor([[rows]], **like)

    with building_mask:
        last = len(seen) - 1  # it may be shorter than a block
        whole = [[n for n in row if n < (own if hides else last)] for own, row in seen.items()]
        cut = [[n for n in row if n >= (own if hides else last)] for own, row in seen.items()]
        sizes: Any = {"BLOCK_SIZE": block, "seq_lengths": (case.seq_len, case.kv_len)}
        mask = BlockMask.from_kv_blocks(*listed(cut), *listed(whole), mask_mod=earlier, **sizes)
    scale, gqa = case.softmax_scale, case.kv_heads != case.heads

    def flex(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> Any:
        return flex_attention(q_BHLD, k_BGSD, v_BGSV, block_mask=mask, scale=scale, enable_gqa=gqa)

    return compile_alone(flex)
