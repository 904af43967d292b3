"""The reference is itself checked: by hand, by loops, and by results that must not pass."""

import itertools
import math

import pytest
import torch

from attnbench.schema.case import Case, Position, parse_mask, parse_position
from attnbench.theory.traits import case_label
from attnbench.worker.inputs import Draw, attention_tensors, fill_attention, needle_pairs
from attnbench.worker.reference import Reference, Size, judge, plain_attention
from attnbench.worker.workloads import WORKLOADS

reference = WORKLOADS.get("attention").truth


def drawn(case: Case, **draw) -> dict[str, torch.Tensor]:
    tensors = attention_tensors(case)
    fill_attention(case, tensors, Draw(seed=3, **draw))
    return tensors


def loop_attention(case: Case, q, k, v) -> torch.Tensor:
    """Attention element by element, as the definition reads."""
    o = torch.zeros(case.batch, case.heads, case.seq_len, case.value_dim, dtype=torch.float64)
    for b, h, i in itertools.product(range(case.batch), range(case.heads), range(case.seq_len)):
        g = h * case.kv_heads // case.heads
        seen = []
        for j in range(case.kv_len):
            behind = i + case.kv_len - case.seq_len - j  # how far key j lies before the query
            after = case.mask.after is None or -behind <= case.mask.after
            before = case.mask.before is None or behind <= case.mask.before
            if after and before:
                seen.append(j)
        if not seen:
            continue
        scores = [float(q[b, h, i] @ k[b, g, j]) * case.softmax_scale for j in seen]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        for weight, j in zip(weights, seen, strict=True):
            o[b, h, i] += weight / sum(weights) * v[b, g, j]
    return o


CASES = [
    Case(heads=2, seq_len=5, head_dim=4),
    Case(heads=2, seq_len=5, kv_len=8, head_dim=4, mask=parse_mask("causal")),
    Case(heads=2, seq_len=8, kv_len=5, head_dim=4, mask=parse_mask("causal")),
    Case(heads=4, kv_heads=2, seq_len=6, head_dim=4, value_dim=3, mask=parse_mask("window:2")),
    Case(heads=3, kv_heads=1, batch=2, seq_len=4, head_dim=5, scale=0.7),
    Case(heads=1, seq_len=1, head_dim=2),
]


@pytest.mark.parametrize("case", CASES, ids=case_label)
def test_the_reference_equals_a_loop_over_the_definition(case):
    tensors = {name: x.double() for name, x in drawn(case).items()}
    o = plain_attention(case, tensors).values["o"]
    torch.testing.assert_close(o, loop_attention(case, *tensors.values()), rtol=1e-12, atol=1e-12)


TURNED = [
    Case(heads=2, seq_len=3, kv_len=5, head_dim=6, position=parse_position(name))
    for name in ("rope", "rope-interleaved:500")
]


@pytest.mark.parametrize("case", CASES + TURNED, ids=case_label)
def test_the_reference_gradients_equal_finite_differences(case):
    case = Case.from_json(case.to_json() | {"pass": "both"})
    tensors = {name: x.detach().double() for name, x in drawn(case).items()}
    values = plain_attention(case, tensors).values
    for name in "qkv":
        flat = tensors[name].view(-1)
        for index in range(0, flat.numel(), 7):
            ends = []
            for step in (1e-5, -1e-5):
                flat[index] += step
                o = plain_attention(case, {n: tensors[n] for n in "qkv"}).values["o"]
                flat[index] -= step
                ends.append(float((o * tensors["do"]).sum()))
            slope = (ends[0] - ends[1]) / 2e-5
            got = float(values["d" + name].reshape(-1)[index])
            assert slope == pytest.approx(got, abs=2e-8, rel=1e-6)


def test_the_reference_gives_the_values_computed_by_hand():
    # Two keys with scores 0 and ln 3 weigh 1/4 and 3/4; values 4 and 8 then average to 7.
    case = Case(heads=1, seq_len=1, kv_len=2, head_dim=1, value_dim=1)
    q, k, v = ([[[[1.0]]]], [[[[0.0], [math.log(3)]]]], [[[[4.0], [8.0]]]])
    tensors = {
        n: torch.tensor(x, dtype=torch.float64) for n, x in zip("qkv", (q, k, v), strict=True)
    }
    assert plain_attention(case, tensors).values["o"].item() == pytest.approx(7.0, abs=1e-12)


def test_the_reference_does_not_depend_on_its_block_size(monkeypatch):
    case = Case(pass_="both", heads=2, seq_len=33, kv_len=20, head_dim=4, mask=parse_mask("causal"))
    tensors = {name: x.detach().double() for name, x in drawn(case).items()}
    whole = plain_attention(case, tensors).values
    monkeypatch.setattr("attnbench.worker.reference._BLOCK_ELEMENTS", {"cpu": 7 * 2 * 20})
    for name, value in plain_attention(case, tensors).values.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["rope", "rope-interleaved"])
@pytest.mark.parametrize("dims", [8, 7])
def test_rotated_scores_depend_on_the_distance_alone(name, dims):
    case = Case(heads=1, seq_len=1, head_dim=dims, position=Position(name=name))
    q, k = torch.randn(2, dims, dtype=torch.float64)
    from attnbench.worker.positions import turned

    def score(m: int, n: int) -> float:
        turned_q = turned(q[None], case.position, torch.tensor([m]))
        turned_k = turned(k[None], case.position, torch.tensor([n]))
        return float(turned_q[0] @ turned_k[0])

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-6)


def naive_float32(case, tensors, mutate=lambda scores: scores):
    q, k, v = (tensors[name].detach() for name in "qkv")
    scores = mutate((q * case.softmax_scale) @ k.mT)
    return scores.softmax(-1) @ v


def verdict(case, tensors, o):
    return judge({"o": o}, reference(case, tensors), case.dtype)


def test_a_plain_result_passes():
    case = Case(heads=2, seq_len=40, head_dim=8)
    tensors = drawn(case)
    result = verdict(case, tensors, naive_float32(case, tensors))
    assert result.reason is None
    assert result.error_ratio is not None
    assert result.error_ratio <= 1


def test_an_inverted_causal_mask_is_noticed():
    case = Case(heads=2, seq_len=40, head_dim=8, mask=parse_mask("causal"))
    tensors = drawn(case)
    inverted = torch.ones(40, 40, dtype=torch.bool).tril()  # hides what should be seen
    inverted.fill_diagonal_(False)
    o = naive_float32(case, tensors, lambda s: s.masked_fill(inverted, -math.inf))
    assert "is off by" in (verdict(case, tensors, o).reason or "")


def test_a_top_left_mask_is_noticed_where_lengths_differ():
    case = Case(heads=2, seq_len=20, kv_len=30, head_dim=8, mask=parse_mask("causal"))
    tensors = drawn(case)
    hidden = ~torch.ones(20, 30, dtype=torch.bool).tril()
    o = naive_float32(case, tensors, lambda s: s.masked_fill(hidden, -math.inf))
    assert verdict(case, tensors, o).reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_dropped_key_at_long_n_cannot_hide_in_rounding(dtype):
    case = Case(heads=1, seq_len=2048, head_dim=64, dtype=dtype)
    tensors = drawn(case, needles=True)
    dropped = needle_pairs(case.mask, 2048, 2048, seed=3)[0][1]

    def drop(scores):
        scores[..., dropped] = -math.inf
        return scores

    assert verdict(case, tensors, naive_float32(case, tensors)).reason is None
    assert verdict(case, tensors, naive_float32(case, tensors, drop)).reason


def bfloat16_both(n: int = 2048) -> tuple[Case, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    case = Case(pass_="both", heads=1, seq_len=n, head_dim=64, dtype="bfloat16")
    tensors = drawn(case)
    q, k, v = (tensors[name].detach().requires_grad_() for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    gradients = torch.autograd.grad(o, (q, k, v), tensors["do"])
    return case, tensors, {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def scaled(factor):
    return lambda x: x * factor


def mostly_zero(x):
    kept = torch.zeros_like(x)
    kept[..., : x.shape[-2] // 10, :] = x[..., : x.shape[-2] // 10, :]
    return kept


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("o", scaled(0.98)),
        ("dq", scaled(0.9)),
        ("dk", scaled(0.9)),
        ("dv", scaled(0.95)),
        ("dq", mostly_zero),
        ("dk", mostly_zero),
        ("dv", mostly_zero),
    ],
)
def test_a_small_error_everywhere_cannot_hide_behind_one_large_element(name, damage):
    case, tensors, results = bfloat16_both()
    truth = reference(case, tensors)
    assert judge(results, truth, case.dtype).reason is None
    damaged = results | {name: damage(results[name])}
    assert f"{name} is off" in (judge(damaged, truth, case.dtype).reason or "")


def test_a_lost_block_of_keys_shows_in_the_plain_draw():
    case = Case(heads=1, seq_len=2048, head_dim=64, dtype="bfloat16")
    tensors = drawn(case)

    def drop(scores):
        scores[..., 512:576] = -math.inf
        return scores

    assert verdict(case, tensors, naive_float32(case, tensors, drop)).reason


def test_a_mask_that_lets_one_key_too_many_in_is_noticed():
    case = Case(heads=1, seq_len=2048, head_dim=64, dtype="bfloat16", mask=parse_mask("causal"))
    tensors = drawn(case, needles=True)

    def shifted(by):
        hidden = ~torch.ones(2048, 2048, dtype=torch.bool).tril(by)
        return lambda scores: scores.masked_fill(hidden, -math.inf)

    assert verdict(case, tensors, naive_float32(case, tensors, shifted(0))).reason is None
    assert verdict(case, tensors, naive_float32(case, tensors, shifted(1))).reason


@pytest.mark.parametrize("needles", [False, True])
def test_at_long_n_a_dropped_key_shows_by_its_needle_alone(needles):
    # Why needles are planted at all: among 16384 keys one is lost in the rounding.
    case = Case(heads=1, seq_len=64, kv_len=16384, head_dim=64, dtype="bfloat16")
    tensors = drawn(case, needles=needles)
    lost = needle_pairs(case.mask, 64, 16384, seed=3)[0][1]

    def drop(scores):
        scores[..., lost] = -math.inf
        return scores

    noticed = verdict(case, tensors, naive_float32(case, tensors, drop)).reason is not None
    assert noticed == needles


def test_needles_keep_their_weight_under_a_position_encoding():
    case = Case(heads=1, seq_len=256, head_dim=32, position=Position(name="rope"))
    tensors = drawn(case, needles=True)
    values = torch.zeros_like(tensors["v"])
    pairs = needle_pairs(case.mask, 256, 256, seed=3)
    for number, (_, key) in enumerate(pairs):
        values[..., key, 0] = number + 1.0
    tensors["v"] = values
    o = plain_attention(case, {n: x.double() for n, x in tensors.items()}).values["o"]
    for number, (query, _) in enumerate(pairs):
        assert float(o[0, 0, query, 0]) == pytest.approx(number + 1.0, rel=0.05)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_values_that_are_not_finite_never_pass(poison):
    case = Case(heads=1, seq_len=4, head_dim=4)
    tensors = drawn(case)
    o = naive_float32(case, tensors)
    o[0, 0, 0, 0] = poison
    assert "not finite" in (verdict(case, tensors, o).reason or "")


def test_an_overflowing_yardstick_excuses_nobody():
    truth = Reference(
        values={"o": torch.ones(3, dtype=torch.float64)}, allowed={"o": Size(max=1e-6, rms=1e-6)}
    )
    assert judge({"o": torch.full((3,), 1.1)}, truth, "float32").reason
    case = Case(heads=1, seq_len=8, head_dim=64, dtype="float16")
    tensors = drawn(case)
    tensors["q"].fill_(6e4)
    tensors["k"].fill_(6e4)
    allowed = reference(case, tensors).allowed["o"]
    assert math.isfinite(allowed.max)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "not a tensor"),
        (torch.zeros(1, 1, 4, 5), "shape"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.float64), "expected torch.float32"),
    ],
)
def test_what_is_no_result_at_all_is_named(output, words):
    case = Case(heads=1, seq_len=4, head_dim=4)
    assert words in (verdict(case, drawn(case), output).reason or "")


def test_the_gradient_that_is_exactly_zero_has_room_for_rounding():
    # At n = 1 the true dq is 0; what float32 leaves behind must pass, a real error must not.
    case = Case(pass_="both", heads=1, seq_len=1, head_dim=8)
    tensors = drawn(case)
    truth = reference(case, tensors)
    assert float(truth.values["dq"].abs().max()) == 0
    assert 0 < truth.allowed["dq"].max < 1e-4


def test_inputs_do_not_depend_on_layout_or_dtype():
    case, half = Case(heads=2, seq_len=9, head_dim=4), Case(heads=2, seq_len=9, dtype="bfloat16")
    plain, strided = attention_tensors(case), attention_tensors(case, strided=True)
    for tensors in (plain, strided):
        fill_attention(case, tensors, Draw(seed=5))
    assert not strided["q"].is_contiguous()
    assert torch.equal(plain["q"], strided["q"])
    assert half.element_bytes == 2


def test_recomputed_weights_have_room_for_the_rounding_of_their_log_sum_exp():
    # A fused backward makes the weights again as exp(s - lse); large logits make lse coarse.
    case = Case(pass_="both", heads=4, seq_len=64, head_dim=32, mask=parse_mask("causal"))
    tensors = drawn(case, query_amplitude=30.0)
    q, k, v = (tensors[name].detach().requires_grad_() for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    named = dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), tensors["do"]), strict=False)
    )
    truth = reference(case, tensors)
    result = judge({"o": o, **named}, truth, case.dtype)
    assert result.reason is None
    wrong = named | {"dv": named["dv"] * (1 + 1e-3)}
    assert judge({"o": o, **wrong}, truth, case.dtype).reason


def test_half_precision_gradients_get_no_extra_room():
    # Their statistics are kept in float32, so the term of the log-sum-exp is a 2^-16th there.
    case = Case(pass_="both", heads=1, seq_len=64, head_dim=16, dtype="bfloat16")
    tensors = drawn(case, needles=True)
    truth = reference(case, tensors)
    dropped = needle_pairs(case.mask, 64, 64, seed=3)[0][1]
    exact = plain_attention(case, {n: x.detach().double() for n, x in tensors.items()}).values
    missing = {name: x.bfloat16() for name, x in exact.items()}
    assert judge(missing, truth, case.dtype).reason is None
    missing["dv"][..., dropped, :] = 0
    assert "dv is off" in (judge(missing, truth, case.dtype).reason or "")


def test_a_float64_case_is_judged_by_what_float32_loses():
    case = Case(heads=2, seq_len=200, kv_len=530, head_dim=16, dtype="float64")
    tensors = drawn(case)
    q, k, v = (tensors[name] for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert verdict(case, tensors, o).reason is None
    coarse = naive_float32(case, {n: x.float() for n, x in tensors.items()}).double()
    assert verdict(case, tensors, coarse).reason
