"""What `attnbench doctor` makes of a diagnosis: findings, verdict, exit code, output."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from attnbench.analysis import doctor
from attnbench.execution.runner import LocalRunner
from attnbench.report.document import Document
from attnbench.report.documents.doctor import document
from attnbench.report.render import written
from attnbench.schema import messages
from tests.conftest import Cli, yielding

Diagnosis = dict[str, Any]

FIT: Diagnosis = {
    "facts": {
        "device": "cpu", "device_name": "A processor", "torch": "2.13.0", "python": "3.11.7",
        "blas": "MKL 2024.2", "matmul_precision": "highest", "threads": 4, "system": "Linux",
        "architecture": "x86_64", "cpus": 8, "affinity": [0, 1, 2, 3, 4, 5, 6, 7], "load_1m": 0.3,
        "governor": "performance", "mhz": 2500.0, "max_mhz": 3000.0, "turbo": False, "smt": False,
        "hypervisor": False, "cpu_quota": None, "thp": "madvise", "swap_used_bytes": 0,
        "on_battery": None, "thread_env": {},
    },
    "gpu": None,
    "meanwhile": {"wall_s": 16.2, "steal_share": 0.0, "throttled_us": 0},
    "tests": {
        "clock": {
            "claimed_us": 0.001, "seen_us": 0.001, "block_us": 0.2, "call_us": 0.03, "negative": 0,
        },
        "cold": {"cold_us": 30.0, "warm_us": 6.0, "ratio": 5.0, "low": 4.8, "high": 5.2},
        "planted": {
            "slowed": {"ratio": 1.0499, "low": 1.048, "high": 1.051, "rounds": 500},
            "twin": {"ratio": 1.0001, "low": 0.999, "high": 1.001, "rounds": 500},
        },
        "noise": {
            "width": 0.002, "median_us": 170.0, "samples": 7000, "discarded": 12,
        },
    },
}  # fmt: skip
_HALF = "flash: Expected query, key and value to all be of dtype: {Half, BFloat16}"
_TRIED: tuple[tuple[str, str | None, str | None], ...] = (
    ("sdpa-flash", "bfloat16", None), ("sdpa-flash", "float16", None),
    ("sdpa-flash", "float32", _HALF), ("Triton and a C compiler", None, "there is no cc"),
    ("CUDA graphs", None, None),
)  # fmt: skip
GPU: dict[str, Any] = {
    "capability": "9.0", "processors": 132, "l2_bytes": 50 << 20, "driver": "570.86.10",
    "memory_free_bytes": 70 << 30, "memory_total_bytes": 80 << 30, "cudnn": 91002,
    "problem": None, "sm_mhz": 1980.0, "power_w": 400.0, "temperature_c": 60.0,
    "throttle": ["idle", "power cap"], "other_processes": 0,
    "compute_mode": "default", "mig": False, "energy_counter": True,
    "works": [
        {"name": name, "dtype": dtype, "works": reason is None, "reason": reason}
        for name, dtype, reason in _TRIED
    ],
}  # fmt: skip


def changed(**changes: Any) -> Diagnosis:
    """The diagnosis of a fit machine, but for some values: `{"facts.load_1m": 9.0}`."""
    diagnosis = copy.deepcopy(FIT)
    for path, value in changes.items():
        *rooms, last = path.split(".")
        room = diagnosis
        for name in rooms:
            room = room[name]
        room[last] = value
    return diagnosis


def found(diagnosis: Diagnosis) -> dict[str, str]:
    """The names of what is not ok, with how bad it is."""
    return {f.name: f.level for f in doctor.judge(diagnosis) if f.level != "ok"}


def examined(diagnosis: Diagnosis) -> Document:
    return document(diagnosis, doctor.judge(diagnosis))


UNFIT: dict[str, dict[str, Any]] = {
    "clock resolution": {"tests.clock.seen_us": 1.5},
    "cold told from warm": {"tests.cold.low": 1.04},
    "slowdown of 5 % seen": {"tests.planted.slowed.low": 0.999},
    "identical work alike": {"tests.planted.twin.low": 1.011, "tests.planted.twin.high": 1.02},
    "noise in 10 s": {"tests.noise.width": 0.21},
}


@pytest.mark.parametrize("name", UNFIT)
def test_each_self_test_that_fails_makes_the_machine_unfit(name):
    diagnosis = changed(**UNFIT[name])
    examination = examined(diagnosis)
    assert examination.exit_code == 4
    text = written.conclusion(examination.conclusion)
    assert text.startswith(f"✗ not fit to measure: {name}, ")
    assert all(f.remedy for f in doctor.judge(diagnosis) if f.level == "fail")


NO_RATIO = dict.fromkeys(("ratio", "low", "high"))
UNFIT_TOO: tuple[tuple[str | None, dict[str, Any]], ...] = (  # None: what just meets its limit
    (None, {"tests.clock.seen_us": 1.0}),
    (None, {"tests.cold.low": 1.06}),
    (None, {"tests.planted.slowed.low": 1.001, "tests.planted.slowed.high": 1.031}),
    (None, {"tests.planted.twin.low": 1.009, "tests.planted.twin.high": 1.02}),
    (None, {"tests.noise.width": 0.05}),
    (None, {"gpu": GPU}),
    ("clock resolution", {"tests.clock.seen_us": None}),
    ("clock resolution", {"tests.clock.negative": 2}),
    ("cold told from warm", {f"tests.cold.{name}": None for name in NO_RATIO}),
    ("slowdown of 5 % seen", {"tests.planted.slowed": NO_RATIO | {"rounds": 3}}),
    ("slowdown of 5 % seen", {"tests.planted.slowed.low": 0.93, "tests.planted.slowed.high": 0.97}),
    ("slowdown of 5 % seen", {"tests.planted.slowed.low": 1.09, "tests.planted.slowed.high": 1.12}),
    ("noise in 10 s", {"tests.noise.width": None}),
    (None, {"tests.launch": {"flush_us": 40.0, "enqueue_us": 90.0, "hidden_us": 85.0}}),
)


@pytest.mark.parametrize(("name", "changes"), UNFIT_TOO)
def test_a_limit_may_just_be_met_and_a_figure_that_is_missing_or_absurd_is_not_passed(
    name, changes
):
    assert found(changed(**changes)) == ({name: "fail"} if name else {})


@pytest.mark.parametrize(
    ("device", "seen_us", "level"),
    [("cpu", 1.024, "fail"), ("cuda", 1.024, "ok"), ("cuda", 2.048, "fail")],
)
def test_events_may_tick_in_1024_ns_and_no_coarser(device, seen_us, level):
    on = {"facts.device": device, "facts.device_name": "A GPU", "gpu": GPU}
    diagnosis = changed(**on, **{"tests.clock.seen_us": seen_us})
    assert found(diagnosis).get("clock resolution", "ok") == level


def test_a_test_that_could_not_run_is_not_passed():
    diagnosis = changed(**{"tests.cold": {"raised": "MemoryError: 4 GiB"}})
    assert found(diagnosis) == {"cold": "fail"}
    assert "could not run: MemoryError: 4 GiB" in [f.fact for f in doctor.judge(diagnosis)]


AMISS: dict[str, tuple[dict[str, Any], str, str]] = {
    "load": ({"facts.load_1m": 2.1}, "load 2.10 on 8 CPUs", "close what else runs"),
    "governor": ({"facts.governor": "powersave"}, "powersave", "cpupower"),
    "CPU quota": ({"facts.cpu_quota": 1.5}, "quota of 1.5 for 4 threads", "--threads 1"),
    "throttling": ({"meanwhile.throttled_us": 2000}, "withheld 2.00 ms", "quota"),
    "threads": ({"facts.affinity": [0, 1]}, "4 threads on 2 CPUs", "--threads 2"),
    "SMT": ({"facts.smt": True, "facts.affinity": [0, 1, 2, 3]}, "share cores", "--threads 2"),
    "steal": ({"meanwhile.steal_share": 0.02}, "2.0 %", "--processes"),
    "virtual machine": ({"facts.hypervisor": True}, "neighbours", "interleaved ratios"),
    "swap": ({"facts.swap_used_bytes": 1 << 20}, "1.0 MiB", "swapoff"),
    "huge pages": ({"facts.thp": "always"}, "always", "madvise"),
    "battery": ({"facts.on_battery": True}, "battery", "plug"),
    "thread variables": (
        {"facts.thread_env": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "4"}},
        "OMP_NUM_THREADS=2, but 4 threads compute",
        "unset OMP_NUM_THREADS",
    ),
    "NVML": ({"gpu": GPU | {"problem": "NVML: no driver"}}, "NVML: no driver", "unseen"),
    "GPU clock": ({"gpu": GPU | {"throttle": ["idle", "thermal"]}}, "held down: thermal", "cool"),
    "GPU temperature": ({"gpu": GPU | {"temperature_c": 85.0}}, "85 °C", "cool"),
    "GPU shared": ({"gpu": GPU | {"other_processes": 1}}, "1 other process on", "nvidia-smi"),
    "compute mode": (
        {"gpu": GPU | {"compute_mode": "prohibited"}},
        "prohibited",
        "nvidia-smi -c DEFAULT",
    ),
    "clock overhead": ({"tests.clock.call_us": 1.5}, "1.50 µs a call", "larger cases"),
    "launch hidden": (
        {"tests.launch": {"flush_us": 40.0, "enqueue_us": 90.0, "hidden_us": 40.0}},
        "40.0 µs of 90.0 µs",
        "--timer graph",
    ),
    "noise in 10 s": ({"tests.noise.width": 0.06}, "± 6.00 %", "close what else runs"),
}


@pytest.mark.parametrize("name", AMISS)
def test_what_is_amiss_warns_with_fact_number_and_remedy_and_never_fails(name):
    changes, fact, remedy = AMISS[name]
    diagnosis = changed(**changes)
    (finding,) = [f for f in doctor.judge(diagnosis) if f.level != "ok"]
    assert (finding.name, finding.level) == (name, "warning")
    assert fact in finding.fact
    assert remedy in str(finding.remedy)
    assert "\n" not in f"{finding.fact}{finding.remedy}"
    examination = examined(diagnosis)
    assert examination.exit_code == 0
    assert written.conclusion(examination.conclusion) == "✓ fit to measure: 1 warning"


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Diagnosis], None]:
    """No worker is started: the runner has this diagnosis."""

    def use(diagnosis: Diagnosis) -> None:
        tests = map(messages.Testing, diagnosis["tests"])
        found = copy.deepcopy(diagnosis)
        monkeypatch.setattr(LocalRunner, "catalogue", lambda runner: {})
        monkeypatch.setattr(LocalRunner, "diagnose", lambda runner: yielding(found, *tests))

    monkeypatch.setattr("attnbench.machine.host.thread_env", dict)
    return use


def test_a_gpu_is_shown_with_what_works_on_it_on_one_page_of_80_columns(
    cli: Cli, diagnosed, monkeypatch
):
    on = {
        "facts.device": "cuda", "facts.device_name": "NVIDIA H100 80GB HBM3", "facts.cuda": "12.8",
    }  # fmt: skip
    launch = {"flush_us": 40.0, "enqueue_us": 90.0, "hidden_us": 90.0}
    nvml = {"problem": "NVML: no energy_mj (Not Supported)", "energy_counter": False}
    diagnosed(changed(**on, **{"tests.launch": launch}, gpu=GPU | nvml))
    monkeypatch.setenv("COLUMNS", "80")
    page = cli("doctor").stdout
    words = [" ".join(line.split()) for line in page.splitlines()]
    for line in (
        "compute capability: 9.0",
        "L2 cache: 50.0 MiB",
        "free memory: 70.0 GiB",
        "✗ no NVML NVML: no energy_mj (Not Supported)",
        "✗ no energy counter none",
        "✓ yes sdpa-flash bfloat16, float16",
        "✗ no sdpa-flash float32: flash: Expected query, key and value",
        "✗ no Triton and a C compiler there is no cc",
        "✓ yes CUDA graphs",
    ):
        assert line in words, page
    assert max(map(len, page.splitlines())) <= 80
    assert len(words) <= 60


def test_json_is_one_object_with_facts_tests_findings_and_the_verdict(cli: Cli, diagnosed):
    diagnosed(changed(**{"facts.load_1m": 9.0}))
    result = cli("doctor", "--json", "--device", "cpu", "--threads", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert (told["conclusion"]["verdict"], told["exit_code"]) == ("fit to measure", 0)
    tests, advice, facts = (section["parts"] for section in told["sections"])
    assert "clock resolution" in [row["test"] for row in tests[0]["table"]]
    assert [(found["subject"], found["verdict"]) for found in advice] == [("load", "warning")]
    assert facts[0]["load_1m"] == 9.0
    assert facts[1]["clock, seen_us"]["value"] == FIT["tests"]["clock"]["seen_us"]
