"""What repeats exactly: which growth fails, what is only noted, and what statuses decide."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.gate.decide.data import Checked, Rules
from attnbench.gate.decide.exact import Differences, compare, verdict_of
from attnbench.gate.decide.outcome import Change
from attnbench.schema.record import STATUSES

MIB = 2**20
BYTES = ("workspace", "prepared", "saved", "retained")


def ok(**metrics: Any) -> Checked:
    found: Any = metrics
    return Checked(status="ok", metrics=found)


def compared(name: str, base: Any, candidate: Any, growth: float = 0.01) -> Differences:
    return compare(ok(**{name: base}), ok(**{name: candidate}), Rules(growth=growth))


WORKSPACE, GREW = "memory_workspace_bytes", "workspace grew from "


def test_a_failure_is_a_sentence_with_both_values_the_change_and_what_is_allowed():
    for name, base, candidate, sentence in (
        (WORKSPACE, MIB, 2 * MIB, GREW + "1.0 MiB to 2.0 MiB (+100 %), allowed: +1 %"),
        # a difference that rounding hides is written out
        (WORKSPACE, MIB, MIB + 12_000, GREW + "1,048,576 to 1,060,576 (+1.1 %), allowed: +1 %"),
        ("memory_retained_bytes", 0, MIB,
         "memory held on to after the call grew from 0 B to 1.0 MiB, allowed: +1 %"),
    ):  # fmt: skip
        found = compared(name, base, candidate)
        assert (found.failures, found.notes) == ((sentence,), ())
        assert found.changes == (Change(name.split("_")[1], candidate / base if base else None),)


@pytest.mark.parametrize("part", BYTES)
def test_every_kind_of_memory_fails_when_it_grows_by_more_than_a_page(part):
    name = f"memory_{part}_bytes"
    assert compared(name, MIB, MIB) == Differences()
    for base in (0, 100, 4096):
        assert compared(name, base, base + 4096) == Differences()
        assert len(compared(name, base, base + 4097).failures) == 1


def test_flops_fail_by_their_share_alone_and_where_they_were_counted_alike():
    assert len(compared("flops_counted", 100, 102).failures) == 1
    assert compared("flops_counted", 100, 101).failures == ()
    assert len(compared("flops_counted", 100, 101, 0.0).failures) == 1
    apart: Any = {"flops": 0.5, "memory": 3.0}
    assert compared("flops_counted", 100, 200, apart).failures
    assert not compared(WORKSPACE, MIB, 4 * MIB, apart).failures
    base = ok(flops_counted=100, flops_counted_source="dispatched")
    candidate = ok(flops_counted=125, flops_counted_source="formula")
    exact = compare(base, candidate, Rules())
    assert exact.failures == ()
    assert "another way" in exact.notes[0]
    # those that are executed are declared, not counted
    assert compared("flops_executed", 100, 200) == Differences()


def test_kernels_backends_and_settings_only_annotate():
    base = ok(kernel="aten::bmm; aten::_softmax", kernel_count=5, sdpa_backend="flash")
    candidate = ok(
        kernel="aten::_softmax; aten::clone; aten::bmm", kernel_count=6,
        meddles="the number of threads",
    )  # fmt: skip
    assert compare(base, candidate, Rules()) == Differences(
        notes=(
            "kernels: +aten::clone",
            "number of kernels: 6, was 5",
            "backend of SDPA: none, was flash",
            "settings of the process it changes: the number of threads, was none",
        )
    )
    note = "error grew from 0.400 to 0.800 of what is allowed"
    assert compared("error_ratio", 0.40, 0.43) == Differences()
    assert compared("error_ratio", 0.40, 0.80) == Differences(notes=(note,))


def side(status: Any) -> Checked:
    if status == "ok":
        return ok()
    return Checked(status=status, reason="so it says")


NOT_RUN = ("absent", "unsupported", "skipped")
# For each status of the candidate those of the base for which it is held against it.
AGAINST = {
    "ok": (), "absent": (), "incorrect": (*STATUSES, "absent"),
    "crashed": ("ok", "incorrect", *NOT_RUN), "error": ("ok", "incorrect", *NOT_RUN),
    "oom": ("ok",), "timeout": ("ok",), "unsupported": ("ok",), "skipped": ("ok",),
}  # fmt: skip


@pytest.mark.parametrize("base", [*STATUSES, "absent"])
@pytest.mark.parametrize("candidate", AGAINST)
def test_statuses_decide_unless_both_versions_are_right(base, candidate):
    found = verdict_of(side(base), side(candidate))
    assert (found is None) == (base == candidate == "ok")
    if found is None:
        return
    verdict, reason = found
    assert verdict == ("incorrect" if base in AGAINST[candidate] else "not comparable")
    assert reason
    if verdict == "incorrect":
        assert "so it says" in reason
        assert ("no longer supports" in reason) == (candidate in NOT_RUN)
        assert ("the base's is wrong, too" in reason) == (base == "incorrect")
