"""A profile: its file, its rules, and what the command shows of it."""

from typing import Any

import pytest

from attnbench.errors import StoreError
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.profile import (
    Live,
    Memory,
    Note,
    Op,
    Profile,
    Unprofiled,
    read_profile,
)

CASE = Case(seq_len=64, mask=parse_mask("causal"))
TIME = Unprofiled(
    median_us=100.0, low_us=95.0, high_us=110.0, samples=9, calls=10, timer="host", l2="warm"
)
MEMORY = Memory(
    timeline=(Live(1.0, 4096, "aten::bmm"), Live(9.0, 0, None)),
    peak_bytes=4096, peak_op="aten::bmm", outputs_bytes=1024,
    traced_bytes=3072, measured_bytes=3072, predicted_bytes=None,
)  # fmt: skip


def profile(**given):
    """A small profile: two ops of 90 µs in a call of 100."""
    fields: dict[str, Any] = {
        "case": CASE.to_json(), "impl": "naive", "label": "naive", "environment": {},
        "ceilings": {}, "time": TIME, "profiled_us": 105.0, "calls": 8, "gaps_us": 15.0,
        "ops": (
            Op(name="aten::bmm", count=2, self_us=60.0, flops=6e6, bytes=1.2e6),
            Op(name="aten::_softmax", count=1, self_us=30.0),
        ),
        "memory": MEMORY,
        "notes": (Note("profiler-cost", {"ratio": 1.05}),),
    }  # fmt: skip
    return Profile(**fields | given)


def test_where_there_is_no_profile_the_message_names_the_command(tmp_path):
    with pytest.raises(StoreError, match="attnbench profile"):
        read_profile(tmp_path)
