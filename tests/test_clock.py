"""The clocks on a simulated GPU and a scripted host: what is inside the timed window; the flush."""

import inspect
import itertools
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from attnbench.analysis.times import launch_bound
from attnbench.base.sample import Batch, Sample
from attnbench.measure import clock as clocks
from attnbench.measure.clock import CaptureError, CudaClock, GraphClock, HostClock, clock_for
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run
from tests import fakegpu

RESULTS = Path(__file__).resolve().parents[1] / "results"


@pytest.fixture
def gpu(monkeypatch):
    """A call costs the host 3 us and the device 50, a flush 2 and 40, an event the host 1."""
    return fakegpu.install(monkeypatch)


def test_the_simulated_gpu_is_called_as_torch_is(monkeypatch):
    real = dict(vars(torch.cuda))
    fakegpu.install(monkeypatch)
    changed = [name for name, fake in vars(torch.cuda).items() if fake is not real.get(name)]
    assert len(changed) == 9
    for name in changed:
        fake = getattr(torch.cuda, name)
        pairs = [(fake, real[name])]
        if isinstance(fake, type):
            pairs += [
                (method, getattr(real[name], word))
                for word, method in vars(fake).items()
                if inspect.isfunction(method) and word[0] != "_"
            ]
        for ours, theirs in pairs:
            own, known = (list(inspect.signature(x).parameters) for x in (ours, theirs))
            assert own == [word for word in known if word in own], name


def test_a_cold_call_on_the_host_stands_behind_a_flush_that_is_not_timed(monkeypatch):
    now_ns, log = [0], []

    def flush():
        log.append("flush")
        now_ns[0] += 1_000_000

    def call():
        log.append("call")
        now_ns[0] += 7_000

    monkeypatch.setattr(clocks, "Flush", lambda device: flush)
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: now_ns[0])
    monkeypatch.setattr("attnbench.measure.clock.cpu_ns", lambda: now_ns[0] // 2)
    monkeypatch.setattr("attnbench.measure.clock._waits", lambda: 5)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    batch = HostClock("cold").batch(call, 3)
    assert log == ["flush", "call"] * 3
    assert batch == Batch(time_us=7.0, e2e_us=7.0, cpu_us=3.5)
    steps: Any = SimpleNamespace(steps=[call, call])
    assert HostClock("cold").batch(steps, 2).time_us == 14.0
    assert log[6:] == ["flush", "call"] * 4, "a generation finds a cold cache at each step"


@pytest.mark.parametrize(
    ("threads", "waits", "cpu_us"), [(1, (5, 5), 6.0), (2, (5, 5), None), (1, (5, 6), None)]
)
def test_processor_time_is_known_of_one_thread_that_does_not_wait_by_itself(
    monkeypatch, threads, waits, cpu_us
):
    looks, worked, seen = itertools.count(0, 80_000), itertools.count(0, 48_000), iter(waits)
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: next(looks))
    monkeypatch.setattr("attnbench.measure.clock.cpu_ns", lambda: next(worked))
    monkeypatch.setattr("attnbench.measure.clock._waits", lambda: next(seen))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert HostClock().batch(lambda: None, 8).cpu_us == cpu_us


def test_a_warm_block_on_the_host_looks_at_the_clock_twice_whatever_its_length(monkeypatch):
    looks, calls = itertools.count(0, 80_000), itertools.count()
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: next(looks))
    monkeypatch.setattr("attnbench.measure.clock.cpu_ns", lambda: 0)
    batch = HostClock().batch(lambda: next(calls), 8)
    assert (batch.time_us, batch.e2e_us, next(calls)) == (10.0, 10.0, 8)


ALONE = ["event", "call", "event", "wait"]  # on an idle device
AROUND_ALL = ["wait", "event", "event", "wait", *ALONE]
AROUND_ALL += ["spin", "event", "spin", "event", "wait"]  # how fast the device spins
AROUND_ALL += ["event", "spin", "event", *["call"] * 3, "event", "wait"]
AROUND_EACH = ["wait", "event", "flush", "event", "wait", *ALONE]
AROUND_EACH += ["event", "flush", "event", "call", "event", "wait"] * 3
REPLAYED = ["wait", "call", "event", *["call"] * 3, "event", "wait", "wait", "call", "wait"]
REPLAYED_COLD = ["wait", *["flush", "event", "call", "event"] * 3, "wait", "wait", "flush", "wait"]


@pytest.mark.parametrize(
    ("make", "l2", "log", "enqueue_us", "hidden_us", "e2e_us"),
    [
        (CudaClock, "warm", AROUND_ALL, 3.0, 3.0, 53.0),
        (CudaClock, "cold", AROUND_EACH, 3.0, 3.0, 53.0),
        # One launch of 6 us for three calls; the host has no part in their time.
        (GraphClock, "warm", REPLAYED, 6 / 3, 6 / 3, 56.0),
        (GraphClock, "cold", REPLAYED_COLD, 6 / 3, 6 / 3, 56.0),
    ],
)
def test_events_stand_around_all_warm_calls_and_around_each_cold_one_behind_its_flush(
    gpu, make, l2, log, enqueue_us, hidden_us, e2e_us
):
    clock = make(l2)
    clock.batch(gpu.call, 3)
    gpu.log.clear()
    batch = clock.batch(gpu.call, 3)
    assert gpu.log[: len(log)] == log
    assert batch.time_us == pytest.approx(50.0)
    assert (batch.enqueue_us, batch.hidden_us) == pytest.approx((enqueue_us, hidden_us))
    assert batch.e2e_us == pytest.approx(e2e_us), "the flush or the spin is in it"


def kernels(gpu, count, host_us, device_us):
    def call():
        for _ in range(count):
            gpu.launch("call", device_us=device_us, host_us=host_us)

    return call


def bound(batch, count=None):
    sample = Sample(round=0, position=0, calls=1, **structs.asdict(batch))
    cell = Cell(case=Case(device="cuda"), impl="mine")
    return launch_bound(
        Record(
            cell=cell,
            status="ok",
            samples=(sample,),
            metrics=structs.asdict(batch) | {"kernel_count": count},
        )
    )


@pytest.mark.parametrize("tick_us", [0.0, 1.024])
@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("make", [CudaClock, GraphClock])
@pytest.mark.parametrize("l2", ["warm", "cold"])
@pytest.mark.parametrize(
    ("count", "host_us", "device_us"),
    [(1, 3.0, 50.0), (1, 100.0, 5.0), (30, 5.0, 4.0), (30, 5.0, 2.0), (1, 3.0, 90_000.0)],
)
def test_stream_time_is_the_devices_alone_however_long_the_host_takes_to_issue(
    gpu, count, host_us, device_us, l2, make, calls, tick_us
):
    """Whether one kernel or many, faster or slower than the host issues them."""
    gpu.tick_us = tick_us
    batch = make(l2).batch(kernels(gpu, count, host_us, device_us), calls)
    truth_us = count * device_us
    assert abs(batch.time_us - truth_us) <= tick_us + 1e-4 * truth_us
    assert not bound(batch)
    if make is CudaClock:
        paced_us = max(count * host_us + device_us, host_us + truth_us)
        assert (batch.enqueue_us, batch.e2e_us) == pytest.approx((count * host_us, paced_us))


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_launches_are_hidden_from_a_device_whose_clock_has_risen(gpu, l2):
    clock, call = CudaClock(l2), kernels(gpu, 30, 5.0, 2.0)
    gpu.cycles_per_us = 210.0
    clock.batch(call, 1)
    gpu.cycles_per_us = 1980.0
    batch = clock.batch(call, 1)
    assert (batch.time_us, batch.enqueue_us, batch.hidden_us) == pytest.approx((60.0, 150.0, 150.0))


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_what_takes_longer_to_issue_than_can_be_hidden_is_launch_bound_if_the_device_waits(gpu, l2):
    fast, slow = kernels(gpu, 1000, 5.0, 2.0), kernels(gpu, 1000, 5.0, 20.0)
    batch = CudaClock(l2).batch(fast, 1)
    assert batch.hidden_us is not None
    assert batch.hidden_us == pytest.approx(3000.0, rel=0.06), "3 ms, and the flush"
    assert batch.time_us == pytest.approx(5000.0 + 2.0 - batch.hidden_us)
    assert bound(batch)
    assert batch.e2e_us == pytest.approx(5002.0)
    batch = CudaClock(l2).batch(slow, 1)
    assert batch.time_us == pytest.approx(20_000.0), "what it still issues, it issues in time"
    assert not bound(batch)
    replayed = GraphClock(l2).batch(fast, 1)
    assert replayed.time_us == pytest.approx(2000.0)
    assert not bound(replayed)


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_a_host_that_waits_for_the_device_does_not_set_its_pace(gpu, l2):
    """It waits for a result, or with as many launches as CUDA takes ahead of the device."""

    def waits(count, host_us, device_us):
        kernels(gpu, count, host_us, device_us)()
        gpu.synchronize()

    batch = CudaClock(l2).batch(partial(waits, 20, 5.0, 2.0), 1)
    assert batch.time_us == pytest.approx(40.0 + 1.0), "the event is issued after the wait"
    assert batch.hidden_us == batch.enqueue_us
    assert not bound(batch)
    assert not bound(CudaClock(l2).batch(partial(waits, 1000, 5.0, 30.0), 1))
    assert bound(CudaClock(l2).batch(partial(waits, 1000, 5.0, 3.0), 1))
    batch = CudaClock(l2).batch(kernels(gpu, 50_000, 5.0, 6.0), 1)
    assert batch.enqueue_us is not None
    assert batch.enqueue_us > 0.97 * batch.time_us
    assert not bound(batch, 50_000)
    assert bound(CudaClock(l2).batch(kernels(gpu, 50_000, 5.0, 4.0), 1), 50_000)


@pytest.mark.parametrize(("device_us", "flushes"), [(50.0, 4), (5.0, 1)])
@pytest.mark.parametrize("make", [CudaClock, GraphClock])
def test_a_generation_finds_a_cold_cache_at_each_step_that_is_not_too_short(
    gpu, make, device_us, flushes
):
    step = kernels(gpu, 1, 3.0, device_us)

    class Generation:
        steps = (step,) * 4

        def __call__(self):
            for each in self.steps:
                each()

    clock, call = make("cold"), Generation()
    clock.batch(call, 1)
    del gpu.log[:]
    batch = clock.batch(call, 1)
    assert batch.time_us == pytest.approx(4 * device_us, abs=4)
    words = [word for word in gpu.log if word in ("flush", "call")]
    alone = ["flush", *["call"] * 4]  # what a call takes from end to end
    each = ["flush", "call"] * 4
    if make is GraphClock:
        assert words == each + alone
    else:
        assert words == alone + (each if flushes == 4 else alone)


def test_of_cells_whose_host_is_slow_those_are_marked_that_take_a_tenth_too_long(monkeypatch):
    """300 calls of 1 to 6000 launches, issued in 5 to 80 µs each; kernels take 1.5 to 400 µs."""
    rng, marked, late = random.Random(1), [], []
    for _ in range(300):
        gpu = fakegpu.install(monkeypatch)
        count, host_us, device_us, scatter = (
            math.exp(rng.uniform(math.log(low), math.log(high)))
            for low, high in ((1, 6000), (5, 80), (1.5, 400), (0.01, 1.2))
        )
        kernels_us = [device_us * math.exp(rng.gauss(0, scatter)) for _ in range(round(count))]

        def call(gpu=gpu, kernels_us=kernels_us, host_us=host_us):
            for us in kernels_us:
                gpu.launch("call", device_us=us, host_us=host_us * math.exp(rng.gauss(0, 0.3)))

        clock = CudaClock(rng.choice(["cold", "warm"]))
        batch = clock.batch(call, 1)
        late.append(batch.time_us > 1.1 * sum(kernels_us))
        marked.append(bound(batch, len(kernels_us)))
    of_late = [mark for mark, is_late in zip(marked, late, strict=True) if is_late]
    assert len(of_late) > 30
    assert sum(of_late) >= 0.95 * len(of_late)
    assert sum(marked) - sum(of_late) <= 0.03 * (len(late) - len(of_late))


@pytest.mark.parametrize(("run", "workload", "pass_", "count"), [
    ("decode-h200", "decode", "forward", 0), ("gpu-h200", "decode", "forward", 9),
    ("gpu-h200", "attention", "both", 7), ("gpu-h200", "attention", "forward", 2),
])  # fmt: skip
def test_cells_of_the_h200_whose_time_was_the_hosts_are_marked(run, workload, pass_, count):
    """In gpu-h200 nine decode steps take 1.12 to 2.44 times as long as in decode-h200."""
    records = load_run(RESULTS / run).records
    of = [r for r in records if (r.cell.case.workload, r.cell.case.pass_) == (workload, pass_)]
    assert sum(map(launch_bound, of)) == count


def in_some(calls, happens, call):
    """The call, in the middle of which something happens in the calls with these numbers."""
    numbers = itertools.count()

    def called():
        call()
        if next(numbers) in calls:
            happens()
        call()

    return called


@pytest.mark.parametrize(
    ("stalled", "stall_us"), [({7}, 4000.0), (range(5, 50, 10), 1000.0), (range(1, 25), 1000.0)]
)
def test_cold_calls_in_which_the_host_was_interrupted_are_left_out(gpu, stalled, stall_us):
    """Up to half of them."""

    def half():
        gpu.launch("call", device_us=5.0, host_us=10.0)

    def stall():
        gpu.host_us += stall_us

    calm = CudaClock("cold").batch(in_some((), stall, half), 50)
    batch = CudaClock("cold").batch(in_some(stalled, stall, half), 50)
    assert (calm.left_out, batch.left_out) == (0, len(stalled))
    assert structs.asdict(batch) == pytest.approx(
        structs.asdict(calm) | {"left_out": batch.left_out}
    )
    assert (batch.time_us, batch.enqueue_us) == pytest.approx((10.0, 20.0))


@pytest.mark.parametrize("waits", [False, True])
def test_no_cold_call_is_left_out_for_what_the_device_took(gpu, waits):
    """Nor where the host waits for it in each call, and so takes as long."""

    def call():
        gpu.launch("call", device_us=25.0, host_us=3.0)
        if waits:
            gpu.synchronize()

    slow = partial(gpu.launch, "call", device_us=4000.0, host_us=3.0)
    batch = CudaClock("cold").batch(in_some({7}, slow, call), 50)
    assert batch.left_out == 0
    assert batch.time_us == pytest.approx(50.0 + 4000.0 / 50, abs=10.0)


def test_a_callable_is_captured_once_for_each_number_of_calls_and_freed_on_release(gpu):
    clock = GraphClock("warm")
    captured = []

    def call():
        captured.append(gpu.nodes is not None)
        gpu.call()

    clock.batch(call, 2)
    first = len(captured)
    assert captured == [False] * 3 + [True] * 4  # warm-up; one, and two timed; one alone
    clock.batch(call, 2)
    assert len(captured) == first
    clock.batch(call, 5)
    assert (len(captured) > first, gpu.resets) == (True, 2)
    clock.release(call)
    assert gpu.resets == 4
    clock.release(call)  # nothing is left to free
    clock.batch(call, 5)
    assert gpu.resets == 4


def test_what_cannot_be_captured_is_named_after_what_broke_it(gpu):
    stream = gpu.current

    def call():
        gpu.call()
        torch.cuda.synchronize()

    clock = GraphClock("warm")
    clock.batch(gpu.call, 2)
    assert not clock.broken
    with pytest.raises(CaptureError) as caught:
        clock.batch(call, 2)
    assert clock.broken, "the process is used on, in whose allocator the capture still runs"
    text = str(caught.value)
    assert text.startswith("--timer graph: the call cannot be captured")
    assert "operation not permitted when stream is capturing" in text
    assert "\n" not in text
    assert caught.value.__context__ is None, "buffers of the failed call are kept alive"
    assert gpu.current is stream, "torch is left on the stream of the capture"


@pytest.mark.parametrize(
    ("error", "captured"), [(torch.cuda.OutOfMemoryError, True), (ValueError, False)]
)
def test_what_a_call_raises_by_itself_and_out_of_memory_are_not_blamed_on_the_graph(
    gpu, error, captured
):
    def call():
        if captured == (gpu.nodes is not None):
            raise error("no such head")

    with pytest.raises(error, match="no such head"):
        GraphClock("warm").batch(call, 2)


def test_a_torch_without_events_for_graphs_is_named(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: None)
    with pytest.raises(CaptureError, match=r"--timer graph needs .* use --timer events"):
        clock_for("cuda", timer="graph")
