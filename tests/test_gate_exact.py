"""What repeats exactly: which growth fails, what is only noted, and what statuses decide."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from attnbench.gate.decide.data import Checked
from attnbench.gate.decide.exact import ABSENT, METRICS, Differences, compare, verdict_of
from attnbench.schema.record import STATUSES

MIB = 2**20
BYTES = ("workspace", "prepared", "saved", "retained")


def ok(**metrics: Any) -> Checked:
    found: Any = metrics
    return Checked(status="ok", metrics=found)


def compared(name: str, base: Any, candidate: Any, growth: float = 0.01) -> Differences:
    return compare(ok(**{name: base}), ok(**{name: candidate}), growth)


def test_a_failure_is_a_sentence_with_both_values_the_change_and_what_is_allowed():
    exact = compared("memory_workspace_bytes", MIB, 2 * MIB)
    assert exact.failures == ("workspace grew from 1.0 MiB to 2.0 MiB (+100 %), allowed: +1 %",)
    assert exact.notes == ()


def test_a_difference_that_rounding_hides_is_written_out():
    exact = compared("memory_workspace_bytes", MIB, MIB + 12_000)
    assert exact.failures == ("workspace grew from 1,048,576 to 1,060,576 (+1.1 %), allowed: +1 %",)


@pytest.mark.parametrize("part", BYTES)
def test_every_kind_of_memory_fails_when_it_grows(part):
    name = f"memory_{part}_bytes"
    assert name in METRICS
    assert len(compared(name, MIB, 2 * MIB).failures) == 1
    assert compared(name, MIB, MIB) == Differences()


@pytest.mark.parametrize("base", [0, 100, 4096])
def test_a_growth_of_less_than_a_page_is_no_failure_and_no_note(base):
    assert compared("memory_workspace_bytes", base, base + 4096) == Differences()
    failures = compared("memory_workspace_bytes", base, base + 4097).failures
    assert len(failures) == 1


def test_memory_from_nothing_has_no_percentage():
    (failure,) = compared("memory_retained_bytes", 0, MIB).failures
    assert failure == "memory held on to after the call grew from 0 B to 1.0 MiB, allowed: +1 %"


def test_growth_within_the_share_is_noted_and_beyond_it_fails():
    within = compared("memory_workspace_bytes", 100 * MIB, 101 * MIB)
    assert within.failures == ()
    assert within.notes[0].startswith("workspace grew from 100.0 MiB to 101.0 MiB (+1 %)")
    assert len(compared("memory_workspace_bytes", 100 * MIB, 101 * MIB, 0.009).failures) == 1


def test_flops_fail_by_their_share_alone():
    assert len(compared("flops_counted", 100, 102).failures) == 1
    assert compared("flops_counted", 100, 101).failures == ()
    assert len(compared("flops_counted", 100, 101, 0.0).failures) == 1


def test_what_shrank_is_a_note():
    exact = compared("memory_workspace_bytes", 2 * MIB, MIB)
    assert exact == Differences(notes=("workspace shrank from 2.0 MiB to 1.0 MiB (−50 %)",))


def test_flops_counted_in_another_way_are_noted_and_never_fail():
    base = ok(flops_counted=100, flops_counted_source="dispatched")
    candidate = ok(flops_counted=125, flops_counted_source="formula")
    exact = compare(base, candidate, 0.01)
    assert exact.failures == ()
    assert "another way" in exact.notes[0]


@pytest.mark.parametrize("sides", [(None, MIB), (MIB, None)])
def test_what_is_known_on_one_side_alone_is_said_and_not_compared(sides):
    exact = compared("memory_saved_bytes", *sides)
    side = "candidate" if sides[0] is None else "base"
    assert exact == Differences(
        notes=(f"memory saved for the backward pass: known of the {side} alone, not compared",)
    )


def test_what_neither_side_knows_is_not_mentioned():
    assert compare(ok(), ok(), 0.01) == Differences()
    assert compared("memory_saved_bytes", None, None) == Differences()


def test_kernels_backends_and_settings_only_annotate():
    base = ok(kernel="aten::bmm; aten::_softmax", kernel_count=5, sdpa_backend="flash")
    candidate = ok(
        kernel="aten::_softmax; aten::clone; aten::bmm", kernel_count=6,
        meddles="the number of threads",
    )  # fmt: skip
    assert compare(base, candidate, 0.01) == Differences(
        notes=(
            "kernels: +aten::clone",
            "number of kernels: 6, was 5",
            "backend of SDPA: none, was flash",
            "settings of the process it changes: the number of threads, was none",
        )
    )


def test_an_error_that_grew_within_what_is_allowed_is_noted():
    assert compared("error_ratio", 0.40, 0.43) == Differences()
    assert compared("error_ratio", 0.40, 0.80) == Differences(
        notes=("error grew from 0.400 to 0.800 of what is allowed",)
    )


def test_executed_flops_are_declared_and_not_compared():
    assert "flops_executed" not in METRICS
    assert compared("flops_executed", 100, 200) == Differences()


def side(status: Any) -> Checked:
    if status == "ok":
        return ok()
    return Checked(status=status, reason="so it says")


FAILED = ("oom", "timeout", "crashed", "error")
NOT_RUN = ("absent", "unsupported", "skipped")


def test_two_right_results_are_not_decided_by_their_statuses():
    assert verdict_of(ok(), ok()) is None


@pytest.mark.parametrize("base", [*STATUSES, "absent"])
def test_a_wrong_candidate_is_incorrect_whatever_the_base_is(base):
    verdict, reason = verdict_of(side(base), side("incorrect")) or ("", "")
    assert verdict == "incorrect"
    assert reason.startswith("wrong result: so it says")
    assert ("the base's is wrong, too" in reason) == (base == "incorrect")


@pytest.mark.parametrize("candidate", [*FAILED, "unsupported", "skipped"])
def test_a_candidate_that_fails_where_the_base_was_right_is_held_against_it(candidate):
    verdict, reason = verdict_of(ok(), side(candidate)) or ("", "")
    assert verdict == "incorrect"
    assert reason.endswith("so it says")
    assert ("no longer supports" in reason) == (candidate in NOT_RUN)


@pytest.mark.parametrize("candidate", ["crashed", "error"])
@pytest.mark.parametrize("base", NOT_RUN)
def test_a_new_implementation_that_does_not_run_is_held_against_it(base, candidate):
    assert (verdict_of(side(base), side(candidate)) or ("",))[0] == "incorrect"


@pytest.mark.parametrize(
    ("base", "candidate"),
    [
        *[(status, "ok") for status in (*FAILED, *NOT_RUN, "incorrect")],
        *[(status, None) for status in (*STATUSES, "absent")],
        *[(status, status) for status in (*FAILED, "unsupported", "skipped")],
        *[("absent", status) for status in ("oom", "timeout", "unsupported", "skipped")],
    ],
)
def test_without_a_right_result_on_both_sides_nothing_is_comparable(base, candidate):
    verdict, reason = verdict_of(side(base), side(candidate)) or ("", "")
    assert verdict == "not comparable"
    assert reason


def test_the_reason_says_which_side_lacks_it():
    assert verdict_of(ABSENT, ok()) == (
        "not comparable",
        "new: the base has no such implementation",
    )
    removed = "removed: the candidate has no such implementation"
    absent = Checked(status="absent", reason="it has no such implementation")
    assert verdict_of(ok(), absent) == ("not comparable", removed)
    assert verdict_of(side("incorrect"), ok()) == (
        "not comparable", "the base has no right result: incorrect: so it says",
    )  # fmt: skip


def test_every_pair_of_statuses_has_an_answer_in_the_vocabulary():
    from attnbench.gate.decide.data import Verdict

    for base in (*STATUSES, "absent"):
        for candidate in (*STATUSES, "absent"):
            found = verdict_of(side(base), side(candidate))
            assert found is None or found[0] in get_args(Verdict)
            assert (found is None) == (base == candidate == "ok")
