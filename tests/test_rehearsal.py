"""The simulated GPU that `make gpu-rehearsal` uses: its API is torch's, its times are the truth."""

import importlib
import inspect

import pytest
import torch

from tests.rehearsal import __main__ as rehearsal
from tests.rehearsal.cuda import Gpu
from tests.rehearsal.device import DEEPEST, Device, Event, Graph, OutOfMemoryError, Stream
from tests.rehearsal.profiles import MIB, PROFILES


@pytest.fixture
def device():
    return Device(PROFILES["A100"])


def lasts(us):
    return lambda: us


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "args")]


def test_what_stands_in_for_torch_and_nvml_takes_what_they_take():
    gpu = Gpu(Device(PROFILES["H100"]))
    wrong = []
    for name, fake in gpu.replacements().items():
        real = getattr(torch.cuda, name)
        pairs = [(fake, real)]
        if inspect.isclass(real):
            own = [n for n, f in vars(fake).items() if inspect.isfunction(f) and n != "__new__"]
            pairs = [
                (fake.__new__, real.__new__),
                *((getattr(fake, n), getattr(real, n)) for n in own),
            ]
        wrong += [
            f"{name}.{getattr(ours, '__name__', '')}"
            for ours, theirs in pairs
            if parameters(ours) != parameters(theirs)[: len(parameters(ours))]
        ]
    pynvml = importlib.import_module("pynvml")
    from tests.rehearsal import nvml

    wrong += [
        name
        for name, fake in vars(nvml).items()
        if name.startswith("nvml") and parameters(fake) != parameters(getattr(pynvml, name))
    ]
    assert wrong == []


def test_work_runs_behind_the_host_and_events_tick(device):
    begin, end = Event(), Event()
    device.record(begin)
    device.launch("a", lasts(100.0))
    device.launch("b", lasts(50.0))
    device.record(end)
    issued_us = device.host_us
    device.wait_event(end)
    assert issued_us < 20 < 150 < device.host_us
    tick = device.profile.tick_us
    assert device.elapsed_ms(begin, end) * 1000 == pytest.approx(150 + 5, abs=tick)
    ticks = device.elapsed_ms(begin, end) * 1000 / tick
    assert ticks == pytest.approx(round(ticks))


def test_what_the_cache_holds_is_read_faster_until_it_is_evicted(device):
    def read_us():
        device.launch("read", lasts(1.0), reads=[(1, 20 * MIB)])
        return device.kernels[-1].end_us - device.kernels[-1].begin_us

    cold, warm = read_us(), read_us()
    device.launch("flush", lasts(1.0), reads=[(2, 80 * MIB)])
    assert warm < cold / 2
    assert read_us() == pytest.approx(cold)


def test_a_host_far_ahead_waits_for_a_place_in_the_queue(device):
    for _ in range(DEEPEST + 100):
        device.launch("slow", lasts(1000.0))
    assert device.host_us > 90 * 1000


def test_a_graph_replays_with_nothing_for_the_host_to_do(device):
    graph, stream = Graph(), Stream()
    device.current = stream
    device.begin_capture(graph, stream)
    for _ in range(10):
        device.launch("a", lasts(3.0))
    device.end_capture(stream)
    device.kernels.clear()
    device.replay(graph)
    assert sum(kernel.end_us - kernel.begin_us for kernel in device.kernels) == pytest.approx(30)
    device.begin_capture(graph, stream)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        device.synchronize()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.end_capture(stream)
    with pytest.raises(RuntimeError, match="failed before"):
        device.begin_capture(graph, stream)


def test_what_is_free_again_is_taken_first_and_a_graph_has_memory_of_its_own(device):
    block = device.allocate(100)
    device.free(block)
    assert device.allocate(100) == block
    device.free(block)
    device.current = Stream()
    device.begin_capture(Graph(), device.current)
    assert device.allocate(100) != block


def test_memory_runs_out_and_what_is_cached_is_given_back_first(device):
    most = device.profile.memory_bytes
    device.free(device.allocate(most - 100))
    device.allocate(200)
    assert device.retries == 0, "the allocator had it"
    device.allocate(most - 300)
    with pytest.raises(OutOfMemoryError):
        device.allocate(200)


def test_a_sweep_on_a_simulated_gpu_has_the_true_times(tmp_path):
    run = rehearsal.Rehearsal(profile="A100", folder=tmp_path, few=True)
    part, rows = run.sweep(
        "cold", "--seq-lens", "9", "--dtypes", "bfloat16", "--impls", "naive,sdpa", "--max-time",
        "0.02", "--min-time", "0.001",
    )  # fmt: skip
    log = (tmp_path / "cold.log").read_text()
    assert [row["status"] for row in rows] == ["ok"] * 2, log
    assert all(row["metrics"]["kernel"] for row in rows), log
    run.compare(part, "cold")
    assert part.problems == []
    assert run.cells == 2
