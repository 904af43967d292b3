"""Threads of libraries beside torch: as many as the case says, unless the user set a number."""

import os

import pytest

import attnbench
from attnbench.machine.host import POOLS
from attnbench.store.runs import load_run

KERNEL = """
import os, pathlib
import numpy as np
import torch
from attnbench.api import attention

openmp = os.environ["OMP_NUM_THREADS"]  # as a library that is loaded here would read it


@attention("numpy", passes=("forward",), dtypes=("float32",), workloads=("attention",), gqa=False)
def f(q, k, v, *, causal, scale):
    before = len(os.listdir("/proc/self/task"))
    square = np.ones((512, 512), np.float32)
    square @ square  # large enough for every thread of the pool
    started = len(os.listdir("/proc/self/task")) - before
    seen = pathlib.Path(__file__).with_name(f"seen-{torch.get_num_threads()}")
    if not seen.exists():  # later calls meet a pool that runs
        seen.write_text(f"{openmp} {started}")
    a, b, c = (x.detach().numpy() for x in (q, k, v))
    s = np.matmul(a * np.float32(scale), np.swapaxes(b, 2, 3))
    s = np.exp(s - s.max(-1, keepdims=True))
    return torch.from_numpy(np.matmul(s / s.sum(-1, keepdims=True), c).astype(np.float32))
"""
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc here")


def swept(folder, monkeypatch, set_here, threads=(1, 2)):
    """Facts, notes; by number of threads OMP_NUM_THREADS, and what numpy's pool started."""
    for name in POOLS:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)
    file = folder / "kernel.py"
    file.write_text(KERNEL)
    rows = attnbench.sweep(
        impls=["numpy"], seq_lens=[16], head_dims=[8], heads=[1], threads=threads, masks=["full"],
        files=(str(file),), output=folder / "runs",
        settings={"min_time_s": 0.001, "max_time_s": 0.01, "ceilings": "none"},
    )  # fmt: skip
    assert list(rows["status"]) == ["ok"] * len(threads)
    facts = load_run(folder / "runs" / rows["run_id"][0]).info["environment"]
    seen = {n: (folder / f"seen-{n}").read_text().split() for n in threads}
    notes = " ".join(rows["unsteady"].fillna("") + rows["notes"].fillna(""))
    return facts, notes, {n: (openmp, int(started)) for n, (openmp, started) in seen.items()}


def test_a_numpy_kernel_computes_in_as_many_threads_as_its_case_and_facts_name_none_of_it(
    tmp_path, monkeypatch
):
    """OpenBLAS starts no more threads than the process has CPUs."""
    facts, notes, seen = swept(tmp_path, monkeypatch, {})
    assert seen == {1: ("1", 0), 2: ("2", min(2, CPUS) - 1)}
    assert not facts["thread_env"].keys() & set(POOLS)
    assert "crowded" not in notes or CPUS == 1, "with two threads in a case"


def test_a_number_of_threads_that_the_user_set_stays_and_its_times_are_unsteady(
    tmp_path, monkeypatch
):
    chosen = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"}
    facts, notes, seen = swept(tmp_path, monkeypatch, chosen, threads=(1,))
    assert seen == {1: ("3", min(2, CPUS) - 1)}
    assert facts["thread_env"].items() >= chosen.items()
    says = "2 threads on 1 CPU compute in its process, and wait for each other"
    assert ("crowded" in notes and says in notes) == (CPUS > 1), "OpenBLAS would start none on one"
