"""The timing tools that are compared, one row each, and what is read off their samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnbench.base.registry import Registry
from attnbench.base.stats import fastest_of_windows, median
from tests.validation.timer.raw import Raw, Result, read_own, read_pytest

JOB_VARIABLE = "ATTNBENCH_TIMER_JOB"
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command line, and the variables it needs beside the environment."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something that times all cells within a budget, in `processes` fresh processes a run.

    `start(job, folder, each_s)` says how: the job as JSON, an empty folder for its files, and the
    seconds for each cell, which matter where it `knows_no_budget` and must be told.
    """

    start: Callable[[str, Path, float], Start]
    read: Callable[[Path], Result] = read_own
    ours: bool = False
    processes: int = 1
    knows_no_budget: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")


def _module(name: str) -> Callable[[str, Path, float], Start]:
    # -P: a file called torch.py in the user's folder must not become torch.
    command = [sys.executable, "-P", "-m", f"tests.validation.timer.tools.{name}"]
    return lambda job, folder, each_s: Start(command=[*command, job])


_TEST_FILE = (
    "from tests.validation.timer.tools.pytest_cells import pytest_generate_tests, test_cell\n"
)
_INI_FILE = "[pytest]\n"


def _pytest(job: str, folder: Path, each_s: float) -> Start:
    """A folder with a test file and settings of its own: nobody's options reach it."""
    test, ini = folder / "test_cells.py", folder / "pytest.ini"
    test.write_text(_TEST_FILE)
    ini.write_text(_INI_FILE)
    options = ["-q", "-c", str(ini), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    benchmark = [
        "--benchmark-only",
        f"--benchmark-json={folder / RESULT}",
        f"--benchmark-max-time={each_s:.6f}",
        "--benchmark-min-rounds=5",
        f"--benchmark-storage=file://{folder}",
    ]
    return Start(
        command=[sys.executable, "-P", "-m", "pytest", str(test), *options, *benchmark],
        variables={JOB_VARIABLE: job, "PYTEST_ADDOPTS": ""},
    )


_ours = _module("ours")

PROGRAMS: Registry[Program] = Registry("timing tool")
PROGRAMS.add("attnbench", Program(start=_ours, ours=True))
PROGRAMS.add("attnbench-3", Program(start=_ours, ours=True, processes=3))
PROGRAMS.add(
    "pytest-benchmark", Program(start=_pytest, read=read_pytest, knows_no_budget=True)
)  # fmt: skip
PROGRAMS.add("blocked-autorange", Program(start=_module("autorange")))
PROGRAMS.add("do-bench", Program(start=_module("dobench"), devices=("cuda",)))


# From times in µs to one time.
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One row of the comparison: a program, and the statistic taken as the reported time.

    `own` names the statistic in what the tool itself reports, where it does.
    """

    label: str
    program: str
    statistic: Statistic
    own: str | None = None

    @property
    def ours(self) -> bool:
        """True for attnbench's."""
        return PROGRAMS.get(self.program).ours

    def of(self, raw: Raw) -> float:
        """The time (µs) reported from one process."""
        return raw.own_us[self.own] if self.own else self.of_first(raw, len(raw.times_us))

    def of_first(self, raw: Raw, count: int) -> float:
        """What it would be (µs) of the first `count` samples."""
        return self.statistic(fastest_of_windows(raw.times_us[:count], raw.window))

    def reported_us(self, raws: Sequence[Raw]) -> float:
        """The time (µs) reported from a run: the median over its processes."""
        return median([self.of(raw) for raw in raws])


def _row(label: str, program: str, statistic: Statistic, own: str | None = None) -> Reading:
    return Reading(label=label, program=program, statistic=statistic, own=own)


READINGS: tuple[Reading, ...] = (
    _row("attnbench", "attnbench", median),
    _row("attnbench --processes 3", "attnbench-3", median),
    _row("pytest-benchmark min", "pytest-benchmark", min, own="min"),
    _row("pytest-benchmark median", "pytest-benchmark", median, own="median"),
    _row("torch blocked_autorange", "blocked-autorange", median, own="median"),
    _row("triton do_bench", "do-bench", median, own="median"),
)
