import json
from typing import Any

import pytest

from attnbench.base.registry import Registry
from attnbench.errors import UnknownNameError, UsageError
from attnbench.schema.case import Case, parse_mask, parse_position


def test_the_id_of_a_case_never_changes():
    # Written down once: a change here breaks every stored run.
    assert Case().case_id == "44136fa355b3"
    assert Case(seq_len=1024, mask=parse_mask("causal")).case_id == "55dca76f179c"


CHANGES: list[dict[str, Any]] = [
    {"pass_": "both"}, {"dtype": "bfloat16"}, {"batch": 2}, {"kv_heads": 2}, {"kv_len": 100},
    {"value_dim": 32}, {"mask": parse_mask("window:8")}, {"cache": "static"}, {"scale": 0.5},
    {"position": parse_position("rope:500000")}, {"threads": 2}, {"workload": "decode"},
    {"width": 96}, {"new_tokens": 3},
]  # fmt: skip


def test_every_field_that_differs_changes_the_id_and_survives_json():
    cases = [Case(), *(Case(**change) for change in CHANGES)]
    assert [Case.from_json(json.loads(json.dumps(case.to_json()))) for case in cases] == cases
    assert len({case.case_id for case in cases}) == len(cases)


def test_a_registry_refuses_duplicates_and_suggests_the_nearest():
    registry: Registry[int] = Registry("fruit", "--fruits")
    registry.add("apple", 1)
    with pytest.raises(UsageError, match="already registered"):
        registry.add("apple", 2)
    with pytest.raises(UnknownNameError, match=r"did you mean 'apple'\?; known: apple"):
        registry.get("appel")
    for name in ("", "two words", "--help", "-x", ".x", "a,b", "a:b", "a\x1bb", "a\n", "x" * 101):
        with pytest.raises(UsageError, match="one word") as refused:
            registry.add(name, 3)
        assert len(str(refused.value)) < 300
    registry.add("x" * 100, 4)


@pytest.mark.parametrize("row", [{"dtype": "float8"}, {"pass": ["forward"]}, {"batch": "two"}])
def test_a_stored_case_with_a_wrong_choice_is_none(row):
    with pytest.raises(UsageError, match="not a case: "):
        Case.from_json(row)
