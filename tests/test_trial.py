"""What a trial makes of implementations that are right, wrong, stale or broken."""

import functools
import itertools
import math
import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attnbench.analysis import notes
from attnbench.analysis.pairs import cell_times, core_times, ratio_of
from attnbench.api import IMPLEMENTATIONS, attention, attention_builder, building_mask
from attnbench.base.sample import Batch
from attnbench.measure.clock import clock_for
from attnbench.measure.engine import Measurement
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.record import Record
from attnbench.worker import measuring, trial
from attnbench.worker.checking import Entry
from attnbench.worker.measuring import Instruments, measure_group
from tests.conftest import collector

RULE = StoppingRule(precision=0.5, min_time_s=0.001, max_time_s=0.01)
INSTRUMENTS = Instruments(rule=RULE, clock=clock_for("cpu"), watch=Watch())
CASE = Case(heads=2, seq_len=24, head_dim=8)


def exact(q, k, v, *, causal, scale):
    return ((q * scale) @ k.mT).softmax(-1) @ v


@pytest.fixture
def measured():
    """Measure functions or builders under temporary names; returns records by name."""
    added: list[str] = []

    def run(
        case: Case = CASE, declared: Any = None, **builders: Callable[[Case], Any]
    ) -> dict[str, Record]:
        for name, build in builders.items():
            attention_builder(name, **declared or {})(build)
            added.append(name)
        records: list[Record] = []
        entry = Entry(index=0, case=case, impls=tuple(builders))
        measure_group([entry], INSTRUMENTS, collector(records))
        assert [record.cell.case for record in records] == [case] * len(builders)
        return {record.cell.impl: record for record in records}

    yield run
    for name in added:
        IMPLEMENTATIONS.remove(name)


def right(case: Case):
    return lambda q, k, v: exact(q, k, v, causal=False, scale=case.softmax_scale)


def test_a_right_one_gets_times_memory_flops_and_errors(measured):
    record = measured(right=right)["right"]
    assert record.status == "ok"
    assert len(record.samples) >= 3
    metrics = record.metrics
    assert metrics["flops_counted"] == metrics["flops_useful"] == 4 * 2 * 24 * 24 * 8
    assert metrics["flops_counted_source"] == "dispatched"
    assert metrics["memory_inputs_bytes"] == 3 * 2 * 24 * 8 * 4
    assert metrics["memory_outputs_bytes"] == 2 * 24 * 8 * 4
    # Scores and weights are alive together before the output is; the definition takes it off.
    assert metrics["memory_workspace_bytes"] == (2 * (2 * 24 * 24) - 2 * 24 * 8) * 4
    assert metrics["error_ratio"] <= 1
    assert set(record.spent_s) == {"reference", "build", "check", "probe", "warm-up", "samples"}


def in_numpy(case: Case):
    def call(q, k, v):
        a, b, c = (x.detach().numpy() for x in (q, k, v))
        s = np.exp(a @ np.swapaxes(b, 2, 3) * np.float32(case.softmax_scale))
        return torch.from_numpy(s @ c / s.sum(-1, keepdims=True))

    return call


def without_workspace(case: Case):
    """All that it writes to was there before the call."""
    scores = torch.empty(case.batch, case.heads, case.seq_len, case.seq_len)
    most, o_BHLV = torch.empty(*scores.shape[:3], 1), torch.empty(*scores.shape[:3], case.value_dim)

    def call(q, k, v):
        torch.matmul(q, k.transpose(2, 3), out=scores)
        scores.mul_(case.softmax_scale).exp_()
        torch.sum(scores, -1, keepdim=True, out=most)
        torch.matmul(scores, v, out=o_BHLV)
        return o_BHLV.div_(most)

    return call


def test_memory_that_torch_does_not_allocate_is_unknown_and_none_at_all_is_0(measured):
    records = measured(in_numpy=in_numpy, without_workspace=without_workspace)
    assert {record.status for record in records.values()} == {"ok"}
    known = {name: record.metrics for name, record in records.items()}
    assert known["in_numpy"]["memory_workspace_bytes"] is None
    assert known["in_numpy"]["memory_peak_bytes"] is None
    assert known["without_workspace"]["memory_workspace_bytes"] == 0


def test_work_that_only_some_calls_do_stands_in_a_note(measured, monkeypatch):
    done = [0]

    def works(every):
        calls = itertools.count(1)

        def call(q, k, v):
            done[0] += 1 + every * (next(calls) % every == 0)
            return exact(q, k, v, causal=False, scale=CASE.softmax_scale)

        return lambda case: call

    def batch(call, calls):
        before = done[0]
        for _ in range(calls):
            call()
        us = 30_000.0 * (done[0] - before) / calls
        return Batch(time_us=us, e2e_us=us, cpu_us=us)

    monkeypatch.setattr(INSTRUMENTS.clock, "batch", batch)
    monkeypatch.setattr(INSTRUMENTS.watch, "probe_us", lambda: 26.0)
    found = measured(steady=works(1), amortised=works(10))
    assert "uneven" not in str(notes.unsteady(found["steady"]))
    assert "uneven" in str(notes.unsteady(found["amortised"]))
    assert "times the time (" in str(notes.notes(found["amortised"]))


def test_the_time_of_a_mask_is_without_what_a_process_does_once(measured):
    masks: list[torch.Tensor] = []

    def build(case: Case):
        with building_mask:
            if not masks:
                time.sleep(0.3)  # as torch does, which compiles for its first block mask
            masks.append(torch.zeros(256, dtype=torch.uint8))
        kept = masks.pop() if len(masks) > 1 else masks[0].clone()

        def call(q, k, v, kept=kept):
            return exact(q, k, v, causal=False, scale=case.softmax_scale)

        return call

    metrics = measured(mine=build)["mine"].metrics
    assert metrics["mask_build_us"] <= metrics["build_us"] < 0.2e6
    assert metrics["memory_prepared_bytes"] == 512, "all that the first one has left"


def test_a_plan_for_each_length_is_build_time_of_a_token(measured):
    def build(case: Case):
        time.sleep(0.02)
        return functools.partial(exact, causal=False, scale=case.softmax_scale)

    for workload, new_tokens in (("attention", None), ("decode", 4)):
        of_workload: dict[str, Any] = {"mask": parse_mask("causal"), "width": 16}
        case = replace(CASE, workload=workload, **(of_workload if new_tokens else {}))
        metrics = measured(replace(case, new_tokens=new_tokens), planned=build)["planned"].metrics
        IMPLEMENTATIONS.remove("planned")
        assert 0.02e6 <= metrics["build_us"] < 0.06e6, "of one of the four tokens"


def test_what_a_call_keeps_of_its_inputs_makes_its_time_one_of_repeated_calls(measured):
    def keeps(case: Case):
        packs: dict[tuple[int, int], torch.Tensor] = {}

        def call(q, k, v):
            if (key := (k.data_ptr(), k._version)) not in packs:
                packs.clear()
                packs[key] = k.repeat(64, 1, 1, 1)[:1]  # 64 times as much is held
                time.sleep(0.01)
            return exact(q, packs[key], v, causal=False, scale=case.softmax_scale)

        return call

    records = measured(keeps=keeps, plain=lambda case: functools.partial(
        exact, causal=False, scale=case.softmax_scale))  # fmt: skip
    assert records["keeps"].metrics["new_inputs_us"] > 0.01e6
    assert "keeps 96.0 KiB after its first call: on new" in str(notes.notes(records["keeps"]))
    assert "keeps-results" in str(notes.unsteady(records["keeps"]))
    assert "new_inputs_us" not in records["plain"].metrics


def test_pages_that_a_call_touches_first_are_counted_with_what_they_take(measured):
    def fresh(case: Case):
        def call(q, k, v):
            with mmap.mmap(-1, 40 * 2**20) as pages:  # fresh, whatever malloc keeps
                pages.write(bytes(40 * 2**20))
            return exact(q, k, v, causal=False, scale=case.softmax_scale)

        return call

    records = measured(right=right, fresh=fresh)
    right_, fresh_ = (records[name].metrics for name in ("right", "fresh"))
    assert fresh_["page_faults"] >= 20, "40 MiB in pages of 2 MiB, or of fewer bytes"
    assert right_["page_faults"] < fresh_["page_faults"] / 2
    assert fresh_["page_faults_us"] > 0


@pytest.mark.parametrize("pass_", ["backward", "both"])
def test_gradients_are_checked_and_held_outputs_counted(measured, pass_):
    record = measured(Case(heads=2, seq_len=24, head_dim=8, pass_=pass_), right=right)["right"]
    assert record.status == "ok"
    outputs = 3 if pass_ == "backward" else 4
    assert record.metrics["memory_outputs_bytes"] == outputs * 2 * 24 * 8 * 4
    # The graph that a backward pass starts from is prepared memory: the weights at least.
    assert (record.metrics["memory_prepared_bytes"] > 2 * 24 * 24 * 4) == (pass_ == "backward")


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
def test_the_part_of_a_layer_that_is_its_core_is_timed_on_what_the_layer_gives_it(measured, pass_):
    seen = set()

    def slow(case: Case):
        def call(q, k, v):
            seen.add((q.stride(), k.stride(), v.stride(), q.requires_grad))
            end = time.perf_counter() + 0.003
            while time.perf_counter() < end:
                pass
            return exact(q, k, v, causal=False, scale=case.softmax_scale)

        return call

    rope = parse_position("rope")
    of: dict[str, Any] = {"pass_": pass_, "projection": "fused", "position": rope, "layers": 2}
    case = replace(CASE, workload="layer", dtype="bfloat16", **of)
    record = measured(case, slow=slow, right=right)["slow"]
    assert len(seen) == 1
    alone = core_times(record)
    assert alone is not None
    assert pass_ == "backward" or ratio_of(alone, cell_times(record))[0] > 0.5
    assert all(s.core_us is None for s in measured(CASE, plain=right)["plain"].samples)


def stale(case):
    kept: list[torch.Tensor] = []

    def call(q, k, v):
        if not kept:
            kept.append(exact(q, k, v, causal=False, scale=case.softmax_scale).clone())
        return kept[0].clone()

    return call


def scribbles(case):
    def call(q, k, v):
        o = exact(q, k, v, causal=False, scale=case.softmax_scale)
        k[..., 0, 0] = 1.0
        return o

    return call


class Lazy(torch.Tensor):
    """What may be computed when it is looked at."""


@pytest.mark.parametrize(("build", "words"), [
    (lambda case: lambda q, k, v: exact(q, k, v, causal=False, scale=1.0), "is off by"),
    (stale, "after its inputs changed"),
    (lambda case: lambda q, k, v: torch.empty_like(q), "o "),
    (scribbles, "wrote to its input k"),
    (lambda case: lambda q, k, v: q.double(), "expected torch.float32"),
    (lambda case: lambda q, k, v: q[:, :1], "shape"),
    (lambda case: lambda q, k, v: q * math.nan, "not finite"),
    (lambda case: lambda q, k, v: None, "not a plain tensor"),
    (lambda case: lambda q, k, v: q.as_subclass(Lazy), "Lazy, not a plain tensor"),
])  # fmt: skip
def test_a_wrong_one_is_incorrect_and_has_no_time(measured, build, words):
    records = measured(wrong=build, right=right)
    assert records["wrong"].status == "incorrect"
    assert words in (records["wrong"].reason or "")
    assert records["wrong"].samples == ()
    assert records["right"].status == "ok"


def fails_late(case):
    calls = iter(range(10_000))

    def call(q, k, v):
        if next(calls) > 6:
            raise RuntimeError("worn out")
        return exact(q, k, v, causal=False, scale=case.softmax_scale)

    return call


def no_workspace(case):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def fails_to_build(case):
    raise NotImplementedError("no such size")


@pytest.mark.parametrize(
    ("build", "status", "words"),
    [
        (fails_late, "error", "RuntimeError: worn out"),  # the clock decides in which stage
        (fails_to_build, "error", "build: NotImplementedError: no such size"),
        (lambda case: lambda q, k, v: torch.empty(1 << 60), "oom", "check: "),
        (no_workspace, "oom", "CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_one_that_fails_costs_its_own_cell(measured, build, status, words):
    records = measured(right=right, broken=build)
    assert records["broken"].status == status
    assert words in (records["broken"].reason or "")
    assert records["right"].status == "ok"


def test_the_simple_form_serves_full_and_causal():
    seen: list[tuple[bool, float]] = []

    @attention("spy")
    def spy(q, k, v, *, causal, scale):
        """Look at what is passed."""
        seen.append((causal, scale))
        return q

    try:
        impl, q = IMPLEMENTATIONS.get("spy"), torch.zeros(1, 1, 2, 4)
        assert impl.doc == "Look at what is passed."
        # A single query sees every key: causal asks for nothing.
        one_query = {"mask": "causal", "seq_len": 1, "kv_len": 9}
        for fields in ({"mask": "causal", "head_dim": 4}, {"head_dim": 16}, one_query):
            impl.build(Case.from_json(fields))(q, q, q)
        assert seen == [(True, 0.5), (False, 0.25), (False, 0.125)]
        assert "not window:4" in (impl.reason_against(Case.from_json({"mask": "window:4"})) or "")
    finally:
        IMPLEMENTATIONS.remove("spy")


def test_torchs_cache_is_emptied_before_a_group_is_prepared_and_before_it_is_timed(
    measured, monkeypatch
):
    """Blocks of the reference in it would be given back to CUDA's driver while calls are timed."""
    log: list[str] = []

    def logged(place: Any, name: str) -> None:
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: (log.append(name), function(*args))[1])  # type: ignore[func-returns-value]

    for place, name in (torch.cuda, "empty_cache"), (measuring, "prepare"), (Measurement, "run"):
        logged(place, name)
    measured(right=right)
    assert log == ["empty_cache", "prepare", "empty_cache", "run"]


def test_a_device_that_is_lost_is_told_from_an_error(monkeypatch):
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not trial.device_is_lost()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert trial.device_is_lost()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not trial.device_is_lost()
