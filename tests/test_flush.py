"""The flush: it covers the last cache, reads memory of its own, and knows the machine's caches."""

import functools
import os
from pathlib import Path

import pytest
import torch

from attnbench.machine import host
from attnbench.measure import clock as flushes


def test_the_flush_covers_the_last_cache_of_this_machine_and_reads_all_of_it():
    sizes = [
        int(path.read_text().strip()[:-1]) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    flush = flushes.Flush("cpu")
    assert flush.nbytes >= 1.5 * max(sizes, default=64 << 20)
    flush._sums.zero_()
    flush()
    assert flush._sums.double().sum() == flush.nbytes // 4
    assert flush._sums.nbytes < flush.nbytes / 10_000  # all that a flush writes


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux")
def test_every_page_of_the_flush_was_written_to(monkeypatch):
    """Pages that nobody has written to are all one page of zeros, which stays in the cache."""
    monkeypatch.setattr(flushes, "last_cache_bytes", lambda device: 32 << 20)
    assert bool(flushes.Flush("cpu")._data.ne(0).all())


def cores(folder, monkeypatch, *, groups, size="32M"):
    """A machine whose cores come in groups that share a last cache."""
    for group in groups:
        for core in group:
            for index, (level, kind, bytes_, shared) in enumerate(
                [
                    (1, "Data", "32K", [core]),
                    (1, "Instruction", "64K", [core]),
                    (3, "Unified", size, group),
                ]
            ):
                at = folder / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
                at.mkdir(parents=True)
                names = {"level": level, "type": kind, "size": bytes_}
                names["shared_cpu_list"] = ",".join(map(str, shared))
                for name, value in names.items():
                    (at / name).write_text(f"{value}\n")
    monkeypatch.setattr(host, "data_caches", functools.partial(host.data_caches, root=folder))
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: {c for g in groups for c in g}, raising=False
    )


def test_last_caches_are_added_up_over_groups_of_cores_and_counted_once_in_one(
    tmp_path, monkeypatch
):
    cores(tmp_path, monkeypatch, groups=[[0, 1], [2, 3]])
    assert flushes.last_cache_bytes("cpu") == 2 * (32 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert flushes.last_cache_bytes("cpu") == 32 << 20


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_where_the_affinity_is_refused_the_cache_of_the_first_core_is_flushed(
    tmp_path, monkeypatch, error
):
    def refuse(pid):
        raise error

    cores(tmp_path, monkeypatch, groups=[[0, 1], [2, 3]])
    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    assert flushes.last_cache_bytes("cpu") == 32 << 20


def test_a_cache_that_is_not_known_is_taken_for_64_mib(tmp_path, monkeypatch):
    cores(tmp_path, monkeypatch, groups=[[0]], size="large")
    for index in (0, 1):
        (tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size").write_text("")
    assert flushes.last_cache_bytes("cpu") is None
    assert flushes.Flush("cpu").nbytes >= 64 << 20


def test_the_flush_of_a_gpu_covers_its_l2(monkeypatch):
    class Properties:
        L2_cache_size = 3_000_000

    made = []
    for name in ("ones", "empty"):
        make = getattr(torch, name)

        def on_host(*shape, dtype, device, make=make):
            made.append(device)
            return make(*shape, dtype=dtype)

        monkeypatch.setattr(torch, name, on_host)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert flushes.Flush("cuda").nbytes >= 1.5 * 3_000_000
    assert made == ["cuda", "cuda"]
