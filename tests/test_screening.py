"""In a race: what is dropped after a call or two, and how often a slow call is made."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention_builder
from attnbench.measure import race
from attnbench.measure.race import Race
from attnbench.schema.case import Case
from attnbench.worker import trial
from attnbench.worker.checking import Entry
from attnbench.worker.measuring import prepare
from attnbench.worker.screening import Screening
from tests.conftest import collector

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Case(heads=2, seq_len=512, head_dim=8)


def attend(case, q, k, v):
    return ((q * case.softmax_scale) @ k.mT).softmax(-1) @ v


def more(case, q, k, v):
    return attend(case, q, k.clone(), v)


def by_numpy(case, q, k, v):
    weights = np.exp(q.double().numpy() @ k.double().numpy().swapaxes(2, 3) * case.softmax_scale)
    o = weights @ v.double().numpy() / weights.sum(-1, keepdims=True)
    return torch.empty_like(q).copy_(torch.from_numpy(o)) if q.dtype != torch.float32 else (
        torch.from_numpy(o.astype(np.float32)))  # fmt: skip


class Stage:
    """Kernels whose calls take as long as they are said to, by a clock of their own."""

    def __init__(self):
        self.now_s, self.calls, self.records = 0.0, dict[str, int](), []

    def add(self, name, *seconds, core=attend):
        """The first call takes the first of these, the last of them stands for all others."""

        def build(case):
            def call(q, k, v):
                if case == CASE:  # smaller ones take no time
                    number = self.calls[name] = self.calls.get(name, 0) + 1
                    self.now_s += seconds[min(number, len(seconds)) - 1]
                return core(case, q, k, v)

            return call

        attention_builder(name, memory="n^2")(build)

    def tried(self, *names, limit_s=1000.0):
        """Who may be timed; why not, of the others."""
        racing = Race(timing_s=0.75 * limit_s, limit_s=limit_s, kept=["base"], began=self.now_s)
        screening = Screening(racing)
        entry = Entry(index=0, case=CASE, impls=names)
        ready = prepare(entry, 0, collector(self.records), None, screening)
        why = {r.cell.impl: (r.metrics.get("dropped"), r.reason) for r in self.records}
        assert all(record.status == "skipped" for record in self.records)
        return list(ready), why


@pytest.fixture
def stage(monkeypatch):
    added = Stage()
    clock = SimpleNamespace(perf_counter=lambda: added.now_s)
    monkeypatch.setattr(trial, "time", clock)
    monkeypatch.setattr(race, "time", clock)
    before = set(IMPLEMENTATIONS.names())
    yield added
    for name in set(IMPLEMENTATIONS.names()) - before:
        IMPLEMENTATIONS.remove(name)


def test_a_second_call_three_times_as_slow_drops_one_and_says_both_times(stage):
    for name, seconds in {"base": 0.1, "a": 0.09, "b": 0.2, "slow": 0.4}.items():
        stage.add(name, seconds, core=more if name == "a" else by_numpy)
    ready, why = stage.tried("slow", "b", "a", "base")
    assert set(ready) == {"base", "a", "b"}
    assert why == {"slow": ("slow", "a second call took 400 ms, 4 times the 100 ms of base")}


def test_of_two_others_none_is_dropped_and_a_single_one_is(stage):
    for name, seconds in {"base": 0.1, "a": 0.8, "b": 0.9}.items():
        stage.add(name, seconds, core=by_numpy)
    assert set(stage.tried("base", "a", "b")[0]) == {"base", "a", "b"}
    assert stage.tried("base", "a")[0] == ["base"]


def test_the_first_call_may_take_long(stage):
    stage.add("base", 0.1)
    stage.add("warms-up", 20.0, 0.05, core=more)
    assert stage.tried("base", "warms-up")[0] == ["base", "warms-up"]


@pytest.mark.parametrize("seconds", [0.1, 30.0])  # at 30 s ops are compared on a smaller case
def test_what_dispatches_the_same_ops_is_one_candidate(stage, seconds):
    cores = {"base": attend, "twin": attend, "more": more, "numpy": by_numpy, "numpy2": by_numpy}
    for name, core in cores.items():
        stage.add(name, seconds, core=core)
    ready, why = stage.tried(*cores)
    assert set(ready) == {"base", "more", "numpy", "numpy2"}
    assert why["twin"][0] == "same"
    assert "the same ops as base" in why["twin"][1]
    assert [r.metrics["same_as"] for r in stage.records] == ["base"]


def test_a_slow_call_is_made_once_in_each_check_and_in_no_probe(stage):
    stage.add("base", 20.0)
    stage.add("fast", 8.0, core=more)
    stage.add("late", 15.0, core=by_numpy)
    stage.add("later", 15.0, core=by_numpy)
    ready, why = stage.tried("base", "fast", "late", "later", limit_s=170.0)
    assert ready == ["base", "fast", "late"]
    assert why == {"later": ("budget", "not tried: --budget has no time left for it")}
    assert stage.calls == {"base": 2, "fast": 2, "late": 2}
    assert stage.now_s + 20 + 8 + 15 < 170, "there is time for a round"


def test_a_default_that_cannot_be_timed_says_what_would_be_enough(stage):
    stage.add("base", 60.0)
    stage.add("other", 1.0, core=more)
    ready, why = stage.tried("base", "other", limit_s=100.0)
    assert "base" not in ready
    assert why["base"][0] == "budget"
    assert stage.records[0].metrics["needs_s"] > 120
