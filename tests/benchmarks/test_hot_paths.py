"""Speed of the suite's own hot paths, measured by pytest-benchmark: `make benchmark`.

Each benchmark runs a fixed number of operations, named in `extra_info`, so that a time per
operation can be read off. Nothing here asserts on a time.
"""

import json
from itertools import repeat

import pytest

from attnbench.base.stats import median_interval
from attnbench.measure.clock import HostClock
from attnbench.planning.plan import expand
from attnbench.planning.presets import PRESETS
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record, Sample
from attnbench.theory import costs

CALLS = 10_000


def empty() -> None:
    """Do nothing: what remains is the harness."""


@pytest.mark.benchmark(group="10 000 timed calls of an empty implementation")
def test_harness_cost_per_timed_call(benchmark):
    clock = HostClock()
    benchmark.extra_info["calls"] = CALLS
    benchmark(clock.batch, empty, CALLS)
    per_call_us = benchmark.stats.stats.median * 1e6 / CALLS
    print(f"\nharness cost per timed call: {per_call_us:.4f} µs (limit: 2 µs)")


@pytest.mark.benchmark(group="10 000 timed calls of an empty implementation")
def test_bare_loop_for_comparison(benchmark):
    def loop() -> None:
        for _ in repeat(None, CALLS):
            empty()

    benchmark(loop)


@pytest.mark.benchmark(group="harness cost through the whole worker path")
def test_empty_implementation_bound_as_a_sweep_binds_it(benchmark):
    from attnbench.api import IMPLEMENTATIONS, attention
    from attnbench.worker.inputs import Draw
    from attnbench.worker.workloads import WORKLOADS

    @attention("empty-for-benchmark")
    def nothing(q, k, v, *, causal, scale):
        return q

    case, workload = Case(heads=1, seq_len=8, head_dim=8), WORKLOADS.get("attention")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw())
    bound = workload.bind(case, IMPLEMENTATIONS.get("empty-for-benchmark"), tensors)
    IMPLEMENTATIONS.remove("empty-for-benchmark")
    clock = HostClock()
    benchmark.extra_info["calls"] = CALLS
    benchmark(clock.batch, bound.call, CALLS)
    per_call_us = benchmark.stats.stats.median * 1e6 / CALLS
    print(f"\nharness cost per timed call: {per_call_us:.4f} µs (limit: 2 µs)")


def test_case_id(benchmark):
    case = Case(seq_len=1024, mask=parse_mask("causal"))
    benchmark(lambda: case.case_id)


def test_expanding_the_quick_preset(benchmark):
    axes = PRESETS.get("quick").sweeps[0]
    benchmark(lambda: list(expand(axes, "cpu")))


def test_a_record_to_its_line_and_back(benchmark):
    one = Sample(round=0, position=0, calls=1, time_us=1.5, e2e_us=2.5)
    record = Record(cell=Cell(case=Case(), impl="naive"), status="ok", samples=(one,) * 200)
    line = record.to_line()
    json.loads(line)
    benchmark(lambda: Record.from_line(record.to_line()))


def test_the_interval_of_a_thousand_samples(benchmark):
    values = [float(i * 7919 % 1009) for i in range(1000)]
    benchmark(median_interval, values)


def test_pairs_of_a_causal_mask_at_a_million_tokens(benchmark):
    benchmark(costs.admitted_pairs, parse_mask("causal"), 1 << 20, 1 << 20)
