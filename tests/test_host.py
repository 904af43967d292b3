"""Facts of the host: from a folder that stands in for the root of the system, and a fake psutil."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from attnbench.execution.process import Settings, environment_of
from attnbench.machine import facts, host
from attnbench.measure import clock

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
    clocks = [SimpleNamespace(current=mhz, max=4100.0) for mhz in (2596.1, 2700.5)]
    monkeypatch.setattr(psutil, "cpu_freq", lambda percpu: clocks, raising=False)
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
        f"{CPU}/intel_pstate/no_turbo": "0\n",
        f"{CPU}/smt/active": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }.items():
        put(tmp_path, name, text)
    return tmp_path


def test_every_fact_is_read_from_where_linux_keeps_it(machine):
    found = host.facts(machine)
    expected = {
        "load_1m": 2.12,
        "mhz": 2700.5,
        "max_mhz": 4100.0,
        "hypervisor": True,
        "swap_used_bytes": 40 * 1024,
        "cpu_quota": 1.5,
        "throttled_us": 1234,
        "governor": "performance, powersave",
        "turbo": True,
        "smt": True,
        "thp": "madvise",
        "on_battery": True,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("busy", "cpu"), [(0, 1), (1, 0), (None, 1)])
def test_the_cpu_to_be_pinned_to_worked_least_or_is_the_last(
    machine: Path, monkeypatch: pytest.MonkeyPatch, busy: int | None, cpu: int
) -> None:
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


@pytest.mark.parametrize(
    ("cpus", "stolen"),
    # A container may number its rows anew: those that are there may be anyone's.
    [([0, 1], 30.0), (None, 360.0), ([0, 5], None)],
)
def test_steal_is_that_of_the_cpus_of_this_process_as_a_mean_over_them(
    machine, monkeypatch, cpus, stolen
):
    monkeypatch.setattr(host, "affinity", lambda: cpus)
    assert host.stolen_ticks(machine) == stolen


def test_the_facts_beside_a_cell_are_those_of_the_machine_and_follow_its_changes(machine):
    found = {"load_1m": 2.12, "governor": "performance, powersave", "cpu_quota": 1.5}
    assert host.cell_facts(machine) == found
    put(machine, f"{CPU}/cpu0/cpufreq/scaling_governor", "performance\n")
    put(machine, "sys/fs/cgroup/box/cpu.max", "50000 100000\n")
    assert host.cell_facts(machine) == found | {"governor": "performance", "cpu_quota": 0.5}


@pytest.mark.parametrize(
    ("garbled", "text"),
    [("", ""), ("level", ""), ("type", "Instruction"), ("size", "large"), ("size", "-1K")],
)
def test_a_cache_has_the_size_it_is_written_with_or_is_left_out_where_garbled(
    tmp_path, garbled, text
):
    written = {"level": "3", "type": "Unified", "size": "96M", "shared_cpu_list": "0-3"}
    for name, value in (written | ({garbled: text} if garbled else {})).items():
        put(tmp_path, f"{CPU}/cpu3/cache/index3/{name}", value + "\n")
    assert host.data_caches(3, tmp_path) == ({} if garbled else {3: ("0-3", 96 << 20)})


FILED = "governor turbo smt hypervisor cpu_quota throttled_us thp".split()


@pytest.mark.parametrize("error", [NotImplementedError, psutil.AccessDenied, AttributeError])
def test_what_psutil_does_not_tell_is_unknown(machine, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    for name in ("getloadavg", "cpu_freq", "swap_memory", "sensors_battery"):
        monkeypatch.setattr(psutil, name, refuse)
    found = host.facts(machine)
    names = ("load_1m", "mhz", "max_mhz", "swap_used_bytes", "on_battery")
    assert {found[name] for name in names} == {None}
    assert found["cpu_quota"] == 1.5


GARBAGE = [b"", b"\n\n", b"x y z", b"cpu a b c d e f g h", b"nan", b"::", b"0::\xff\x00/\xfe\n"]


@pytest.mark.parametrize("garbage", [*GARBAGE, None])
def test_files_that_are_garbled_or_cannot_be_read_leave_their_facts_unknown(
    machine, monkeypatch, garbage
):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    if garbage is None:
        monkeypatch.setattr(Path, "read_text", refuse)
    for file in machine.rglob("*"):
        if garbage is not None and file.is_file() and "governor" not in file.name:
            file.write_bytes(garbage)
    found = host.facts(machine)
    json.dumps(found)
    assert {found[name] for name in FILED if garbage is None or name != "governor"} == {None}


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_and_throttling_are_read_from_groups_of_version_1(tmp_path, mount):
    group = f"sys/fs/cgroup/{mount}/docker/abc"
    put(tmp_path, "proc/self/cgroup", f"5:memory:/elsewhere\n4:{mount}:/docker/abc\n0::/\n")
    put(tmp_path, f"{group}/cpu.cfs_quota_us", "250000\n")
    put(tmp_path, f"{group}/cpu.cfs_period_us", "100000\n")
    put(tmp_path, f"{group}/cpu.stat", "nr_throttled 2\nthrottled_time 5000999\n")
    assert host.cpu_quota(tmp_path) == 2.5
    assert host.throttled_us(tmp_path) == 5000


@pytest.mark.parametrize(("quota_us", "cpus"), [("50000", 0.5), ("-1", None)])
def test_a_container_that_names_the_hosts_group_finds_its_own_at_the_root(tmp_path, quota_us, cpus):
    put(tmp_path, "proc/self/cgroup", "4:cpu:/docker/not-here\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota_us)
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert host.cpu_quota(tmp_path) == cpus


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


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbled_files_of_memory_limit_nothing(tmp_path, garbage):
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    for name in ("max", "current", "stat"):
        put(tmp_path, f"sys/fs/cgroup/memory.{name}", "")
        (tmp_path / f"sys/fs/cgroup/memory.{name}").write_bytes(garbage)
    assert host.memory_left(tmp_path) is None


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


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, of which two and two share a last cache."""
    for cpu, group, last in (
        (0, "0-1", "8M"),
        (1, "0-1", "8M"),
        (2, "2-3", "96M"),
        (3, "2-3", "96M"),
    ):
        for level, size, shared in ((1, "48K", str(cpu)), (3, last, group)):
            written = {"level": str(level), "type": "Unified", "size": size}
            for name, text in (written | {"shared_cpu_list": shared}).items():
                put(tmp_path, f"{CPU}/cpu{cpu}/cache/index{level}/{name}", text)
    monkeypatch.setattr(host, "data_caches", functools.partial(host.data_caches, root=tmp_path))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("affinity", "summed"), [([0, 1, 2, 3], 104), ([2, 3], 96), ([1], 8), (None, 8), ([9], None)]
)
def test_last_caches_are_added_up_over_groups_of_cores_and_counted_once_in_one(
    monkeypatch, affinity, summed
):
    monkeypatch.setattr(host, "affinity", lambda: affinity)
    assert facts.last_cache_bytes("cpu") == (summed and summed << 20)
    if affinity == [2, 3]:
        assert facts.environment("cpu")["caches"] == {"L1": 48 << 10, "L3": 96 << 20}
    if summed is None:
        assert clock.Flush("cpu").nbytes >= 64 << 20


def test_ranges_are_written_as_the_kernel_does():
    assert [host.ranges(x) for x in ([0, 1, 2, 3, 8], [5], [])] == ["0-3,8", "5", ""]


def test_only_variables_that_matter_are_kept(monkeypatch):
    monkeypatch.setattr(
        "os.environ", {"OMP_NUM_THREADS": "4", "HOME": "/", "MALLOC_ARENA_MAX": "1"}
    )
    assert host.thread_env() == {"OMP_NUM_THREADS": "4", "MALLOC_ARENA_MAX": "1"}


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
