"""The comparison: pilots, then run after run of every tool in random order, each line kept."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from attnbench.errors import UsageError
from tests.validation.timer.launch import Ended, Launch, Share, run_process
from tests.validation.timer.programs import PROGRAMS, READINGS, Program
from tests.validation.timer.raw import Raw

SAMPLES = "samples.jsonl"
_PILOT_EACH_S = 0.01
# Less than this for each cell measures nothing.
LEAST_EACH_S = 0.02
_MOST_STRETCHED = 4.0
_DIGITS = 7  # of a time in microseconds: more than any clock gives

Tell = Callable[[str], None]
Process = Callable[[Program, Launch, Share, int], Ended]


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """What starting and ending one process takes, and how to make it use its budget.

    `stretch` multiplies the seconds a tool is told to spend on each cell, where it spends less.
    """

    startup_s: float
    tail_s: float
    stretch: float = 1.0

    @property
    def overhead_s(self) -> float:
        """Seconds of a process that time nothing."""
        return self.startup_s + self.tail_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one program: raw samples by cell, one for each process; or why there are none."""

    program: str
    run: int
    total_s: float = 0.0
    startup_s: float = 0.0
    failure: str | None = None
    cells: dict[str, list[Raw]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Experiment:
    """Runs the programs and writes `samples.jsonl`; what became of it is in the fields.

    `refused` says why a program takes no part. `run_process` is what starts one.
    """

    launch: Launch
    budget_s: float
    runs: int
    seed: int = 0
    tell: Tell = lambda message: None
    run_process: Process = run_process
    programs: tuple[str, ...] = ()
    pilots: dict[str, Pilot] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False

    def __post_init__(self) -> None:
        names = self.programs or tuple(PROGRAMS.names())
        self.programs = tuple(n for n in names if self.launch.device in PROGRAMS.get(n).devices)

    def pilot(self) -> None:
        """Start every tool once, to know what that takes; one that cannot run is `refused`.

        Raises:
            UsageError: the budget is too small for our own timing.
        """
        for name in self.programs:
            program = PROGRAMS.get(name)
            twin = next((n for n in self.pilots if PROGRAMS.get(n).start is program.start), None)
            self.tell(f"pilot of {name}")
            found = self.pilots[twin] if twin else self._piloted(program)
            if isinstance(found, Pilot):
                found = self._afforded(name, program, found)
            if isinstance(found, Pilot):
                self.pilots[name] = found
            else:
                self.refused[name] = found
                self.tell(f"{name} takes no part: {found}")

    def run(self, path: Path) -> None:
        """Make the runs and append each line to `path`; an interrupt ends them and is noted."""
        with path.open("a", encoding="utf-8") as file:
            try:
                for outcome, lines in self._runs():
                    for line in lines:
                        file.write(json.dumps(line) + "\n")
                    file.flush()
                    self.outcomes.append(outcome)
            except KeyboardInterrupt:
                self.interrupted = True

    def _runs(self) -> Iterator[tuple[Outcome, list[dict[str, Any]]]]:
        order = random.Random(self.seed)
        for number in range(1, self.runs + 1):
            names = list(self.pilots)
            order.shuffle(names)
            self.tell(f"run {number} of {self.runs}: {', '.join(names)}")
            for name in names:
                yield self._once(name, number)

    def _piloted(self, program: Program) -> Pilot | str:
        ended = self.run_process(
            program, self.launch, Share(budget_s=0.0, each_s=_PILOT_EACH_S), self.seed
        )
        if ended.failure:
            return ended.failure
        pilot = Pilot(startup_s=ended.startup_s, tail_s=ended.tail_s)
        each_s = self._each_s(pilot)
        if not program.knows_no_budget or each_s < LEAST_EACH_S:
            return pilot
        # It is told seconds for each cell, and derives a number of rounds from one call: see what
        # it makes of that, so that it gets as much time as the others take.
        share = Share(budget_s=self.budget_s, each_s=each_s)
        ended = self.run_process(program, self.launch, share, self.seed)
        if ended.failure:
            return ended.failure
        known = Pilot(startup_s=ended.startup_s, tail_s=ended.tail_s)
        return replace(known, stretch=self._stretch(known, ended, damping=1.0))

    def _stretch(self, pilot: Pilot, ended: Ended, damping: float = 0.5) -> float:
        """The pilot's stretch, corrected by how much of its budget a process has used.

        The root of the ratio: one run that was disturbed moves it half way only.
        """
        wanted_s = self.budget_s - ended.startup_s - ended.tail_s
        if ended.timing_s <= 0 or wanted_s <= 0:
            return pilot.stretch
        stretch = pilot.stretch * math.pow(wanted_s / ended.timing_s, damping)
        return min(_MOST_STRETCHED, max(1 / _MOST_STRETCHED, stretch))

    def _afforded(self, name: str, program: Program, pilot: Pilot) -> Pilot | str:
        """The pilot, or why the budget does not pay for the program's processes.

        Raises:
            UsageError: it does not even pay for one process of ours.
        """
        if self._each_s(pilot, program.processes) >= LEAST_EACH_S:
            return pilot
        needed_s = program.processes * (pilot.overhead_s + LEAST_EACH_S * len(self.launch.cells))
        reason = (
            f"--budget {self.budget_s:g} is too small: starting and ending a process of {name}"
            f" took {pilot.overhead_s:.2f} s, {program.processes} of them and"
            f" {len(self.launch.cells)} cells need {needed_s:.1f} s"
        )
        if program.ours and program.processes == 1:
            raise UsageError(reason)
        return reason

    def _each_s(self, pilot: Pilot, processes: int = 1) -> float:
        left_s = self.budget_s / processes - pilot.overhead_s
        return left_s * pilot.stretch / len(self.launch.cells)

    def _once(self, name: str, number: int) -> tuple[Outcome, list[dict[str, Any]]]:
        program, pilot = PROGRAMS.get(name), self.pilots[name]
        share = Share(
            budget_s=self.budget_s / program.processes,
            tail_s=pilot.tail_s,
            each_s=self._each_s(pilot, program.processes),
        )
        ends = []
        for process in range(program.processes):
            seed = self.seed + 1000 * number + process
            ended = self.run_process(program, self.launch, share, seed)
            ends.append(ended)
            if ended.failure:
                break
        failure = next((ended.failure for ended in ends if ended.failure), None)
        self.facts.setdefault(name, {} if failure else ends[-1].facts)
        outcome = Outcome(
            program=name, run=number, total_s=sum(ended.total_s for ended in ends), failure=failure
        )
        if failure:
            self.tell(f"{name} failed in run {number}: {failure}")
            return outcome, [{"program": name, "run": number, "failure": failure}]
        if program.knows_no_budget:
            self.pilots[name] = replace(pilot, stretch=self._stretch(pilot, ends[-1]))
        return _gathered(outcome, ends, [cell["name"] for cell in self.launch.cells])


def _gathered(
    outcome: Outcome, ends: list[Ended], names: list[str]
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome with its cells, and the lines that keep them."""
    cells: dict[str, list[Raw]] = {}
    errors: dict[str, str] = {}
    lines: list[dict[str, Any]] = []
    head = {"program": outcome.program, "run": outcome.run, "total_s": round(outcome.total_s, 4)}
    for name in names:
        rows = [_process_row(ended, name) for ended in ends]
        error = next((row["error"] for row in rows if "error" in row), None)
        line: dict[str, Any] = head | {"cell": name}
        if error is not None:
            errors[name] = error
            lines.append(line | {"error": error})
            continue
        cells[name] = [Raw.of(row) for row in rows]
        reported = {
            reading.label: round(reading.reported_us(cells[name]), _DIGITS)
            for reading in READINGS
            if reading.program == outcome.program
        }
        lines.append(line | {"reported_us": reported, "processes": rows})
    startup_s = median(ended.startup_s for ended in ends)
    return replace(outcome, cells=cells, errors=errors, startup_s=startup_s), lines


def _rounded(time_us: float) -> float:
    return float(f"{time_us:.{_DIGITS}g}")


def _process_row(ended: Ended, name: str) -> dict[str, Any]:
    found = ended.cells.get(name)
    if found is None:
        return {"error": f"no result for it ({ended.facts.get('ended', 'no reason given')})"}
    if "error" in found:
        return {"error": found["error"]}
    kept = len(found["times_us"]) - len(found.get("dropped", ()))
    if not kept:
        return {"error": "no sample that counts"}
    row = found | {
        "startup_s": round(ended.startup_s, 4),
        "total_s": round(ended.total_s, 4),
        "times_us": [_rounded(time_us) for time_us in found["times_us"]],
    }
    if "ended_s" in found:
        row["ended_s"] = [round(seconds, 4) for seconds in found["ended_s"]]
    if "turns_us" in found:
        row["turns_us"] = [[_rounded(us) for us in turn] for turn in found["turns_us"]]
    return row
