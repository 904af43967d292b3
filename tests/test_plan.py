import pytest

from attnbench.base.units import parse_sizes, parse_threads
from attnbench.errors import UsageError
from attnbench.planning.plan import (
    GROUPS_PER_JOB,
    Axes,
    chosen,
    expand,
    jobs_of,
    make_plan,
    mismatch,
)
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.record import Cell


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("128", [128]), ("128,64,128", [128, 64]), ("128..1024", [128, 256, 512, 1024]),
        ("1..1", [1]), ("7,128..256", [7, 128, 256]), ("2k, 512..1k", [2048, 512, 1024]),
    ],
)  # fmt: skip
def test_lists_are_commas_and_doublings(text, sizes):
    assert parse_sizes(text, "--seq-lens") == sizes


def test_threads_are_an_axis_of_a_cpu_and_all_is_what_torch_takes():
    axes = Axes(threads=tuple(parse_threads("1,all,2", "--threads")))
    assert [case.threads for case in expand(axes, "cpu", all_threads=8)] == [1, 8, 2]
    assert [case.threads for case in expand(axes, "cpu", all_threads=2)] == [1, 2]
    assert [case.threads for case in expand(axes, "cuda", all_threads=8)] == [1]
    for wrong in ("0", "2000", "some"):
        with pytest.raises(UsageError, match="--threads"):
            parse_threads(wrong, "--threads")


def test_axes_read_texts_as_flags_do_and_leave_each_name_of_several_whole():
    axes = Axes(seq_lens="1k..4k", masks="causal,window:64", impls="naive, sdpa", heads=2)
    assert axes == Axes(
        seq_lens=(1024, 2048, 4096),
        masks=("causal", "window:64"),
        impls=("naive", "sdpa"),
        heads=[2],
    )
    assert Axes(impls=["a,b:mine"]).impls == ("a,b:mine",)  # of the file a,b.py


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


def test_only_what_nobody_named_and_can_run_nowhere_is_left_out():
    asked = cells(Case(seq_len=64), Case(seq_len=128), impls=("naive", "sdpa", "a", "b"))
    reasons: dict[tuple[str, str], str | None] = {
        cell.key: f"no GPU for {cell.impl}" for cell in asked if cell.impl in "ab"
    }
    reasons[asked[1].key] = "too short for sdpa"  # at one length
    plan = make_plan(asked, reasons, unnamed={"naive", "sdpa", "a"})
    assert plan.not_here == {"a": "no GPU for a"}
    assert {cell.impl for cell in plan.cells} == {"naive", "sdpa", "b"}
    assert len(plan.decided) == 3
    nothing = make_plan(asked[2:3], reasons, unnamed={"a"})
    assert [record.status for record in nothing.decided] == ["unsupported"], "not an empty run"


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


def test_short_calls_that_differ_in_length_alone_share_their_rounds_where_asked():
    short, longer, long = (Case(seq_len=n) for n in (64, 128, 32768))
    others = [Case(seq_len=64, heads=2), Case(seq_len=1, kv_len=64), Case(device="cuda")]
    others += [Case(workload="decode", seq_len=n, mask=parse_mask("causal")) for n in (64, 128)]
    (job, *jobs) = jobs_of(cells(short, longer, long, *others), joined=True)
    groups = {tuple(case for case, _ in group) for job in (job, *jobs) for group in job.groups}
    assert groups == {(short, longer), (long,), *((case,) for case in others)}


def test_implementations_of_one_case_share_a_process_and_kinds_do_not():
    cases = [Case(seq_len=8 * i) for i in range(1, 2 * GROUPS_PER_JOB)]
    cases += [Case(seq_len=8, dtype="bfloat16"), Case(seq_len=8, threads=2)]
    jobs = list(jobs_of(cells(*cases)))
    assert all(impls == ("naive", "sdpa") for job in jobs for _, impls in job.cases)
    assert all(len({(c.dtype, c.threads) for c, _ in job.cases}) == 1 for job in jobs)
    assert all(len(job.groups) <= GROUPS_PER_JOB for job in jobs)
    assert sum(len(job.cases) for job in jobs) == len(cases)


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


def test_a_layer_has_a_projection_and_attention_has_none():
    (layer,) = expand(Axes(workload="layer"), "cpu")
    (attention,) = expand(Axes(), "cpu")
    assert (layer.projection, attention.projection) == ("fused", None)
    spread = expand(Axes(workload="layer", projections=("mla:rank=64..256", "mla")), "cpu")
    assert [case.projection for case in spread] == ["mla:64", "mla", "mla:256"]
    both = expand(Axes(workload="layer", projections=("fused", "per-head")), "cpu")
    assert len({group for job in jobs_of(cells(*both)) for group in job.groups}) == 1


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


def test_a_scale_in_a_list_is_the_default_by_its_name():
    assert Axes(scales=["default", 0.5]).values == Axes(scales="default,0.5").values
