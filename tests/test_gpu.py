"""What only a real GPU can show, and the CUDA clock's logic on a fake one."""

import itertools

import pytest
import torch

from attnbench.measure import clock as clocks

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeEvent:
    """An event on a stream whose time advances by what each call enqueues."""

    stream_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0.0
        self.waited = False

    def record(self) -> None:
        self.at_ms = FakeEvent.stream_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.waited, "read before the device was done"
        return end.at_ms - self.at_ms


def test_the_cuda_clock_reads_stream_time_and_host_time_apart(monkeypatch):
    host_ns = itertools.count(0, 5_000_000)  # each look at the host's clock is 5 ms later
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("attnbench.measure.clock.time.perf_counter_ns", lambda: next(host_ns))

    def enqueue() -> None:
        FakeEvent.stream_ms += 0.25

    time_us, e2e_us = clocks.CudaClock().block(enqueue, 8)
    assert time_us == pytest.approx(8 * 250.0)
    assert e2e_us == pytest.approx(5000.0)


@gpu
@needs_gpu
def test_stream_time_is_within_host_time():
    x = torch.randn(2048, 2048, device="cuda")
    clock = clocks.clock_for("cuda")
    clock.block(lambda: x @ x, 3)
    time_us, e2e_us = clock.block(lambda: x @ x, 10)
    assert 0 < time_us <= e2e_us * 1.05


@gpu
@needs_gpu
def test_memory_on_cuda_is_the_true_peak_whatever_ran_before():
    from attnbench.measure.profiled import profile_call

    x = torch.zeros(1 << 20, device="cuda")

    def call() -> torch.Tensor:
        return (x + x) * x  # two buffers of 4 MiB at once

    first = profile_call(call, "cuda").peak_bytes
    torch.empty(1 << 26, device="cuda")  # something large that came and went
    assert profile_call(call, "cuda").peak_bytes == first == 2 * (4 << 20)


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"])
def test_a_forced_backend_runs_or_refuses(name):
    from attnbench.api import IMPLEMENTATIONS
    from attnbench.case import Case
    from attnbench.loader import load_built_in
    from attnbench.measure.profiled import profile_call

    load_built_in()
    case = Case(device="cuda", dtype="bfloat16", seq_len=512)
    impl = IMPLEMENTATIONS.get(name)
    if impl.reason_against(case):
        pytest.skip(str(impl.reason_against(case)))
    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    call = impl.build(case)
    kernels = " ".join(profile_call(lambda: call(q, q, q), "cuda").kernels).lower()
    words = {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn", "math": "softmax"}
    assert words[name.removeprefix("sdpa-")] in kernels


@gpu
@needs_gpu
def test_every_built_in_is_right_on_cuda():
    from attnbench.checks import run_checks

    results = run_checks(
        names=None, files=(), device="cuda", dtypes=("float32", "bfloat16", "float16")
    )
    failed = [f"{r.impl}: {r.item.case.label()}: {r.reason}" for r in results if r.failed]
    assert not failed, "\n".join(failed)
    assert any(result.status == "ok" for result in results)


@gpu
@needs_gpu
def test_a_sweep_on_cuda_gives_stream_and_end_to_end_times(tmp_path):
    import attnbench

    frame = attnbench.sweep(
        output=tmp_path,
        settings={"device": "cuda", "max_time_s": 0.1},
        dtypes=("bfloat16",),
        seq_lens=(512,),
        passes=("forward", "both"),
        impls=("naive", "sdpa", "chunked"),
    )
    assert set(frame["status"]) == {"ok"}
    assert (frame["e2e_us_median"] >= frame["time_us_median"] * 0.95).all()
    assert frame["kernel"].notna().all()
