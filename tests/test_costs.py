import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench import costs
from attnbench.case import Case, Mask, parse_mask

sizes = st.integers(1, 14)
masks = st.sampled_from(["full", "causal", "window:1", "window:4", "window:40"]).map(parse_mask)


def brute_pairs(mask: Mask, queries: int, keys: int) -> int:
    """Count the mask cell by cell, from its definition."""
    return sum(
        (mask.after is None or key - (query + keys - queries) <= mask.after)
        and (mask.before is None or (query + keys - queries) - key <= mask.before)
        for query in range(queries)
        for key in range(keys)
    )


@given(mask=masks, queries=sizes, keys=sizes)
def test_admitted_pairs_equal_a_count_of_the_mask(mask: Mask, queries: int, keys: int):
    assert costs.admitted_pairs(mask, queries, keys) == brute_pairs(mask, queries, keys)


@given(
    mask=masks,
    queries=sizes,
    keys=sizes,
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (4, 6)]),
    pass_=st.sampled_from(["forward", "backward", "both"]),
)
def test_useful_flops_equal_a_count_of_multiply_adds(mask, queries, keys, heads, dims, pass_):
    case = Case(
        pass_=pass_,
        batch=2,
        heads=heads[0],
        kv_heads=heads[1],
        seq_len=queries,
        kv_len=keys,
        head_dim=dims[0],
        value_dim=dims[1],
        mask=mask,
    )
    d, v = dims
    forward = [("qk", d), ("pv", v)]
    backward = [("qk again", d), ("do v", v), ("p do", v), ("ds k", d), ("ds q", d)]
    products = {"forward": forward, "backward": backward, "both": forward + backward}[pass_]
    count = 0
    for _ in range(case.batch * case.heads):
        for _, width in products:
            count += brute_pairs(mask, queries, keys) * 2 * width
    assert costs.attention_flops_useful(case) == count


def test_backward_is_two_and_a_half_times_forward_where_dims_agree():
    forward = costs.attention_flops_useful(Case())
    assert forward == 4 * 4 * 512 * 512 * 64
    assert costs.attention_flops_useful(Case(pass_="backward")) == 2.5 * forward
    assert costs.attention_flops_useful(Case(pass_="both")) == 3.5 * forward


@pytest.mark.parametrize("mask", ["causal", "window:4"])
def test_decode_flops_count_every_step_and_projection(mask):
    case = Case(
        workload="decode",
        seq_len=5,
        new_tokens=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        width=24,
        mask=parse_mask(mask),
    )
    steps = 0
    for t in range(3):
        keys = min(5 + t + 1, 4 if mask == "window:4" else 99)
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
        pass_=pass_,
        dtype="bfloat16",
        batch=2,
        heads=3,
        kv_heads=1,
        seq_len=4,
        kv_len=5,
        head_dim=8,
        value_dim=6,
    )
    assert costs.attention_bytes_min(case) == elements * 2
