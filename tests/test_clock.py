"""The clocks on a simulated GPU and a scripted host: what is inside the timed window."""

import itertools

import pytest
import torch

from attnbench.analysis.roofline import launch_bound
from attnbench.measure import clock as clocks
from attnbench.measure.clock import CudaClock, GraphClock, HostClock, clock_for
from attnbench.measure.graph import CaptureError
from attnbench.measure.smclock import SmClock
from tests import fakegpu


@pytest.fixture
def gpu(monkeypatch):
    """A call costs the host 3 us and the device 50, a flush 2 and 40, an event the host 1."""
    return fakegpu.install(monkeypatch)


def sm_clock_of(gpu, mhz=1755.0):
    """An SM clock whose kernel takes 20 us and counts at `mhz`."""

    def launch(counters):
        gpu.launch("spin", device_us=20.0, host_us=15.0)
        counters.copy_(torch.tensor([int(mhz * 20), 20_000]))

    return SmClock(launch, torch.zeros(2, dtype=torch.int64))


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
    block = HostClock("cold").block(call, 3)
    assert log == ["flush", "call"] * 3
    assert block == clocks.Block(time_us=7.0, e2e_us=7.0)


def test_a_warm_block_on_the_host_looks_at_the_clock_twice_whatever_its_length(monkeypatch):
    looks = itertools.count(0, 80_000)
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: next(looks))
    assert HostClock().block(lambda: None, 8) == clocks.Block(time_us=10.0, e2e_us=10.0)


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_a_host_clock_that_steps_back_gives_a_negative_time(monkeypatch, l2):
    back = itertools.count(0, -5_000)
    monkeypatch.setattr(clocks, "Flush", lambda device: lambda: None)
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: next(back))
    assert HostClock(l2).block(lambda: None, 1).time_us == -5.0


def test_a_warm_block_on_cuda_has_one_pair_of_events_around_all_of_its_calls(gpu):
    block = CudaClock("warm").block(gpu.call, 4)
    timed = gpu.log[: gpu.log.index("wait", 1)]
    assert timed == ["wait", "event", *["call"] * 4, "event"]
    # Between the events lies the host's time to issue the first call, and all on the device.
    assert block.time_us == pytest.approx((3 + 4 * 50) / 4)
    assert block.enqueue_us == pytest.approx(3.0)
    assert block.e2e_us == pytest.approx(53.0)


def test_every_cold_call_on_cuda_goes_flush_begin_call_end(gpu):
    block = CudaClock("cold").block(gpu.call, 3)
    once = ["flush", "event", "call", "event", "wait"]
    assert gpu.log == ["wait", *once * 3, "wait", "flush", "wait", "call", "wait"]
    assert block.time_us == pytest.approx(50.0), "the flush, or the host, is in the window"
    assert block.enqueue_us == pytest.approx(3.0)
    assert block.e2e_us == pytest.approx(53.0), "the flush is in the time to the result"


def test_a_single_warm_call_gives_the_time_to_its_result_itself(gpu):
    block = CudaClock("warm").block(gpu.call, 1)
    assert gpu.log.count("call") == 1
    assert block.e2e_us == pytest.approx(53.0)


def test_a_single_cold_call_is_not_the_one_whose_result_is_waited_for(gpu):
    CudaClock("cold").block(gpu.call, 1)
    assert gpu.log.count("call") == 2


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_events_are_made_once(gpu, l2):
    clock = CudaClock(l2)
    for calls in (1, 7, 3):
        clock.block(gpu.call, calls)
    assert fakegpu.FakeEvent.made == 2


def test_a_launch_bound_call_takes_the_host_as_long_as_the_stream(gpu):
    def tiny():
        gpu.launch("call", device_us=2.0, host_us=9.0)

    block = CudaClock("warm").block(tiny, 100)
    assert block.enqueue_us == pytest.approx(9.0)
    assert block.time_us == pytest.approx(9.0, rel=0.01)


def test_a_host_slower_than_the_flush_is_in_the_stream_time_of_a_cold_call_and_shows(gpu):
    def slow():
        gpu.launch("call", device_us=5.0, host_us=100.0)

    block = CudaClock("cold").block(slow, 3)
    # The flush lasts 40 us; of those the host has spent 1 on the event when it begins the call.
    assert block.time_us == pytest.approx(100 - (40 - 1) + 5)
    assert block.enqueue_us == pytest.approx(100.0)
    assert launch_bound(block.enqueue_us, block.time_us)
    assert block.e2e_us == pytest.approx(105.0)
    assert GraphClock("cold").block(slow, 3).time_us == pytest.approx(5.0)


@pytest.mark.parametrize("make", [CudaClock, GraphClock])
@pytest.mark.parametrize("l2", ["warm", "cold"])
@pytest.mark.parametrize("calls", [1, 5])
def test_reading_the_sm_clock_changes_no_time(gpu, make, l2, calls):
    without = make(l2).block(gpu.call, calls)
    gpu.log.clear()
    block = make(l2, sm_clock_of(gpu)).block(gpu.call, calls)
    assert (block.time_us, block.e2e_us) == pytest.approx((without.time_us, without.e2e_us))
    assert block.enqueue_us == pytest.approx(without.enqueue_us)
    assert (block.sm_mhz, without.sm_mhz) == (pytest.approx(1755.0), None)
    assert gpu.log.count("spin") == 1


def test_the_sm_clock_is_read_behind_the_timed_calls_and_before_any_other(gpu):
    CudaClock("warm", sm_clock_of(gpu)).block(gpu.call, 2)
    assert [x for x in gpu.log if x in ("call", "spin")] == ["call", "call", "spin", "call"]


@pytest.mark.parametrize("mhz", [0.0, 99.0, 5001.0])
def test_an_implausible_sm_clock_is_none_for_good(gpu, mhz):
    clock = sm_clock_of(gpu, mhz)
    assert clock.sample_mhz() is None
    assert "implausible" in str(clock.problem)
    assert clock.sample_mhz() is None
    assert gpu.log.count("spin") == 1


def test_a_kernel_that_fails_costs_the_sm_clock_alone(gpu):
    def launch(counters):
        gpu.log.append("spin")
        raise RuntimeError("ptxas: no such architecture")

    block = CudaClock("warm", SmClock(launch, torch.zeros(2, dtype=torch.int64))).block(gpu.call, 2)
    assert block.sm_mhz is None
    assert block.time_us > 0


def test_a_timer_that_stands_still_is_a_problem_and_no_division_by_zero(gpu):
    def launch(counters):
        counters.zero_()

    clock = SmClock(launch, torch.zeros(2, dtype=torch.int64))
    assert clock.sample_mhz() is None
    assert "ZeroDivisionError" in str(clock.problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is missing without CUDA")
def test_without_cuda_there_is_no_sm_clock_and_a_reason():
    clock = SmClock.open()
    assert clock.sample_mhz() is None
    assert str(clock.problem).startswith("no SM clock from in-stream counters: ")


def test_in_a_cold_graph_every_call_stands_behind_a_flush_between_its_own_events(gpu):
    clock = GraphClock("cold")
    clock.block(gpu.call, 3)
    gpu.log.clear()
    block = clock.block(gpu.call, 3)
    once = ["flush", "event", "call", "event"]
    assert gpu.log == ["wait", *once * 3, "wait", "wait", "flush", "wait", "call", "wait"]
    assert block.time_us == pytest.approx(50.0)
    assert block.enqueue_us == pytest.approx(6.0 / 3)  # one launch of 6 us for three calls
    assert block.e2e_us == pytest.approx(56.0)


def test_in_a_warm_graph_one_pair_of_events_stands_around_all_calls(gpu):
    clock = GraphClock("warm")
    clock.block(gpu.call, 4)
    gpu.log.clear()
    block = clock.block(gpu.call, 4)
    assert gpu.log[:8] == ["wait", "event", *["call"] * 4, "event", "wait"]
    assert block.time_us == pytest.approx(50.0), "the host has a part in it"


def test_a_launch_bound_call_shows_its_device_time_under_a_graph(gpu):
    def tiny():
        gpu.launch("call", device_us=2.0, host_us=9.0)

    assert GraphClock("warm").block(tiny, 100).time_us == pytest.approx(2.0)


def test_a_callable_is_captured_once_for_each_number_of_calls_and_freed_on_release(gpu):
    clock = GraphClock("warm")
    captured = []

    def call():
        captured.append(gpu.nodes is not None)
        gpu.call()

    clock.block(call, 2)
    first = len(captured)
    assert captured == [False] * 3 + [True] * 3  # warm-up, two in the graph, one alone
    clock.block(call, 2)
    assert len(captured) == first
    clock.block(call, 5)
    assert (len(captured) > first, gpu.resets) == (True, 2)
    clock.release(call)
    assert gpu.resets == 4
    clock.release(call)  # nothing is left to free
    clock.block(call, 5)
    assert gpu.resets == 4


def test_what_cannot_be_captured_is_named_after_what_broke_it(gpu):
    stream = gpu.current

    def call():
        gpu.call()
        torch.cuda.synchronize()

    with pytest.raises(CaptureError) as caught:
        GraphClock("warm").block(call, 2)
    text = str(caught.value)
    assert text.startswith("--timer graph: the call cannot be captured")
    assert "operation not permitted when stream is capturing" in text
    assert "\n" not in text
    assert caught.value.__context__ is None, "buffers of the failed call are kept alive"
    assert gpu.current is stream, "torch is left on the stream of the capture"


def test_out_of_memory_in_a_capture_stays_out_of_memory(gpu):
    def call():
        if gpu.nodes is not None:
            raise torch.cuda.OutOfMemoryError("out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        GraphClock("warm").block(call, 2)


def test_what_a_call_raises_by_itself_is_not_blamed_on_the_graph(gpu):
    def call():
        raise ValueError("no such head")

    with pytest.raises(ValueError, match="no such head"):
        GraphClock("warm").block(call, 2)


def test_a_stream_that_is_not_the_default_one_is_the_one_that_captures(gpu):
    mine = fakegpu.FakeStream()
    seen = []

    def call():
        seen.append(gpu.current)
        gpu.call()

    with torch.cuda.stream(mine):  # type: ignore[arg-type]
        GraphClock("warm").block(call, 2)
    assert set(seen) == {mine}


def test_a_torch_without_events_for_graphs_is_named(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: None)
    with pytest.raises(CaptureError, match=r"--timer graph needs .* use --timer events"):
        clock_for("cuda", timer="graph")


@pytest.mark.parametrize(
    ("device", "asked", "kind", "l2", "timer"),
    [
        ("cpu", {}, HostClock, "warm", "host"),
        ("cpu", {"l2": "cold"}, HostClock, "cold", "host"),
        ("cuda", {}, CudaClock, "cold", "events"),
        ("cuda", {"l2": "warm", "timer": "events"}, CudaClock, "warm", "events"),
        ("cuda", {"timer": "graph"}, GraphClock, "cold", "graph"),
    ],
)
def test_the_clock_of_a_device(gpu, device, asked, kind, l2, timer):
    clock = clock_for(device, **asked)
    assert (type(clock), clock.l2, clock.timer) == (kind, l2, timer)
    assert clock.resolution_us > 0


@pytest.mark.parametrize(
    ("device", "asked", "says"),
    [
        ("cpu", {"timer": "graph"}, "--timer graph is not for cpu, which has host"),
        ("cpu", {"timer": "events"}, "--timer events is not for cpu, which has host"),
        ("cuda", {"timer": "host"}, "--timer host is not for cuda, which has events and graph"),
        ("cuda", {"timer": "sundial"}, "--timer sundial is unknown: host, events, graph"),
        ("cpu", {"l2": "tepid"}, "--l2 tepid is unknown: cold or warm"),
        ("tpu", {}, "no clock for the device 'tpu': cpu or cuda"),
    ],
)
def test_a_clock_that_does_not_exist_is_refused(device, asked, says):
    with pytest.raises(ValueError, match=says):
        clock_for(device, **asked)
