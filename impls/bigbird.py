"""BigBird: blocks of keys near each block of queries, global ones, and some at random.

Zaheer et al. 2020 (arXiv 2007.14062), section 2 and appendix D (the internal construction, ITC):
tokens are cut into blocks. A block of queries sees `window` blocks, its own in their middle, the
first `global_blocks`, and `random_blocks` drawn with `seed`, the same for all heads; queries of a
global block see all. Under `causal` what lies ahead is left out, of random blocks, too.

Computed are whole blocks: the keys of a block of queries lie side by side in a copy.
"""

import torch

from attnbench.api import (
    AttentionCall,
    Case,
    Patterned,
    Tile,
    attention_builder,
    places,
    run_file,
    tiled,
    tiled_flops,
    tiled_workspace,
)


def draw(blocks: int, random_blocks: int, seed: int) -> torch.Tensor:
    """The random blocks of each block of queries: (blocks, at most `random_blocks`), distinct."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(blocks, blocks, generator=generator)
    return chances.topk(min(random_blocks, blocks), dim=1).indices


def cover(
    case: Case, *, block: int, window: int, global_blocks: int, random_blocks: int, seed: int
) -> list[Tile]:
    """Each block of queries with its blocks of keys; neighbours are one stretch."""
    offset, last = case.kv_len - case.seq_len, (case.kv_len - 1) // block
    hides, drawn = case.mask.text == "causal", draw(last + 1, random_blocks, seed).tolist()

    def earlier(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        return key_J <= place_I1

    tiles = []
    for own in range(offset // block, last + 1):
        seen = set(range(own - window // 2, own + window // 2 + 1)) | set(range(global_blocks))
        seen |= set(drawn[own]) if own >= 0 else set()
        seen = set(range(last + 1)) if 0 <= own < global_blocks else seen
        stretches: list[range] = []
        for number in sorted(seen & set(range((own if hides else last) + 1))):
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
    place_L1, key_S = places(case)
    own_L1, other_S = place_L1.div(block, rounding_mode="floor"), key_S // block
    admitted_LS = (own_L1 - other_S).abs() <= window // 2
    admitted_LS |= (other_S < global_blocks) | ((own_L1 >= 0) & (own_L1 < global_blocks))
    blocks = int(other_S[-1]) + 1
    table = torch.zeros(blocks, blocks, dtype=torch.bool)
    table.scatter_(1, draw(blocks, random_blocks, seed), value=True)
    admitted_LS |= table.to(case.device)[own_L1.clamp(min=0), other_S] & (own_L1 >= 0)
    return Patterned(
        case, admitted_LS & (key_S <= place_L1) if case.mask.text == "causal" else admitted_LS
    )


def supports(case: Case, *, window: int) -> str | None:
    """Why the window is impossible, or None."""
    return None if window % 2 else "window must be odd: as many blocks on either side of the own"


def exact_at(case: Case, *, block: int) -> dict[str, int]:
    """A window that holds all blocks wherever its query stands."""
    return {"window": 2 * (max(case.seq_len, case.kv_len) // block + 1) + 1}


@attention_builder(
    "bigbird",
    family="sparse",
    time="n d",
    memory="O(n)",
    definition=definition,
    exact_at=exact_at,
    flops=tiled_flops(cover),
    workspace=tiled_workspace(cover),
    supports=supports,
)
def bigbird(
    case: Case,
    *,
    block: int = 64,
    window: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
) -> AttentionCall:
    """Blocks of keys that are near, global or drawn at random."""
    sizes = {"block": block, "window": window, "global_blocks": global_blocks}
    return tiled(case, cover(case, **sizes, random_blocks=random_blocks, seed=seed))


if __name__ == "__main__":
    run_file(__file__)
