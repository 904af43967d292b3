import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.schema.case import Case, Mask, parse_mask
from attnbench.theory import costs

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


def sees(mask: str, query: int, key: int, queries: int, keys: int) -> bool:
    """Each mask in words: causal up to one's own place from the end, a window of the last W."""
    place = query + keys - queries  # the last query stands where the last key does
    name, _, width = mask.partition(":")
    return {"full": True, "causal": key <= place, "window": place - int(width or 0) < key <= place}[
        name
    ]


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("d", "v"), [(4, 4), (3, 5)])
@pytest.mark.parametrize("mask", ["full", "causal", "window:1", "window:3", "window:99"])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (1, 7), (7, 1)])
def test_useful_flops_equal_multiply_adds_done_one_by_one(
    queries, keys, mask, d, v, heads, kv_heads, pass_
):
    case = Case(
        pass_=pass_,
        heads=heads,
        kv_heads=kv_heads,
        seq_len=queries,
        kv_len=keys,
        head_dim=d,
        value_dim=v,
        mask=parse_mask(mask),
    )
    multiply_adds = 0
    for _head in range(heads):
        for query in range(queries):
            for key in range(keys):
                if not sees(mask, query, key, queries, keys):
                    continue
                forward = sum(1 for _ in range(d)) + sum(1 for _ in range(v))  # q·k, p·v
                # The score again, do·v, and what one pair adds to dv, dq and dk.
                backward = sum(1 for width in (d, v, v, d, d) for _ in range(width))
                multiply_adds += {
                    "forward": forward,
                    "backward": backward,
                    "both": forward + backward,
                }[pass_]
    assert costs.attention_flops_useful(case) == 2 * multiply_adds


@pytest.mark.parametrize(
    ("pass_", "mask", "pairs", "recompute", "reasons"),
    [
        ("forward", "causal", 36, True, []),
        ("both", "full", 64, True, []),
        (
            "forward",
            "causal",
            64,
            True,
            ["the full square of pairs, of which the mask admits 56.2 %"],
        ),
        ("backward", "full", 64, False, ["no scores recomputed in the backward pass"]),
        ("both", "causal", 64, False, ["the full square", "no scores recomputed"]),
        ("backward", "causal", 36, False, ["no scores recomputed"]),
        ("both", "causal", 48, True, ["whole blocks where the mask cuts through: 1.33 x"]),
        ("forward", "causal", 30, True, []),  # fewer than the mask admits: no reason is made up
        ("forward", "full", 65, True, []),
    ],
)
def test_why_flops_differ_is_found_from_their_number(pass_, mask, pairs, recompute, reasons):
    case = Case(pass_=pass_, seq_len=8, head_dim=4, mask=parse_mask(mask))
    found = costs.why_core_flops(case, costs.core_flops(case, pairs, recompute=recompute))
    assert len(found) == len(reasons)
    for text, start in zip(found, reasons, strict=True):
        assert text.startswith(start)


def test_flops_that_fit_no_explanation_get_none():
    case = Case(seq_len=8, mask=parse_mask("causal"))
    assert costs.why_core_flops(case, costs.attention_flops_useful(case) + 1) == []


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
