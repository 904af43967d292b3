"""Facts of the host: from a folder that stands in for the root of the system, and a fake psutil."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from attnbench.execution.process import Settings, environment_of
from attnbench.machine import facts, host
from attnbench.machine.environment import Environment

CPU = "sys/devices/system/cpu"


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


STAT = """cpu  200 0 100 1600 20 0 0 1080 7 7
cpu0 100 0 50 800 10 0 0 40 7 7
cpu1 100 0 50 820 10 0 0 20 7 7
cpu2 0 0 0 0 0 0 0 1020 0 0
intr 1 2 3
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A busy virtual machine in a container of control groups version 2, confined to two CPUs."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    for name, found in {
        "getloadavg": (2.12, 1.58, 1.16),
        "swap_memory": SimpleNamespace(used=40 * 1024),
        "sensors_battery": SimpleNamespace(power_plugged=False),
    }.items():
        monkeypatch.setattr(psutil, name, lambda found=found: found, raising=False)
    for name, text in {
        "proc/stat": STAT,
        "proc/cpuinfo": "cpu MHz\t\t: 2596.1\nflags\t\t: fpu hypervisor sse\n",
        "proc/self/cgroup": "0::/box/job\n",
        "sys/fs/cgroup/box/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/box/cpu.stat": "usage_usec 5\nnr_throttled 3\nthrottled_usec 1234\n",
        "sys/fs/cgroup/box/job/cpu.max": "max 100000\n",
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
        f"{CPU}/cpu2/cpufreq/scaling_governor": "userspace\n",
        f"{CPU}/smt/active": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }.items():
        put(tmp_path, name, text)
    return tmp_path


@pytest.mark.parametrize(("busy", "cpu"), [(0, 1), (1, 0), (None, 1)])
def test_the_cpu_to_be_pinned_to_worked_least_or_is_the_last(machine, monkeypatch, busy, cpu):
    rows = STAT.splitlines()

    def work(_: float) -> None:
        grown = [
            f"cpu{i} {150 if i == busy else 100} {rest}"
            for i, rest in enumerate(("0 50 800 10 0 0 40 7 7", "0 50 820 10 0 0 20 7 7"))
            if busy is not None
        ]
        put(machine, "proc/stat", "\n".join([rows[0], *(grown or rows[1:3])]))

    monkeypatch.setattr("time.sleep", work)
    assert host.idlest_cpu(root=machine) == cpu
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1}, raising=False)
    assert host.idlest_cpu(root=machine) is None
    assert host.cell_facts(machine)["pinned_cpu"] == "1"


V1 = "limit_in_bytes", "usage_in_bytes", "total_inactive_file", "4:memory:/box/job\n1:cpu:/x\n"
V2 = "max", "current", "inactive_file", "0::/box/job\n"
NO_LIMIT = {"max": "max", "limit_in_bytes": str(2**63 - 4096)}


@pytest.mark.parametrize(("version", "mount"), [(V1, "memory/"), (V2, ""), (V2, "unified/")])
@pytest.mark.parametrize(("outer", "inner", "left"), [
    ("1000", "600", 600 - 450 + 50), ("500", "900", 500 - 480 + 70), ("400", "none", 0),
    ("none", "none", None),
])  # fmt: skip
def test_memory_that_the_groups_leave_is_the_least_less_what_is_dropped_first(
    tmp_path, version, mount, outer, inner, left
):
    """Of the process's own group and all above it; a use beyond the limit leaves nothing."""
    limit, used, dropped, groups = version
    put(tmp_path, "proc/self/cgroup", groups)
    box = f"sys/fs/cgroup/{mount}box"
    for folder, most, now, files in ((box, outer, 480, 70), (f"{box}/job", inner, 450, 50)):
        put(
            tmp_path,
            f"{folder}/memory.{limit}",
            (NO_LIMIT | {"none": NO_LIMIT[limit]}).get(most, most),
        )
        put(tmp_path, f"{folder}/memory.{used}", f"{now}\n")
        put(tmp_path, f"{folder}/memory.stat", f"anon 7\n{dropped} {files}\ngarbled\n")
    found = host.memory_left(tmp_path)
    assert found == left or (left is None and (found is None or found > 2**60))


@pytest.mark.parametrize(("outer", "inner"), [(150_000, 300_000), (300_000, 150_000)])
def test_of_nested_quotas_the_tightest_counts(tmp_path, outer, inner):
    put(tmp_path, "proc/self/cgroup", "0::/box/job\n")
    put(tmp_path, "sys/fs/cgroup/box/cpu.max", f"{outer} 100000\n")
    put(tmp_path, "sys/fs/cgroup/box/job/cpu.max", f"{inner} 100000\n")
    assert host.cpu_quota(tmp_path) == 1.5


def test_a_refused_affinity_is_unknown_and_the_cores_are_those_of_the_machine(monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_getaffinity", refuse, raising=False)
    assert host.affinity() is None
    found = facts.environment("cpu")
    assert (found["cores"], found["affinity"]) == (os.cpu_count(), None)
    json.dumps(found)


# How glibc hands memory to workers: the same in each, said, and never over the user's choice.


@pytest.mark.parametrize("policy", list(host.MALLOC_VARIABLES))
def test_a_worker_tells_its_allocator_policy_and_never_overrides_the_users(policy, monkeypatch):
    for name in ("LD_PRELOAD", *(x for v in host.MALLOC_VARIABLES.values() for x in v)):
        monkeypatch.delenv(name, raising=False)
    wanted = environment_of(Settings(allocator=policy))
    assert host.allocator_variables({}, policy).items() <= wanted.items()
    for name, value in host.allocator_variables({}, policy).items():
        monkeypatch.setenv(name, value)
    assert facts.environment("cpu")["allocator"] == host.allocator_policy() == policy
    for variable in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "LD_PRELOAD"):
        assert host.allocator_variables({variable: "1"}, policy) == {}
        with monkeypatch.context() as users:
            users.setenv(variable, "1")
            assert host.allocator_policy() == "as set by the user"


def test_a_machine_whose_memory_differs_by_a_page_is_the_same_one():
    bytes_ = int(23.55 * 2**30)  # printed as 23.5 GiB, a page more as 23.6
    here = {"device": "cpu", "device_name": "x", "memory_bytes": bytes_}
    page, other = (Environment(here | {"memory_bytes": n}) for n in (bytes_ + 4096, 24 << 30))
    assert Environment(here).same_machine(page)
    assert not Environment(here).same_machine(other)
