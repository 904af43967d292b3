from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.schema.case import Case, parse_mask
from attnbench.theory import costs
from attnbench.theory.masks import admitted_pairs, mask_density
from tests.masks import admitted, masks, sizes


@given(
    mask=masks,
    queries=sizes,
    keys=sizes,
    batch=st.integers(1, 3),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (3, 5)]),
    pass_=st.sampled_from(["forward", "backward", "both"]),
)
def test_pairs_and_useful_flops_equal_a_count_one_by_one(
    mask, queries, keys, batch, heads, dims, pass_
):
    (d, v), (query_heads, kv_heads) = dims, heads
    case = Case(
        pass_=pass_, batch=batch, heads=query_heads, kv_heads=kv_heads, seq_len=queries,
        kv_len=keys, head_dim=d, value_dim=v, mask=parse_mask(mask),
    )  # fmt: skip
    pairs = [int(admitted(mask, queries, keys, item).sum()) for item in range(batch)]
    real = [  # tokens: as many queries as keys are the same tokens, of which some are padding
        admitted(mask, queries, keys, item)[: case.mask.length(keys, item)].sum()
        for item in range(batch)
    ]  # fmt: skip
    useful = int(sum(real if queries == keys else pairs))
    forward = [d, v]  # q·k, p·v
    backward = [d, v, v, d, d]  # the score again, do·v, and what a pair adds to dv, dq and dk
    widths = {"forward": forward, "backward": backward, "both": forward + backward}[pass_]
    assert [admitted_pairs(case.mask, queries, keys, item) for item in range(batch)] == pairs
    assert costs.attention_flops_useful(case) == 2 * query_heads * useful * sum(widths)
    assert mask_density(case) == sum(pairs) / (batch * queries * keys)


@pytest.mark.parametrize(("pass_", "mask", "pairs", "recompute", "reasons"), [
    ("forward", "causal", 36, True, []),
    ("both", "full", 64, True, []),
    ("forward", "causal", 64, True, ["the full square of pairs, of which 56"]),
    ("backward", "full", 64, False, ["no scores recomputed in the backward pass"]),
    ("both", "causal", 64, False, ["the full square", "no scores recomputed"]),
    ("backward", "causal", 36, False, ["no scores recomputed"]),
    ("both", "causal", 48, True, ["whole blocks where the mask cuts through: 1.33 x"]),
    ("forward", "causal", 30, True, []),  # fewer than the mask admits: no reason is made up
    ("forward", "full", 65, True, []),
])  # fmt: skip
def test_why_flops_differ_is_found_from_their_number(pass_, mask, pairs, recompute, reasons):
    case = Case(pass_=pass_, seq_len=8, head_dim=4, mask=parse_mask(mask))
    found = costs.why_core_flops(case, costs.core_flops(case, pairs, recompute=recompute))
    assert [text[: len(start)] for text, start in zip(found, reasons, strict=True)] == reasons
    assert costs.why_core_flops(case, costs.core_flops(case, pairs) + 1) == []


@pytest.mark.parametrize(
    ("mask", "contexts", "most"),
    [("causal", (5, 5), 99), ("window:4", (5, 5), 4), ("padding:5+2", (5, 2), 99)],
)
def test_decode_flops_count_every_step_and_projection(mask, contexts, most):
    case = Case(
        workload="decode", batch=2, seq_len=5, new_tokens=3, heads=4, kv_heads=2, head_dim=8,
        width=24, mask=parse_mask(mask),
    )  # fmt: skip
    steps = 0
    for context, t in product(contexts, range(3)):
        keys = min(context + t + 1, most)
        steps += 2 * 4 * keys * (8 + 8)  # scores and weighted sum of one query, each head
        steps += 2 * 24 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8)  # q, k, v and output projections
    assert costs.decode_flops_useful(case) == steps // 3


@pytest.mark.parametrize(
    ("pass_", "elements"),
    # q: 2·3·4·8, k: 2·1·5·8, v: 2·1·5·6, o: 2·3·4·6, batch 2 included
    [("forward", 192 + 80 + 60 + 144), ("both", 2 * (192 + 80 + 60) + 2 * 144)],
)
def test_least_traffic_reads_inputs_and_writes_outputs_once(pass_, elements):
    case = Case(
        pass_=pass_, dtype="bfloat16", batch=2, heads=3, kv_heads=1, seq_len=4, kv_len=5,
        head_dim=8, value_dim=6,
    )  # fmt: skip
    assert costs.attention_bytes_min(case) == elements * 2
