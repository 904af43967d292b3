"""The process of a variant on a GPU that it shares with two others, with torch.cuda simulated."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.gate import protocol
from attnbench.gate.server import sampling, variant
from attnbench.gate.server.variant import VariantProcess
from attnbench.measure.clock import CudaClock
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from attnbench.worker.reference import Reference
from tests import fakegpu

CELL = Cell(case=Case(seq_len=16, heads=1, head_dim=8), impl="mine")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a process does, in order; its workload computes nothing."""
    log: list[str] = []

    def noted(word: str, result: Any = None) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            log.append(word)
            return result

        return note

    bound = SimpleNamespace(call=noted("call"), grad=False)
    truth = Reference(values={"o": torch.zeros(1)}, allowed={})

    workload = SimpleNamespace(
        tensors=noted("inputs", {}), fill=noted("fill"), bind=noted("build", bound),
        truth=noted("truth", truth),
    )  # fmt: skip
    monkeypatch.setattr(variant, "WORKLOADS", {"attention": workload})
    monkeypatch.setattr(variant, "implementation", lambda _: SimpleNamespace(definition=None))
    monkeypatch.setattr(variant, "_judge", noted("check"))
    monkeypatch.setattr(sampling, "_WARM_S", float("inf"))
    monkeypatch.setattr(variant, "restore_settings", lambda: None)  # these functions, too
    monkeypatch.setattr(torch.cuda, "empty_cache", noted("empty the cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", noted("wait"))
    return log


def a_process(folder: Any, cells: int = 1) -> VariantProcess:
    config = protocol.VariantConfig(
        files=(), root="", other_root="", cells=dict.fromkeys(range(cells), CELL),
        device="cuda", threads=1, seed=0, cpu=None,
    )  # fmt: skip
    return VariantProcess(config, io.BytesIO(), io.BytesIO())


def test_nothing_of_a_warm_up_runs_or_is_kept_while_another_process_is_timed(log, tmp_path):
    assert a_process(tmp_path)._prepare_all() == {}
    after = log[log.index("check") + 1 :]
    assert after == ["empty the cache", *["call", "wait"] * 3]


def test_a_reference_serves_all_cells_of_its_case_that_have_no_definition(log, tmp_path):
    assert a_process(tmp_path, cells=3)._prepare_all() == {}
    assert (log.count("truth"), log.count("check")) == (1, 3)


@pytest.mark.parametrize(("lost", "failed"), [(True, [0]), (False, [0, 1, 2])])
def test_a_lost_device_costs_the_cell_that_lost_it_and_not_those_after_it(
    log, tmp_path, monkeypatch, lost, failed
):
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(variant, "_judge", fails)
    monkeypatch.setattr(variant, "device_is_lost", lambda: lost)
    assert list(a_process(tmp_path, cells=3)._prepare_all()) == failed


def test_the_first_call_with_new_inputs_is_timed_and_its_launch_is_not(monkeypatch, tmp_path):
    """A clock of a GPU makes a call before: one whose result was kept would have it by then."""
    gpu = fakegpu.install(monkeypatch)
    kept: list[bool] = []

    def call() -> None:
        gpu.host_us += 200.0
        if not kept:
            gpu.launch("call", device_us=300.0, host_us=4.0)
        kept.append(True)

    process = a_process(tmp_path)
    process._sampler = SimpleNamespace(clock=CudaClock("warm"))  # type: ignore[assignment]
    assert process._first_us(call) == pytest.approx(300.0)
    assert process._first_us(call) == pytest.approx(0.0)


def test_tensors_that_stay_on_the_gpu_are_memory_that_a_process_holds(log, tmp_path, monkeypatch):
    process = a_process(tmp_path)
    assert process._prepare_all() == {}
    process._sampler = sampling.Sampler("cpu", 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 50)
    answer = process._served(protocol.TakeSample(0, 1, 1))
    assert isinstance(answer, protocol.SampleTaken)
    assert answer.held_bytes > 1 << 50


def _import_anew() -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("CUDA is asked before the fork: no process could use it")

    for of in (torch.cuda, torch._C):
        for name in dir(of):
            if name.startswith(("_cuda_", "_lazy_init", "is_available", "device_count")):
                setattr(of, name, asked)
    for name in [name for name in sys.modules if name.startswith(("attnbench", "pynvml"))]:
        del sys.modules[name]
    sys.modules["pynvml"] = None  # type: ignore[assignment]
    for name in ("worker.forking", "worker.serving", "gate.server.variant"):
        importlib.import_module(f"attnbench.{name}")


def test_what_forks_the_processes_asks_cuda_for_nothing():
    """One that was forked after CUDA was initialised can never use it."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=1, mp_context=fork) as pool:
        pool.submit(_import_anew).result()
