"""Kernels on a GPU: found by a profiler that loses some, in a process that times nothing."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from attnbench.api import IMPLEMENTATIONS, Implementation
from attnbench.api.loader import load_built_in
from attnbench.execution import runner as runners
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.measure import probes
from attnbench.measure.probes import profile_call
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.worker import tracing as profiling
from attnbench.worker.tracing import profile_cell
from attnbench.worker.trial import Trial, kernels_of
from attnbench.worker.workloads import WORKLOADS, Bound

load_built_in()


class Event:
    """One of kineto's, as torch gives them."""

    def __init__(
        self, name: str, ns: tuple[int, int], *, gpu: bool = False, id_: int = 0, user: bool = False
    ) -> None:
        self._name, self._ns, self._gpu, self._id, self._user = name, ns, gpu, id_, user

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._ns[0]

    def end_ns(self) -> int:
        return self._ns[1]

    def device_type(self) -> Any:
        kinds: Any = torch.autograd.DeviceType  # type: ignore[attr-defined]
        return kinds.CUDA if self._gpu else kinds.CPU

    def correlation_id(self) -> int:
        return self._id

    def is_user_annotation(self) -> bool:
        return self._user


class LossyProfiler:
    """Sees what is launched in its session, but for the first `lost` kernels."""

    def __init__(self, lost: int) -> None:
        self.lost, self.ns, self.id = lost, 0, 0
        self.on_host: list[Event] = []
        self.on_gpu: list[Event] = []

    @contextlib.contextmanager
    def session(self, use_kineto: bool = False, use_device: str | None = None) -> Iterator[Any]:
        assert (use_kineto, use_device) == (True, "cuda")
        seen = SimpleNamespace()
        yield seen
        events = self.on_host + self.on_gpu[self.lost :]
        seen.kineto_results = SimpleNamespace(
            events=lambda: events, experimental_event_tree=lambda: []
        )

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        begin = self.ns = self.ns + 1
        yield
        self.ns += 1
        self.on_host.append(Event(name, (begin, self.ns), id_=3))
        self.on_gpu.append(Event(name, (begin, self.ns), gpu=True, id_=3, user=True))

    def wait(self, by: str = "cudaDeviceSynchronize") -> None:
        self.ns, self.id = self.ns + 10, self.id + 1
        self.on_host.append(Event(by, (self.ns, self.ns + 1), id_=self.id))

    def launch(self, *kernels: str, by: str = "cudaLaunchKernel") -> None:
        self.ns, self.id = self.ns + 10, self.id + 1
        self.on_host.append(Event(by, (self.ns, self.ns + 1), id_=self.id))
        for number, name in enumerate(kernels):
            # The time of the device may be off: the later a kernel, the earlier it seems here.
            ns = number - 100 * self.ns, number - 100 * self.ns + 1
            self.on_gpu.append(Event(name, ns, gpu=True, id_=self.id))


@pytest.fixture
def lossy(monkeypatch):
    def install(lost: int) -> LossyProfiler:
        fake = LossyProfiler(lost)
        monkeypatch.setattr(probes, "profile", fake.session)
        monkeypatch.setattr(probes, "record_function", fake.record)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: fake.launch("spin_kernel"))
        monkeypatch.setattr(torch.cuda, "synchronize", fake.wait)
        return fake

    return install


@pytest.mark.parametrize("lost", [0, 1, 64, 500])
def test_what_a_profiler_loses_at_the_head_of_a_session_is_no_kernel_of_the_call(lossy, lost):
    gpu = lossy(lost)

    def call() -> str:
        gpu.launch("gemm")
        gpu.launch("triton_flash_attention", by="cuLaunchKernelEx")
        gpu.launch("Memcpy DtoD (Device -> Device)", by="cudaMemcpyAsync")
        gpu.launch("reduce", "Memset (Device)", "gemm", by="cudaGraphLaunch")
        return "result"

    seen = profile_call(call, "cuda")
    assert seen.result == "result"
    assert seen.kernels == ("gemm", "triton_flash_attention", "reduce")
    assert kernels_of(seen) == {
        "kernel": "triton_flash_attention; gemm; reduce",
        "kernel_count": 4,
        "device_waits": 0,
        "sdpa_backend": None,
    }


def test_waits_of_a_call_for_the_device_are_counted_and_those_of_the_profiling_are_not(lossy):
    gpu = lossy(0)

    def call() -> None:
        gpu.launch("gemm")
        gpu.launch("Memcpy DtoH (Device -> Pageable)", by="cudaMemcpyAsync")
        for by in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaStreamWaitEvent"):
            gpu.wait(by)
        gpu.launch("gemm")

    seen = profile_call(call, "cuda")
    assert (seen.kernel_count, kernels_of(seen)["device_waits"]) == (2, 2)


@pytest.mark.parametrize("name", [
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x256",
    "PyTorchMemEffAttention::AttentionBackwardKernel",
    "_attn_fwd",
])  # fmt: skip
def test_the_kernel_that_attends_comes_first_of_the_names_whatever_it_is_called(lossy, name):
    gpu = lossy(0)
    seen = profile_call(lambda: gpu.launch(*(f"copy {n}" for n in range(9)), name), "cuda")
    assert kernels_of(seen)["kernel"].split("; ")[:2] == [name, "copy 0"]


@pytest.mark.parametrize("launches", [0, 3])
def test_kernels_of_which_one_is_lost_are_unknown_and_not_fewer(lossy, launches):
    gpu = lossy(513)
    seen = profile_call(lambda: [gpu.launch("gemm") for _ in range(launches)], "cuda")
    found = kernels_of(seen)
    assert (found["kernel"], found["kernel_count"]) == (None, None)
    assert found["kernel_note"]


def test_the_fakes_have_the_signatures_of_torch():
    methods = {name for name in vars(Event) if not name.startswith("_")}
    assert methods <= set(dir(torch._C._autograd._KinetoEvent))  # type: ignore[attr-defined]
    for fake, real in (
        (LossyProfiler.session, profiler.profile),
        (LossyProfiler.record, profiler.record_function),
        (lambda cycles: None, torch.cuda._sleep),
    ):
        names = inspect.signature(fake).parameters.keys() - {"self"}
        assert names <= inspect.signature(real).parameters.keys()


def test_what_is_timed_on_a_gpu_was_never_profiled_in_its_process(monkeypatch):
    class Profiler:
        def __init__(self, **options: Any) -> None:
            raise AssertionError("its library stays attached, and slows every launch")

    monkeypatch.setattr(probes, "profile", Profiler)
    monkeypatch.setattr(probes, "make_matmul_workspaces", lambda: None)
    # Before and after it is built, twice; before a call, and its peak.
    bytes_ = iter([100, 130, 100, 130, 200, 340])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict.fromkeys(STATISTICS, next(bytes_)))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    case = Case(device="cuda", dtype="bfloat16", seq_len=8)
    workload = WORKLOADS.get(case.workload)
    bound = Bound(call=lambda: torch.empty(10), named=lambda o: {"o": o}, grad=False)
    monkeypatch.setattr(type(workload), "bind", lambda *_: bound)
    trial = Trial(impl=Implementation(name="x", build=never), case=case, tensors={})
    trial.build()
    trial.probe()
    names = ("memory_prepared_bytes", "memory_workspace_bytes", "memory_peak_bytes")
    assert [trial.metrics[name] for name in names] == [30, 140 - 40, 30 + 140]
    assert "kernel" not in trial.metrics
    with pytest.raises(AssertionError, match="stays attached"):
        trial.profile()


STATISTICS = ("requested_bytes.all.current", "requested_bytes.all.peak")


def never(case: Case) -> Callable[..., Any]:
    raise AssertionError


def test_a_compilation_counts_where_nothing_was_compiled_yet(monkeypatch):
    compiling = replace(IMPLEMENTATIONS.get("naive"), compiles=True)
    monkeypatch.setattr(profiling, "implementation", lambda name: compiling)
    status, found = profile_cell(Case(seq_len=16), "naive", 0)
    assert status == "ok"
    assert found["compile_s"] > 0
    assert "device_waits" in found
    assert "aten::bmm" in found["kernel"]


FILE = """
import os, pathlib
import torch
from attnbench.api import attention

HERE = pathlib.Path(__file__).parent

def sdpa(q, k, v, causal, scale):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

@attention("says-where")
def says_where(q, k, v, *, causal, scale):
    with (HERE / "processes").open("a") as file:
        print(os.getpid(), file=file)
    return sdpa(q, k, v, causal, scale)

@attention("dies-once")
def dies_once(q, k, v, *, causal, scale):
    if not (HERE / "died").exists():
        (HERE / "died").touch()
        os._exit(9)
    return sdpa(q, k, v, causal, scale)
"""


def test_a_process_of_its_own_names_kernels_once_and_its_end_costs_their_names(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(runners, "_PROFILED_APART", ("cpu",))
    (tmp_path / "own.py").write_text(FILE)
    names = ("dies-once", "says-where")
    job = Job(groups=(((Case(seq_len=16), names),),))
    settings = Settings(
        device="cpu", files=(str(tmp_path / "own.py"),), min_time_s=0, max_time_s=0.02
    )
    begin = time.perf_counter()
    with LocalRunner(settings) as runner:
        first = {r.cell.impl: r for r in runner.run([job]) if isinstance(r, Record)}
        first_s = time.perf_counter() - begin - runner.start_up_s
        second = {r.cell.impl: r for r in runner.run([job]) if isinstance(r, Record)}
    assert {r.status for r in (*first.values(), *second.values())} == {"ok"}
    assert "kernel_note" not in first["says-where"].metrics
    for name in names:
        assert 0 < first[name].spent_s["profile"] < first_s
        assert "profile" not in second[name].spent_s, "known by then"
    for found in (first, second):
        note = found["dies-once"].metrics["kernel_note"]
        assert note.startswith("not profiled: crashed: profile: the process ended")
    processes = (tmp_path / "processes").read_text().split()
    apart, *timed = dict.fromkeys(processes)
    assert len(timed) == 2, "of two runs"
    assert processes[:2] == [apart] * 2
    assert processes.count(apart) == 2, "one call to warm up, one profiled"
