from itertools import product
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.schema.case import Case, parse_mask
from attnbench.theory import costs
from attnbench.theory.masks import admitted_pairs, mask_density
from attnbench.theory.traits import impossible
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


# What each pass reads and writes, by the last letter as wide as q, k, v or o.
READ = {"forward": "q k v", "backward": "q k v o do", "both": "q k v do"}
WRITTEN = {"forward": "o", "backward": "dq dk dv", "both": "o dq dk dv"}


@hypothesis.settings(max_examples=300)
@given(
    mask=masks,
    queries=sizes,
    keys=sizes,
    batch=st.integers(1, 4),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (8, 6)]),
    pass_=st.sampled_from(list(READ)),
)
def test_least_traffic_is_the_tokens_that_the_mask_lets_meet_and_every_output(
    mask, queries, keys, batch, heads, dims, pass_
):
    (d, v), (query_heads, kv_heads) = dims, heads
    case = Case(
        pass_=pass_, dtype="bfloat16", batch=batch, heads=query_heads, kv_heads=kv_heads,
        seq_len=queries, kv_len=keys, head_dim=d, value_dim=v, mask=parse_mask(mask),
    )  # fmt: skip
    sees = [admitted(mask, queries, keys, item) for item in range(batch)]
    seeing, seen = (sum(int(one.any(axis).sum()) for one in sees) for axis in (1, 0))
    width = {"q": query_heads * d, "k": kv_heads * d, "v": kv_heads * v, "o": query_heads * v}
    numbers = 0
    for name in READ[pass_].split():
        numbers += width[name[-1]] * (seeing if name[-1] in "qo" else seen)
    for name in WRITTEN[pass_].split():
        numbers += width[name[-1]] * batch * (queries if name[-1] in "qo" else keys)
    assert costs.attention_bytes_min(case) == 2 * numbers


@hypothesis.settings(max_examples=300)
@given(
    mask=st.sampled_from(["causal", "window:1", "window:3", "window:40", "padding:4+9+1"]),
    cache=st.sampled_from(["static", "concat", "paged:4", "int8", "sliding", "none", "rerun"]),
    batch=st.integers(1, 4),
    context=sizes,
    steps=st.integers(1, 4),
    together=st.integers(1, 4),
)
def test_least_traffic_of_decoding_is_the_keys_that_the_mask_lets_each_step_see(
    mask, cache, batch, context, steps, together
):
    case = Case(
        workload="decode", batch=batch, seq_len=context, kv_len=context, heads=4, kv_heads=2,
        head_dim=8, value_dim=6, width=24, cache=cache, new_tokens=steps * together,
        query_tokens=together, mask=parse_mask(mask),
    )  # fmt: skip
    hypothesis.assume(impossible(case) is None)
    seen = 0
    for item, step in product(range(batch), range(1, steps + 1)):
        end = case.mask.length(context, item) + step * together
        step_mask = "causal" if case.mask.lengths else mask  # each item has its own context
        seen += int(admitted(step_mask, together, end).any(0).sum())
    key = {"none": 4 * 24, "rerun": 4 * 24, "int8": 2 * (8 + 6 + 2 * 4)}.get(cache, 2 * 4 * (8 + 6))
    weights = 24 * (4 * 8 + 2 * 8 + 2 * 6 + 4 * 6)
    states = 1 if cache in ("none", "rerun") else 2  # without a cache, among those of the keys
    total = 4 * steps * (weights + states * batch * together * 24) + key * seen
    assert 0 <= total / case.units - costs.decode_bytes_min(case) < 2  # rounded down


@pytest.mark.parametrize(("pass_", "part"), [("forward", 1), ("backward", 4 / 5), ("both", 6 / 7)])
def test_attention_overtakes_a_layers_projections_at_n_of_its_width_and_that_of_its_keys(
    pass_, part
):
    layer: dict[str, Any] = {
        "workload": "layer",
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "projection": "fused",
    }
    full = Case(**layer, pass_=pass_, seq_len=300)
    assert costs.flops_crossing(full) == pytest.approx(part * 512 * (1 + 2 / 8))
    causal = Case(**layer, pass_=pass_, seq_len=300, mask=parse_mask("causal"))
    assert costs.flops_crossing(causal) == pytest.approx(part * 2 * 512 * (1 + 2 / 8) - 1)
    window = Case(**layer, pass_=pass_, seq_len=300, mask=parse_mask("window:64"))
    assert costs.flops_crossing(window) is None
