"""An axis is one row; the flags of a case, parsed by `sweep` itself, are that case again."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from attnbench.analysis.axes import AXES as SORTED
from attnbench.analysis.axes import heading, label
from attnbench.analysis.columns import COLUMNS
from attnbench.cli.commands import main
from attnbench.cli.options import AXIS_FIELDS
from attnbench.planning.plan import Axes, expand, overridden
from attnbench.schema.axes import AXES, KEYWORDS
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.flags import case_flags
from attnbench.theory.traits import TRAITS, case_label, impossible


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
    Case(softcap=50.0, sinks="learned"),
    Case(scale=0.125), Case(workload="decode", cache="int8", new_tokens=3, scale=1.0, width=256,
                            mask=parse_mask("causal")),
    Case(device="cuda", mask=parse_mask("window:256"), seq_len=64),
])  # fmt: skip
def test_flags_of_odd_cases_are_these_again(case):
    assert parsed(case_flags(case), case.device) == [case]


ROOT = Path(__file__).resolve().parents[1]
OTHER: dict[str, Any] = {  # of each axis a value that does not go without saying
    "pass": "both", "dtype": "bfloat16", "mask": "causal", "position": "rope", "scale": 0.25,
    "layout": "packed", "projection": "tied", "cache": "int8", "width": 96, "heads": 8,
    "softcap": 12.5, "sinks": "learned",
    "kv_heads": 2, "new_tokens": 3, "query_tokens": 2, "layers": 3, "threads": 2, "batch": 7,
    "seq_len": 9, "kv_len": 11, "head_dim": 48, "value_dim": 24,
}  # fmt: skip


def test_the_fields_of_a_case_are_the_rows_with_workload_and_device():
    others = {"workload", "device", "device_name"}
    own = {field.name.rstrip("_") for field in fields(Case)} - others
    assert own == AXES.keys() == OTHER.keys() == SORTED.keys() - others
    for place in range(2):
        assert len({axis.order[place] for axis in AXES.values()}) == len(AXES)


@pytest.mark.parametrize("name", AXES)
def test_every_row_has_its_flag_keyword_column_labels_and_lines_in_the_docs(name):
    axis, value = AXES[name], OTHER[name]
    workload = (axis.of or ("attention",))[0]
    (plain,) = expand(Axes(workload=workload), "cpu")
    (case,) = parsed(["--workload", workload, axis.flag, str(value)])
    assert case in expand(Axes(workload=workload, **{axis.keyword: axis.read(str(value))}), "cpu")
    assert KEYWORDS[axis.keyword] is axis
    assert case.to_json()[name] == value != plain.to_json()[name]
    assert parsed(case_flags(case)) == [case]
    assert (COLUMNS.get(name).source, COLUMNS.get(name).meaning) == ("case", axis.meaning)
    row = case.to_json()
    assert str(value) in label(row, [name])
    if name != "width":  # heads and dims say it
        assert heading(plain.to_json(), [name]) or axis.follows
        assert axis.minor or str(value) in case_label(case).replace("=", " ").split()
    assert f"| `{name}` |  | {axis.meaning} |" in (ROOT / "docs/columns.md").read_text("utf-8")
    for other in (other for other in TRAITS.names() if not axis.applies(other)):
        (strange,) = expand(Axes(workload=other), "cpu")
        assert axis.flag in str(impossible(Case.from_json(strange.to_json() | {name: value})))
