"""The flags of a case, parsed by `sweep` itself, are that case again."""

import pytest

from attnbench.cli import main
from attnbench.cli.options import AXIS_FIELDS
from attnbench.planning.plan import Axes, expand, overridden
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.flags import case_flags


def parsed(flags: list[str], device="cpu") -> list[Case]:
    given = main.commands["sweep"].make_context("sweep", list(flags)).params
    assert given["device"] in ("auto", device)
    (axes,) = overridden((Axes(),), {name: given[name] for name in (*AXIS_FIELDS, "threads")})
    return list(expand(axes, device))


@pytest.mark.parametrize("case", [
    Case(workload="layer", width=512, heads=4, head_dim=64, projection="fused"),
    Case(workload="layer", width=512, heads=8, head_dim=64, projection="separate", layers=3),
    Case(workload="recurrent", width=96, heads=1, head_dim=96, mask=parse_mask("causal")),
    Case(kv_len=77, kv_heads=2, value_dim=32, batch=3, pass_="both", dtype="bfloat16"),
    Case(mask=parse_mask("document:64+128"), position=parse_position("rope:500000"), threads=4),
    Case(device="cuda", mask=parse_mask("window:256"), seq_len=64),
])  # fmt: skip
def test_flags_of_odd_cases_are_these_again(case):
    assert parsed(case_flags(case), case.device) == [case]
