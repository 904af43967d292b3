"""Position encodings against their definitions, written down a second time."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from attnbench.errors import UsageError
from attnbench.schema.case import Case, parse_position
from attnbench.worker.positions import rotated, rotation

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
    f"rope-yarn:factor=4:length={TRAINED}:slow=1:fast=8": (
        [by_parts(theta, 1, 8) for theta in PLAIN], 0.1 * math.log(4) + 1
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
    assert parse_position("rope-yarn:base=10000:factor=8").text == "rope-yarn:factor=8"
    assert parse_position("rope-yarn:8").values["length"] == 4096
    for text, what in {"rope-yarn:slow=9:fast=3": "slow", "rope-linear:0.5": "factor"}.items():
        with pytest.raises(UsageError, match=what):
            parse_position(text)
