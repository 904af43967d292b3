"""Position encodings against their definitions, written down a second time."""

from __future__ import annotations

import cmath
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnbench.api import dense_bias, position_bias
from attnbench.api.bias import learned
from attnbench.errors import UsageError
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.position import for_core
from attnbench.worker.positions import (
    addition,
    bias_scores,
    reason_against_position,
    rotated,
    rotation,
)

TRAINED, LENGTH, DIMS = 64, 256, 16
PLAIN = [10000.0 ** (-2 * i / DIMS) for i in range(DIMS // 2)]
STRETCHED = [(10000 * 4 ** (16 / 14)) ** (-2 * i / DIMS) for i in range(DIMS // 2)]


def by_parts(theta: float, slow: float, fast: float) -> float:
    """By wavelengths, as Llama's published code has it."""
    wavelength = 2 * math.pi / theta
    if wavelength < TRAINED / fast:
        return theta
    if wavelength > TRAINED / slow:
        return theta / 4
    smooth = (TRAINED / wavelength - slow) / (fast - slow)
    return (1 - smooth) * theta / 4 + smooth * theta


YARN = f"rope-yarn:factor=4:length={TRAINED}:slow=1:fast=8"
COLD = 0.1 * math.log(4) + 1
# Pairs turn 8 times and once at the indices 0.21 and 2.02: 0 and 3 where these are truncated.
TRUNCATED = [theta * (1, 3 / 4, 1 / 2, *[1 / 4] * 5)[i] for i, theta in enumerate(PLAIN)]
FIRST, LAST = (8 * math.log(TRAINED / 2 / math.pi / x) / math.log(10000) for x in (8, 1))

# The angles a place, and what multiplies a rotated vector.
ROTARY: dict[str, tuple[list[float], float]] = {
    "rope": (PLAIN, 1.0),
    "rope:500": ([500.0 ** (-2 * i / DIMS) for i in range(DIMS // 2)], 1.0),
    "rope-interleaved": (PLAIN, 1.0),
    "rope-matrix": (PLAIN, 1.0),
    "rope-partial:0.5": ([10000.0 ** (-2 * i / 8) for i in range(4)], 1.0),
    "rope-linear:4": ([theta / 4 for theta in PLAIN], 1.0),
    "rope-ntk:4": (STRETCHED, 1.0),
    f"rope-dynamic:{TRAINED}": (STRETCHED, 1.0),
    f"rope-dynamic:{LENGTH}": (PLAIN, 1.0),
    f"rope-dynamic:{TRAINED}:factor=3": (
        [(10000 * (3 * 4 - 2) ** (16 / 14)) ** (-2 * i / DIMS) for i in range(DIMS // 2)], 1.0
    ),
    f"{YARN}:ramp=turns": ([by_parts(theta, 1, 8) for theta in PLAIN], COLD),
    YARN: (TRUNCATED, COLD),
    f"{YARN}:mscale=2:mscale_all_dim=0.5": (
        TRUNCATED, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    ),
    f"{YARN}:truncate=0:attention_factor=1.5": (
        [
            theta * (1 - 3 / 4 * min(1, max(0, (i - FIRST) / (LAST - FIRST))))
            for i, theta in enumerate(PLAIN)
        ],
        1.5,
    ),
    f"rope-longrope:factor=4:length={TRAINED}:long=2+3+5": (
        [theta / by for theta, by in zip(PLAIN, (2, 3, 5, 5, 5, 5, 5, 5), strict=True)],
        math.sqrt(1 + math.log(4) / math.log(64)),
    ),
    f"rope-longrope:attention_factor=2:length={LENGTH}:short=1+1.5": (
        [PLAIN[0], *(theta / 1.5 for theta in PLAIN[1:])], 2.0
    ),
    f"rope-llama3:factor=4:length={TRAINED}:base=10000": (
        [by_parts(theta, 1, 4) for theta in PLAIN], 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ROTARY)
@pytest.mark.parametrize("start", [5, 131_071])
def test_every_rotary_encoding_turns_pairs_by_the_angles_of_its_paper(text, start):
    """At a long context, too: float32 angles would be off by a hundredth of a radian."""
    case = Case(head_dim=DIMS + 1, dtype="float64", position=parse_position(text))
    thetas, factor = ROTARY[text]
    neighbours = case.position.name in ("rope-interleaved", "rope-matrix")
    x = torch.randn(2, 3, 4, DIMS + 1, dtype=torch.float64)
    expected = x.clone()
    for row in range(4):
        for i, theta in enumerate(thetas):
            first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + len(thetas))
            turned = torch.complex(x[..., row, first], x[..., row, second])
            turned *= cmath.rect(factor, (start + row) * theta)
            expected[..., row, first], expected[..., row, second] = turned.real, turned.imag
    rotate = rotation(case, start, 4, LENGTH)
    assert rotate is not None
    torch.testing.assert_close(rotate(x), expected, rtol=1e-9, atol=1e-9)
    places = torch.arange(start, start + 4)
    torch.testing.assert_close(rotated(x, case.position, places, LENGTH), rotate(x))


def test_parameters_at_their_default_leave_the_name_and_others_are_written_out():
    assert parse_position("rope:10000").text == "rope"
    assert parse_position("rope-yarn:base=10000:factor=8").text == "rope-yarn:8"
    assert parse_position("rope-yarn:8").values["length"] == 4096
    assert parse_position("rope-yarn:ramp=index").text == "rope-yarn"
    assert parse_position("rope-longrope:long=1.0+2.50").text == "rope-longrope:long=1+2.5"
    wrong = {"slow=9:fast=3": "slow below", "0.5": "factor", "ramp=x": "one of index, turns"}
    for text, what in {f"rope-yarn:{given}": what for given, what in wrong.items()}.items():
        with pytest.raises(UsageError, match=what):
            parse_position(text)


def test_sines_are_added_to_x_and_a_table_that_is_too_short_is_refused():
    case = Case(workload="layer", seq_len=5, width=6, dtype="float64")
    added = addition(replace(case, position=parse_position("sinusoidal:100")), 5)
    assert added is not None
    for place, dim in itertools.product(range(5), range(6)):
        angle = place / 100 ** (dim // 2 * 2 / 6)
        expected = math.cos(angle) if dim % 2 else math.sin(angle)
        assert added[place, dim] == pytest.approx(expected)
    texts = ("learned", "learned:5", "learned:4", "sinusoidal")
    reasons = [
        reason_against_position(replace(case, position=parse_position(text))) for text in texts
    ]
    assert reasons == [None, None, "learned:4 has no vector for the place of token 5", None]
    given = Case(position=parse_position("sinusoidal"))
    assert "given q, k and v" in (reason_against_position(given) or "")


def test_a_shorter_table_of_what_is_learned_is_the_beginning_of_a_longer_one():
    """In the blocks of 16 that torch draws, widths and lengths may lie anywhere."""
    for width in (*range(1, 35), 100):
        whole = learned(70, width, "cpu")
        assert whole.unique().numel() == whole.numel()
        for rows in range(1, 70):
            assert torch.equal(learned(rows, width, "cpu"), whole[:rows]), (rows, width)


@pytest.mark.parametrize("name", ["alibi", "t5", "alibi:heads=3", "t5:distance=200:heads=4"])
def test_heads_that_are_left_keep_the_bias_that_they_had_among_all(name):
    whole = Case(heads=6, seq_len=9, position=parse_position(name))
    left = replace(whole, heads=4, kv_heads=2, position=for_core(whole.position, 6))
    for case in (left, replace(left, heads=3, kv_heads=3)):
        some, every = dense_bias(case), dense_bias(whole)
        assert some is not None
        assert every is not None
        assert torch.equal(some(torch.zeros(())), every(torch.zeros(()))[:, : case.heads])


def bias_by_pairs(case: Case, q_BHLD: torch.Tensor) -> torch.Tensor:
    """(B, H, L, S), one number after another, as the papers have it."""
    heads, values = case.heads, case.position.values
    bias = q_BHLD.new_zeros(case.batch, heads, case.seq_len, case.kv_len)
    numbers, vectors = learned(32, heads, "cpu"), learned(9, case.head_dim, "cpu")
    for i, j in itertools.product(range(case.seq_len), range(case.kv_len)):
        distance = j - (i + case.kv_len - case.seq_len)
        if case.position.name == "alibi":
            slopes = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 2: [1 / 16, 1 / 256]}[heads]
            bias[:, :, i, j] = -abs(distance) * torch.tensor(slopes)
        elif case.position.name == "t5":
            side = 16 if case.mask.after is None else 32
            away, first = -distance, 0
            if case.mask.after is None:
                away, first = abs(distance), 16 * (distance > 0)
            exact = side // 2
            bucket = max(away, 0)
            if bucket >= exact:
                grown = math.log(away / exact) / math.log(values["distance"] / exact)
                bucket = min(side - 1, exact + int(grown * (side - exact)))
            bias[:, :, i, j] = numbers[first + bucket]
        else:
            clipped = max(-4, min(4, distance)) + 4
            bias[:, :, i, j] = q_BHLD[:, :, i] @ vectors[clipped] * case.softmax_scale
    return bias


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("text", ["alibi", "t5:distance=40", "shaw:4"])
def test_a_bias_is_that_of_its_paper_whole_and_in_blocks(text, mask):
    sizes: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 6}
    position = parse_position(text)
    for queries, keys in ((61, 61), (9, 70), (70, 9)):
        case = Case(
            **sizes, seq_len=queries, kv_len=keys, dtype="float64", mask=parse_mask(mask),
            position=position,
        )  # fmt: skip
        q = torch.randn(2, 4, queries, 6, dtype=torch.float64)
        expected = bias_by_pairs(case, q)
        whole, bias = dense_bias(case), position_bias(case)
        assert whole is not None
        assert bias is not None
        torch.testing.assert_close(whole(q).expand_as(expected), expected)
        q_NRLD = q.reshape(4, 2, queries, 6) * case.softmax_scale
        slices, at = torch.tensor([0, 1, 0, 1]), torch.arange(queries)
        reference = bias_scores(case, q_NRLD, at, slices).reshape(expected.shape)
        torch.testing.assert_close(reference, expected)
        for i, j in itertools.product(
            (slice(0, 5), slice(5, queries)), (slice(0, keys - 7), slice(keys - 7, keys))
        ):
            columns = bias.columns(q_NRLD[1:, :, i], first=1)
            part = expected.view(4, 2, queries, keys)[1:, :, i, j]
            torch.testing.assert_close(bias.block(columns, i, j).expand_as(part), part)
            turned = bias.block(columns, i, j, keys_first=True)
            torch.testing.assert_close(turned.expand_as(part.mT), part.mT)
