"""Facts of the host: read from a folder that stands in for the root of the system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.machine import host

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
    for name, text in {
        "proc/loadavg": "2.12 1.58 1.16 3/96 7126\n",
        "proc/stat": STAT,
        "proc/cpuinfo": "cpu MHz\t\t: 2596.1\nflags\t\t: fpu hypervisor sse\ncpu MHz\t: 2700.5\n",
        "proc/meminfo": "MemTotal: 8 kB\nSwapTotal:     100 kB\nSwapFree:    60 kB\n",
        "proc/self/cgroup": "0::/box/job\n",
        "sys/fs/cgroup/box/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/box/cpu.stat": "usage_usec 5\nnr_throttled 3\nthrottled_usec 1234\n",
        "sys/fs/cgroup/box/job/cpu.max": "max 100000\n",
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
        f"{CPU}/cpu2/cpufreq/scaling_governor": "userspace\n",
        f"{CPU}/cpu0/cpufreq/cpuinfo_max_freq": "3900000\n",
        f"{CPU}/cpu1/cpufreq/cpuinfo_max_freq": "4100000\n",
        f"{CPU}/intel_pstate/no_turbo": "0\n",
        f"{CPU}/smt/active": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/class/power_supply/BAT0/type": "Battery\n",
        "sys/class/power_supply/BAT0/status": "Discharging\n",
        "sys/class/power_supply/AC/type": "Mains\n",
    }.items():
        put(tmp_path, name, text)
    return tmp_path


def test_every_fact_is_read_from_where_linux_keeps_it(machine):
    facts = host.facts(machine)
    expected = {
        "load_1m": 2.12,
        "steal_share": 0.03,
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
    assert {name: facts[name] for name in expected} == expected


def test_steal_is_that_of_the_cpus_of_this_process_as_a_mean_over_them(machine):
    assert host.stolen_ticks(machine) == 30.0
    assert host.cpu_ticks(machine) == (60, 2000)


def test_where_the_affinity_is_unknown_steal_is_that_of_every_cpu(machine, monkeypatch):
    monkeypatch.setattr(host, "affinity", lambda: None)
    assert host.stolen_ticks(machine) == 360.0


def test_a_cpu_of_this_process_without_a_row_leaves_steal_unknown(machine, monkeypatch):
    """A container may number its rows anew: those that are there may be anyone's."""
    monkeypatch.setattr(host, "affinity", lambda: [0, 5])
    assert host.stolen_ticks(machine) is None
    assert host.cpu_ticks(machine) is None


def test_the_facts_beside_a_cell_are_those_of_the_machine_and_follow_its_changes(machine):
    found = {"load_1m": 2.12, "governor": "performance, powersave", "cpu_quota": 1.5}
    assert host.cell_facts(machine) == found
    put(machine, f"{CPU}/cpu0/cpufreq/scaling_governor", "performance\n")
    put(machine, "sys/fs/cgroup/box/cpu.max", "50000 100000\n")
    put(machine, "proc/loadavg", "0.5 1.58 1.16 3/96 7126\n")
    found = {"load_1m": 0.5, "governor": "performance", "cpu_quota": 0.5}
    assert host.cell_facts(machine) == found


def test_the_facts_beside_a_cell_are_unknown_where_there_are_no_files(tmp_path):
    assert host.cell_facts(tmp_path) == dict.fromkeys(("load_1m", "governor", "cpu_quota"))


@pytest.mark.parametrize(
    ("size", "size_bytes"), [("512K", 512 << 10), ("96M", 96 << 20), ("1G", 1 << 30)]
)
def test_a_cache_has_the_size_it_is_written_with(tmp_path, size, size_bytes):
    index = f"{CPU}/cpu3/cache/index3"
    for name, text in {"level": "3", "type": "Unified", "size": size}.items():
        put(tmp_path, f"{index}/{name}", text + "\n")
    assert host.data_caches(3, tmp_path) == {3: (None, size_bytes)}
    put(tmp_path, f"{index}/shared_cpu_list", "0-3\n")
    assert host.data_caches(3, tmp_path) == {3: ("0-3", size_bytes)}


@pytest.mark.parametrize("name", ["level", "type", "size"])
@pytest.mark.parametrize("text", ["", "large", "-1K", "Instruction"])
def test_a_cache_that_is_garbled_is_left_out(tmp_path, name, text):
    for other, good in {"level": "3", "type": "Unified", "size": "32M"}.items():
        put(tmp_path, f"{CPU}/cpu0/cache/index0/{other}", text if other == name else good)
    assert host.data_caches(0, tmp_path) == {}


def from_files(facts: dict[str, object]) -> dict[str, object]:
    elsewhere = ("system", "architecture", "cpus", "affinity", "thread_env")
    return {name: value for name, value in facts.items() if name not in elsewhere}


def test_where_there_are_no_files_every_fact_is_unknown(tmp_path):
    assert set(from_files(host.facts(tmp_path)).values()) == {None}


def test_files_that_cannot_be_read_leave_their_facts_unknown(machine, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert set(from_files(host.facts(machine)).values()) == {None}


@pytest.mark.parametrize(
    "garbage", ["", "\n\n", "x y z", "cpu", "cpu a b c d e f g h", "nan", "::"]
)
def test_garbled_files_leave_their_facts_unknown_and_raise_nothing(machine, garbage):
    for file in machine.rglob("*"):
        if file.is_file() and "governor" not in file.name:
            file.write_text(garbage)
    facts = from_files(host.facts(machine))
    assert {name: v for name, v in facts.items() if name != "governor" and v is not None} == {}


def test_bytes_that_are_no_text_raise_nothing(machine):
    for file in machine.rglob("*"):
        if file.is_file():
            file.write_bytes(b"0::\xff\x00/\xfe\n")
    json.dumps(host.facts(machine))


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_and_throttling_are_read_from_groups_of_version_1(tmp_path, mount):
    group = f"sys/fs/cgroup/{mount}/docker/abc"
    put(tmp_path, "proc/self/cgroup", f"5:memory:/elsewhere\n4:{mount}:/docker/abc\n0::/\n")
    put(tmp_path, f"{group}/cpu.cfs_quota_us", "250000\n")
    put(tmp_path, f"{group}/cpu.cfs_period_us", "100000\n")
    put(tmp_path, f"{group}/cpu.stat", "nr_throttled 2\nthrottled_time 5000999\n")
    assert host.cpu_quota(tmp_path) == 2.5
    assert host.throttled_us(tmp_path) == 5000


def test_a_container_that_names_the_hosts_group_finds_its_own_at_the_root(tmp_path):
    put(tmp_path, "proc/self/cgroup", "4:cpu:/docker/not-here\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert host.cpu_quota(tmp_path) == 0.5


def test_no_quota_is_unbounded(tmp_path):
    put(tmp_path, "proc/self/cgroup", "4:cpu:/\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert host.cpu_quota(tmp_path) is None


def test_steal_between_two_readings_is_a_share_of_that_time_alone():
    assert host.steal_share((60, 1200), (40, 1000)) == 0.1
    assert host.steal_share((40, 1000), (40, 1000)) is None
    assert host.steal_share((30, 1200), (40, 1000)) == 0.0  # a counter that was set back
    assert host.steal_share(None, (40, 1000)) is None


def test_a_refused_affinity_is_unknown(monkeypatch):
    def refuse(pid):
        raise PermissionError

    monkeypatch.setattr("os.sched_getaffinity", refuse)
    assert host.affinity() is None
    assert host.ranges(host.affinity()) is None


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 3, 8], "0-3,8"), ([5], "5"), ([1, 3], "1,3"), ([], "")]
)
def test_ranges_are_written_as_the_kernel_does(numbers, text):
    assert host.ranges(numbers) == text


def test_only_variables_that_matter_are_kept(monkeypatch):
    monkeypatch.setattr(
        "os.environ", {"OMP_NUM_THREADS": "4", "HOME": "/", "MALLOC_ARENA_MAX": "1"}
    )
    assert host.thread_env() == {"OMP_NUM_THREADS": "4", "MALLOC_ARENA_MAX": "1"}


def test_this_machines_own_facts_are_plain_json():
    facts = host.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert set(facts) == set(host.facts(Path("/nowhere")))
