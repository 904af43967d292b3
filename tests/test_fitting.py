"""Memory: what is free, which cells are tried at all, and what becomes of those that run out."""

import json
import resource
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils._pytree import tree_leaves

from attnbench.api import IMPLEMENTATIONS, Estimate, attention
from attnbench.api.loader import load_built_in
from attnbench.errors import UsageError
from attnbench.machine import facts, host
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run
from attnbench.theory.pruning import Pruning
from attnbench.worker import catalogue as module
from attnbench.worker.catalogue import fitting
from attnbench.worker.checking import Entry
from attnbench.worker.inputs import Draw
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import TINY, collector, run_attnbench

load_built_in()
GIB = 1 << 30
SMALL = Case(heads=2, seq_len=24, head_dim=8)


def test_a_sweep_refuses_such_a_limit_in_one_line(cli, assert_refused, tmp_path):
    result = cli("sweep", "--memory-limit", "lots", "--output", tmp_path)
    assert_refused(result, "--memory-limit", "'lots'")
    result = cli("sweep", "--memory-limit", "10KB", "--output", tmp_path)
    assert_refused(result, "--memory-limit 10KB: a worker needs 64 MiB at least")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("available", "left"), [(700, None), (900, 700), (700, 900)])
def test_free_is_the_least_of_the_machines_the_groups_and_the_own_limit(
    monkeypatch, available, left
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(host, "memory_left", lambda: left)
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(data=100))
    monkeypatch.setattr(psutil, "Process", lambda: used)
    limits = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert facts.free_bytes("cpu") == 700
    limits[0] = 750
    assert facts.free_bytes("cpu") == 650
    limits[0] = 50
    assert facts.free_bytes("cpu") == 0


@pytest.mark.parametrize(("text", "most"), [("90%", 900), ("300B", None), ("64MiB", 64 << 20)])
def test_the_limit_counts_from_what_the_process_has(monkeypatch, text, most):
    monkeypatch.setattr(facts, "free_bytes", lambda device: 1000)
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(data=50))
    monkeypatch.setattr(psutil, "Process", lambda: used)
    given: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    if most is None:
        with pytest.raises(UsageError):
            facts.limit_memory(text)
    else:
        facts.limit_memory(text)
        facts.limit_memory("none")
    assert given == ([(50 + most, resource.RLIM_INFINITY)] if most else [])


def test_on_a_gpu_the_allocator_is_limited_and_its_cache_is_free(monkeypatch):
    at = {"mem_get_info": (60 * GIB, 80 * GIB), "memory_reserved": 10 * GIB}
    for name, value in (at | {"memory_allocated": 4 * GIB}).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(facts, "_gpu_limit_bytes", [])
    assert facts.free_bytes("cuda") == 66 * GIB
    facts.limit_memory("50%", "cuda")
    assert shares == [33 / 80]
    assert facts.free_bytes("cuda") == (33 - 4) * GIB
    facts.limit_memory("8GiB", "cuda")
    assert shares[1:] == [0.1]
    assert facts.free_bytes("cuda") == 4 * GIB


@pytest.mark.parametrize(("small", "large", "says"), [
    ({}, {"seq_len": 1024}, "n=512 ran"),
    ({"batch": 2}, {"batch": 3, "seq_len": 1024}, "B=2, n=512 ran"),
    ({}, {"heads": 8}, "H=4 ran"),
    ({"kv_len": 600}, {"kv_len": 700}, "S=600 ran"),
    ({"layers": 2, "workload": "layer"}, {"layers": 4, "workload": "layer"}, "layers=2 ran"),
    ({}, {}, None),
    ({"seq_len": 1024}, {}, None),
    ({}, {"seq_len": 1024, "dtype": "bfloat16"}, None),
    ({}, {"seq_len": 1024, "mask": parse_mask("causal")}, None),
    ({"batch": 2}, {"seq_len": 1024}, None),
    ({}, {"seq_len": 1024, "pass_": "both"}, None),
    ({}, {"seq_len": 1024, "threads": 2}, None),
])  # fmt: skip
def test_what_is_larger_in_sizes_alone_is_implied(small, large, says):
    pruning = Pruning([Cell(case=Case(**small), impl="naive")])
    reason = pruning.implied(Cell(case=Case(**large), impl="naive"))
    assert reason == (says and f"{says} out of memory (--no-prune tries it)")
    assert pruning.implied(Cell(case=Case(**large), impl="sdpa")) is None
    off = Pruning(pruning.oom, enabled=False)
    assert off.implied(Cell(case=Case(**large), impl="naive")) is None


def looked_at(
    *names: str, case: Case = SMALL, pruning: Pruning | None = None
) -> tuple[list[str], list[Record]]:
    records: list[Record] = []
    entry = Entry(index=0, case=case, impls=names)
    kept = fitting([entry], collector(records), pruning or Pruning())
    return [name for entry in kept for name in entry.impls], records


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_cannot_fit_is_skipped_and_the_others_of_its_case_are_kept(monkeypatch, device):
    monkeypatch.setattr(module, "free_bytes", lambda device: 6 * GIB)
    monkeypatch.setattr("attnbench.worker.reference.free_bytes", lambda device: 6 * GIB)
    case = Case(heads=1, seq_len=32768, device=device)  # type: ignore[arg-type]
    kept, [record] = looked_at("chunked", "naive", case=case)
    assert kept == ["chunked"]
    assert (record.cell.impl, record.status) == ("naive", "skipped")
    assert record.reason == "needs 8.0 GiB, 6.0 GiB free"
    assert record.metrics["memory_predicted_bytes"] == 2 * 4 * 32768**2
    monkeypatch.setattr(module, "free_bytes", lambda device: 9 * GIB)
    assert looked_at("chunked", "naive", case=case)[0] == ["chunked", "naive"]
    # Inputs alone may be too much, whatever the implementation.
    monkeypatch.setattr(module, "free_bytes", lambda device: 100 << 20)
    assert looked_at("chunked", "sdpa", case=case)[0] == []


@pytest.mark.parametrize(("declared", "pruned", "says"), [
    (700_000, True, None),
    (10**6, True, "needs 985.6 KiB, 781.2 KiB free"),
    (10**6, False, "needs 985.6 KiB, 781.2 KiB free"),  # it cannot run
    (Estimate(700_000), True, None),
    (Estimate(10**6), True, "needs up to 985.6 KiB, 781.2 KiB free (--no-prune tries it)"),
    (Estimate(10**6), False, None),  # it may
    (None, True, None),  # nothing is known against it; the memory limit guards the others
])  # fmt: skip
def test_an_upper_bound_has_to_be_free_unless_all_is_to_be_tried(
    monkeypatch, declared, pruned, says
):
    monkeypatch.setattr(module, "free_bytes", lambda device: 800_000)
    attention("vast", workspace=lambda case: declared)(lambda q, k, v, *, causal, scale: q)
    try:
        kept, records = looked_at("vast", pruning=Pruning(enabled=pruned))
    finally:
        IMPLEMENTATIONS.remove("vast")
    assert [record.reason for record in records] == ([says] if says else [])
    assert kept == ([] if says else ["vast"])
    assert all(record.metrics["memory_bound_bytes"] == declared for record in records)
    known = {Estimate: None}.get(type(declared), declared)
    assert all(record.metrics["memory_predicted_bytes"] == known for record in records)


@pytest.mark.parametrize("cache", ["static", "none", "rerun", "int8", "paged:16"])
def test_what_decoding_keeps_alive_is_not_what_it_reads_in_a_step(monkeypatch, cache):
    """One step reads a window of 16 tokens; all hidden states are there, and a cache is, too."""
    case = Case(
        workload="decode", seq_len=4096, heads=2, head_dim=8, new_tokens=2, cache=cache,
        mask=parse_mask("window:16"),
    )  # fmt: skip
    workload = WORKLOADS.get("decode")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    live = sum(x.nbytes for x in tensors.values())
    call: Any = workload.bind(case, IMPLEMENTATIONS.get("naive"), tensors).call
    kept = tree_leaves([x for x in vars(call.stores[0]).values() if isinstance(x, list)])
    live += sum(x.nbytes for x in [*kept, *call()])
    costs = Trial(impl=IMPLEMENTATIONS.get("naive"), case=case, tensors={}).costs()
    given, prepared = workload.live_bytes(case, costs)
    assert 20 * costs["bytes_min"] < given <= live
    assert given + prepared <= live
    monkeypatch.setattr(module, "free_bytes", lambda device: given)
    assert looked_at("naive", case=case)[0] == []


def test_keys_that_no_query_sees_need_memory_all_the_same(monkeypatch):
    case = Case(seq_len=1, kv_len=4096, heads=2, head_dim=8, mask=parse_mask("window:16"))
    given = sum(x.nbytes for x in WORKLOADS.get("attention").tensors(case).values())
    monkeypatch.setattr(module, "free_bytes", lambda device: given)
    assert looked_at("naive", case=case)[0] == []


def test_what_a_smaller_one_implies_is_skipped_without_a_look(monkeypatch):
    def fail(device: str) -> int:
        raise AssertionError

    monkeypatch.setattr(module, "free_bytes", fail)
    smaller = Case(heads=2, seq_len=23, head_dim=8)
    _, [record] = looked_at("naive", pruning=Pruning([Cell(case=smaller, impl="naive")]))
    assert record.status == "skipped"
    assert record.reason == "n=23 ran out of memory (--no-prune tries it)"


HUNGRY = """
import torch
from attnbench.api import attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

kept = []

@attention("hungry")
def hungry(q, k, v, *, causal, scale):
    torch.empty(q.shape[2] << 24, dtype=torch.uint8)
    return sdpa(q, k, v, is_causal=causal, scale=scale)

@attention("declares", workspace=lambda case: 700 << 20 if case.seq_len == 40 else 0)
def declares(q, k, v, *, causal, scale):
    return sdpa(q, k, v, is_causal=causal, scale=scale)

@attention("keeps")
def keeps(q, k, v, *, causal, scale):
    if q.shape[2] == 16 and not kept:
        kept.append(torch.empty(600 << 20, dtype=torch.uint8))
    return sdpa(q, k, v, is_causal=causal, scale=scale)
"""
LIMITED = ("--impl", "hungry.py", *TINY, "--threads", "1", "--memory-limit", "1GiB")


def swept(folder: Any, name: str, *args: object) -> dict[tuple[str, int], Record]:
    (folder / "hungry.py").write_text(HUNGRY)
    ran = run_attnbench("sweep", *LIMITED, *args, "--name", name, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    run = load_run(folder / "results" / name)
    return {(x.cell.impl, x.cell.case.seq_len): x for x in run.records}


@pytest.mark.slow
def test_larger_cells_than_one_that_ran_out_are_skipped_unless_they_are_to_be_tried(tmp_path):
    sizes = ("--impls", "hungry,naive", "--seq-lens", "32..128")
    rows = swept(tmp_path, "pruned", *sizes, "--processes", "1")
    assert rows["hungry", 32].status == "ok"
    assert (rows["hungry", 64].status, rows["hungry", 64].reason) == (
        "oom", "check: asked for 1.0 GiB",
    )  # fmt: skip
    assert rows["hungry", 128].status == "skipped"
    assert rows["hungry", 128].reason == "n=64 ran out of memory (--no-prune tries it)"
    assert {rows["naive", n].status for n in (32, 64, 128)} == {"ok"}
    kept = json.loads((tmp_path / "results/pruned/run.json").read_text())["settings"]
    assert (kept["memory_limit"], kept["prune"]) == ("1GiB", True)
    rows = swept(tmp_path, "all", *sizes, "--impls", "hungry", "--no-prune")
    assert [rows["hungry", n].status for n in (64, 128)] == ["oom"] * 2
    assert rows["hungry", 128].reason == "check: asked for 2.0 GiB"


@pytest.mark.slow
def test_what_someone_keeps_is_not_missing_in_the_groups_after_it(tmp_path):
    """Of 1 GiB 600 MiB are kept, hungry asks for 640, and 700 are predicted to be needed."""
    rows = swept(tmp_path, "kept", "--impls", "keeps,hungry,declares", "--seq-lens", "16,40")
    assert {row.status for row in rows.values()} == {"ok"}
