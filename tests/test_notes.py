"""What five lecture notes on attention derive: worked examples, shapes and identities.

Each test is one statement, with the note's number and, where the note is wrong, what is right.
What a run can decide of the same notes is in attnbench/analysis/claims/notes.toml; docs/notes.md
has all that they state.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import attnbench
from attnbench.schema.case import Case, parse_position
from attnbench.worker.positions import addition, rotated

PAGE = (Path(__file__).parent.parent / "docs" / "notes.md").read_text(encoding="utf-8")
ROPE = parse_position("rope-interleaved")  # the pairs (2k, 2k + 1) of the notes
SIZES = [(4, 8, 2), (5, 12, 3), (64, 64, 8)]  # n, width, heads
PLACES = [(0, 0), (5, 2), (3, 40), (1000, 4096)]  # of query and key


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(2017)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attend(q, k, v, *, impl="naive", causal=False):
    """Attention over the last two axes by one of the package's implementations."""
    lifted = [x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)]
    return attnbench.get(impl)(*lifted, causal=causal).reshape(*q.shape[:-1], v.shape[-1])


def split(x, heads):
    """(n, H·D) into (H, n, D)."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def merge(x):
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def rope(x, place):
    return rotated(x[None], ROPE, torch.tensor([place]), place)[0]


def close(found, wanted):
    return found.shape == wanted.shape and bool(torch.allclose(found, wanted, rtol=0, atol=1e-10))


def test_003_the_page_has_the_right_values_as_its_code_prints_them():
    (code,) = re.findall("```python\n(.*?)```", PAGE, re.S)
    printed: list[torch.Tensor] = []
    exec(code, {"print": lambda *values: printed.extend(values)})
    rows = [row.split("|")[3] for row in PAGE.splitlines() if row.endswith("| above |")]
    right = re.findall(r"\d?\.\d\d+", "".join(rows))
    values = torch.cat([x.flatten() for x in printed]).tolist()
    places = [len(text.partition(".")[2]) for text in right]
    rounded = [f"{x:.{digits}f}" for x, digits in zip(values, places, strict=True)]
    assert right == [text.removeprefix("0") for text in rounded]


def test_000_003_and_004_the_shapes_of_the_examples():
    head = torch.zeros(3, 512) @ torch.zeros(512, 512 // 8)
    assert head.shape == attend(head, head, head).shape == (3, 64)
    assert (torch.cat([head] * 8, dim=-1) @ torch.zeros(8 * 64, 512)).shape == (3, 512)
    two = split(torch.zeros(4, 8), 2)  # four tokens of width eight
    assert (two @ two.mT).shape == (2, 4, 4)
    assert merge(attend(two, two, two)).shape == (4, 8)
    q, k = torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 7, 4)  # one query over a cache of T keys
    assert attnbench.get("naive")(q, k, k).shape == q.shape
    many = torch.zeros(12, 1, 1).expand(12, 1000, 1)
    scores = (many @ many.mT).numel()
    assert f" {scores:,}, in float32 {scores * 4 / 2**20:.1f} MiB" in PAGE
    assert f" {100 * (1 - 97 / 144):.1f} %" in PAGE
    for shapes in (((10, 512), (64, 64)), ((8, 4), (8, 1))):  # printed: W_i square; W × token
        with pytest.raises(RuntimeError):
            torch.zeros(shapes[0]) @ torch.zeros(shapes[1])


def test_003_weights_lie_in_0_to_1_sum_to_1_and_keep_the_order_of_the_scores():
    scores, ones = torch.randn(64, 64) * 8, torch.eye(64)
    weights = attend(scores * 8, ones, ones)  # the scores are q itself
    assert bool(((weights >= 0) & (weights <= 1)).all())
    assert close(weights.sum(-1), torch.ones(64))
    assert bool((weights.gather(-1, scores.argsort(-1)).diff(dim=-1) >= 0).all())


def test_003_division_by_the_root_of_d_keeps_the_scores_variance():
    """Note 000 prints d_h · QKᵀ, whose variance would be d³."""
    for d in (4, 64, 1024):
        q, k = torch.randn(2, 4000, d)
        error = 4 * math.sqrt((2 + 6 / d) / 4000)
        assert (q * k).sum(-1).var().item() == pytest.approx(d, rel=error)


@pytest.mark.parametrize(("n", "width", "heads"), SIZES)
def test_002_the_heads_matrices_can_be_combined_but_not_their_softmaxes(n, width, heads):
    """One softmax over the combined width is a single wide head: split before it."""
    x, w = torch.randn(n, width), torch.randn(3, heads, width, width // heads) / math.sqrt(width)
    one_by_one = torch.cat([attend(*(x @ w[:, h])) for h in range(heads)], dim=-1)
    combined = torch.cat([torch.cat(list(part), dim=-1) for part in w], dim=-1)  # (E, 3E)
    q, k, v = torch.chunk(x @ combined, 3, -1)
    assert close(merge(attend(split(q, heads), split(k, heads), split(v, heads))), one_by_one)
    assert not torch.allclose(attend(q, k, v), one_by_one, atol=1e-3)
    assert close((x @ w[0, 0]) @ (x @ w[1, 0]).T, x @ (w[0, 0] @ w[1, 0].T) @ x.T)


@pytest.mark.parametrize(("n", "width", "heads"), [(4, 6, 2), *SIZES])
def test_001_view_and_transpose_cut_columns_into_heads_that_attend_separately(n, width, heads):
    q, k, v = (split(x, heads) for x in torch.rand(3, n, width))
    assert close(q, torch.stack(merge(q).chunk(heads, dim=-1)))
    assert close(merge(q), torch.cat(list(q), dim=-1))
    assert close(attend(q, k, v), attend(q, k, v, impl="naive-heads"))


def test_003_a_change_of_the_first_word_reaches_the_hundredth_in_one_step_of_attention():
    x = torch.randn(100, 4)
    changed = torch.cat([x[:1] + 0.5, x[1:]])
    assert (attend(x, x, x) - attend(changed, changed, changed))[99].abs().max() > 1e-6


@pytest.mark.parametrize("d", [2, 8, 64, 128])
@pytest.mark.parametrize(("m", "n"), PLACES)
def test_000_a_rotated_score_depends_on_the_distance_and_its_sine_has_the_other_sign(m, n, d):
    """Σ (q₁k₁ + q₂k₂) cos((m−n)θ) + (q₁k₂ − q₂k₁) sin((m−n)θ); printed: q₂k₁ − q₁k₂."""
    q, k = torch.randn(2, d)
    score = rope(q, m) @ rope(k, n)
    for shift in (1, 17, 1000):
        assert abs(rope(q, m + shift) @ rope(k, n + shift) - score) < 1e-10 * q.norm() * k.norm()
    angle = (m - n) * 10000.0 ** (-torch.arange(0, d, 2) / d)
    same, cross = q[0::2] * k[0::2] + q[1::2] * k[1::2], q[0::2] * k[1::2] - q[1::2] * k[0::2]
    right, printed = (same @ angle.cos() + sign * (cross @ angle.sin()) for sign in (1, -1))
    assert abs(right - score) < 1e-10 * q.norm() * k.norm()
    assert m == n or abs(printed - score) > 1e-3 * abs(score)


@pytest.mark.parametrize("shift", [1, 7, 100])
def test_002_one_rotation_takes_the_sinusoids_of_every_position_to_those_further_on(shift):
    case = Case(workload="layer", position=parse_position("sinusoidal"), width=16, dtype="float64")
    p = addition(case, 128)
    assert p is not None
    angle = shift * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    sine, cosine = p[..., 0::2], p[..., 1::2]
    turned = angle.cos() * sine + angle.sin() * cosine, angle.cos() * cosine - angle.sin() * sine
    moved = torch.stack(turned, dim=-1).flatten(-2)
    assert close(moved[..., :-shift, :], p[..., shift:, :])
