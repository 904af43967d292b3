from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from attnbench.base.parameters import Parameter
from attnbench.base.units import parse_sizes, parse_threads
from attnbench.errors import UsageError
from attnbench.planning.plan import (
    GROUPS_PER_JOB,
    Axes,
    chosen,
    expand,
    implementations,
    jobs_of,
    make_plan,
    mismatch,
)
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.record import Cell
from attnbench.theory.traits import impossible


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("128", [128]),
        ("128,64,128", [128, 64]),
        ("128..1024", [128, 256, 512, 1024]),
        ("1..1", [1]),
        ("7,128..256", [7, 128, 256]),
    ],
)
def test_lists_are_commas_and_doublings(text, sizes):
    assert parse_sizes(text, "--seq-lens") == sizes


@pytest.mark.parametrize(
    ("text", "says"), [("1024..128", "reversed: 128..1024"), ("8..9", "8..16")]
)
def test_a_range_that_is_none_says_which_was_meant(text, says):
    with pytest.raises(UsageError, match=says):
        parse_sizes(text, "--seq-lens")


def test_threads_are_an_axis_of_a_cpu_and_all_is_what_torch_takes():
    axes = Axes(threads=tuple(parse_threads("1,all,2", "--threads")))
    assert [case.threads for case in expand(axes, "cpu", all_threads=8)] == [1, 8, 2]
    assert [case.threads for case in expand(axes, "cpu", all_threads=2)] == [1, 2]
    assert [case.threads for case in expand(axes, "cuda", all_threads=8)] == [1]
    for wrong in ("0", "2000", "some"):
        with pytest.raises(UsageError, match="--threads"):
            parse_threads(wrong, "--threads")


def test_axes_multiply():
    axes = Axes(seq_lens=(64, 128), heads=(2, 4), masks=("full", "causal"), passes=("both",))
    cases = list(expand(axes, "cpu"))
    assert len(cases) == 8
    assert len({case.case_id for case in cases}) == 8


def test_axes_follow_others_unless_given():
    (case,) = expand(Axes(seq_lens=(64,), heads=(8,)), "cpu")
    assert (case.kv_heads, case.kv_len, case.value_dim) == (8, 64, 64)
    (case,) = expand(Axes(workload="decode", heads=(2,), head_dims=(16,)), "cpu")
    assert (case.mask.text, case.width, case.cache, case.new_tokens) == ("causal", 32, "static", 8)


def cells(*cases: Case, impls: tuple[str, ...] = ("naive", "sdpa")) -> list[Cell]:
    return [Cell(case=case, impl=impl) for case in cases for impl in impls]


def test_nothing_planned_vanishes():
    good, odd = Case(seq_len=64), Case(seq_len=64, kv_heads=3)
    asked = cells(good, odd)
    plan = make_plan([*asked, *asked], {(good.case_id, "sdpa"): "no such kernel"})
    assert list(plan.cells) == asked  # each once, whatever several sweeps share
    decided = {record.cell.key: record for record in plan.decided}
    measured = [cell for job in plan.jobs for cell in job.cells()]
    assert {cell.key for cell in asked} == set(decided) | {cell.key for cell in measured}
    assert decided[good.case_id, "sdpa"].status == "unsupported"
    assert decided[odd.case_id, "naive"].status == "skipped"
    assert "do not divide" in (decided[odd.case_id, "naive"].reason or "")


def test_what_will_be_compared_takes_turns():
    plain, turned = Case(seq_len=64), Case(seq_len=64, position=parse_position("rope"))
    caches = [
        Case(workload="decode", cache=cache, mask=parse_mask("causal"))
        for cache in ("rerun", "static")
    ]
    other = Case(seq_len=128)
    jobs = list(jobs_of(cells(plain, other, turned, *caches)))
    groups = {tuple(case for case, _ in group) for job in jobs for group in job.groups}
    assert groups == {(plain, turned), (other,), tuple(caches)}


def test_implementations_of_one_case_share_a_process_and_kinds_do_not():
    cases = [Case(seq_len=8 * i) for i in range(1, 2 * GROUPS_PER_JOB)]
    cases += [Case(seq_len=8, dtype="bfloat16"), Case(seq_len=8, threads=2)]
    jobs = list(jobs_of(cells(*cases)))
    assert all(impls == ("naive", "sdpa") for job in jobs for _, impls in job.cases)
    assert all(len({(c.dtype, c.threads) for c, _ in job.cases}) == 1 for job in jobs)
    assert all(len(job.groups) <= GROUPS_PER_JOB for job in jobs)
    assert sum(len(job.cases) for job in jobs) == len(cases)


def sizes_of(workload: str = "layer", **given: Any) -> list[tuple[int | None, int, int]]:
    axes = Axes(workload=workload, **given)
    cases = list(expand(axes, "cpu"))
    assert not any(mismatch(axes, case) or impossible(case) for case in cases)
    return [(case.width, case.heads, case.head_dim) for case in cases]


def test_a_width_is_heads_times_dims_whichever_of_the_three_is_not_given():
    assert sizes_of() == [(256, 4, 64)]
    assert sizes_of(heads=(8,)) == [(512, 8, 64)]
    assert sizes_of(widths=(512, 256)) == [(512, 4, 128), (256, 4, 64)]
    assert sizes_of(widths=(512,), heads=(2, 16)) == [(512, 2, 256), (512, 16, 32)]
    assert sizes_of(widths=(512,), head_dims=(32, 64)) == [(512, 16, 32), (512, 8, 64)]
    assert sizes_of(widths=(100,), heads=(3,), head_dims=(64,)) == [(100, 3, 64)]


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        (Axes(workload="layer", widths=(100,), heads=(8,)), "not a multiple of 8 heads"),
        (Axes(workload="decode", widths=(4,), heads=(8,)), "not a multiple of 8 heads"),
        (Axes(workload="layer", widths=(96,), head_dims=(64,)), "not a multiple of 64 dims a head"),
    ],
)
def test_a_width_that_does_not_divide_is_a_skipped_row_with_the_reason(axes, reason):
    (case,) = expand(axes, "cpu")
    plan = make_plan(cells(case), {}, mismatches={case.case_id: mismatch(axes, case)})
    assert [record.status for record in plan.decided] == ["skipped", "skipped"]
    assert reason in (plan.decided[0].reason or "")
    assert not plan.jobs


def test_a_network_without_heads_is_one_case_for_each_width():
    networks = partial(sizes_of, "recurrent")
    assert networks(widths=(510, 256)) == [(510, 1, 510), (256, 1, 256)]
    assert networks(widths=(512,), heads=(2, 4)) == [(512, 1, 512)]
    assert networks(heads=(2, 4), head_dims=(64,)) == [(128, 1, 128), (256, 1, 256)]
    assert networks(masks=("full", "causal")) == [(256, 1, 256)]


def test_a_layer_has_a_projection_and_attention_has_none():
    (layer,) = expand(Axes(workload="layer"), "cpu")
    (attention,) = expand(Axes(), "cpu")
    assert (layer.projection, attention.projection) == ("fused", None)
    spread = expand(Axes(workload="layer", projections=("mla:rank=64..256", "mla")), "cpu")
    assert [case.projection for case in spread] == ["mla:64", "mla", "mla:256"]
    both = expand(Axes(workload="layer", projections=("fused", "per-head")), "cpu")
    assert len({group for job in jobs_of(cells(*both)) for group in job.groups}) == 1


def test_a_sweep_takes_whom_its_workload_is_served_by_and_whoever_is_asked_for_by_name():
    serves = {"naive": ["attention", "layer"], "gru": ["recurrent"], "mine": ["attention"]}
    serves["linear"] = ["attention", "layer"]
    features = {"features": Parameter(default=4)}
    rows = [
        SimpleNamespace(
            name=name, workloads=served, approximates=name == "linear", parameters=features
        )
        for name, served in serves.items()
    ]
    catalogue: Any = SimpleNamespace(implementations=rows)
    assert implementations(Axes(), catalogue) == ["naive", "mine"]
    assert implementations(Axes(workload="recurrent"), catalogue) == ["gru"]
    assert implementations(Axes(workload="recurrent", impls=("naive",)), catalogue) == ["naive"]
    asked = implementations(Axes(workload="layer"), catalogue, own=[["mine"]])
    assert asked == ["naive", "mine"]  # a file of the user's was asked for: refused, not dropped
    spread = implementations(Axes(impls=("linear:features=2..8", "linear")), catalogue)
    assert spread == ["linear:2", "linear", "linear:8"]


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        ((), ["a", "b", "c"]),
        (("naive",), ["naive", "a", "b", "c"]),
        (("b",), ["b", "c"]),
        (("naive", "c", "a"), ["naive", "c", "a"]),
    ],
)
def test_of_a_file_whose_implementations_are_named_only_those_run(asked, run):
    assert chosen(asked, [("a", "b"), ("c",)]) == run
