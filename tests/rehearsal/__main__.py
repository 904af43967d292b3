"""`make gpu-rehearsal`: all of `make gpu` on simulated GPUs; how far from the truth it comes.

The Makefile's own targets run, with their own worker processes; what stands in for torch.cuda is in
`tests.rehearsal.cuda`. Sequences are shorter by 57, while every token costs as many: values are
computed and checked on the CPU, and a kernel takes what the full size would take. Exits 1 where a
part fails, a time is not the true one, or a part would take longer than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from attnbench.analysis.times import HOST_BOUND
from attnbench.measure.clock import NEGLIGIBLE
from tests.rehearsal.hooks import SCALE
from tests.rehearsal.profiles import MIB, PROFILES

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("gpu-doctor", "gpu-test", "gpu-sweep", "gpu-report", "gpu-check")
# What is not simulated: on which stream autograd runs, and what a kernel allocates by itself.
DESELECTED = ("test_a_backward_pass_is_captured", "test_what_a_call_allocates")
SCALED = "ATTNBENCH_REHEARSAL_SCALE"
MOST_S = 240.0  # that a part may take on an H100
# The clock looks at the host's within the time to the result, and records events.
AROUND_US = 2.0
ROOM = 36 * MIB  # beside the flush: for all but the scores of naive
SIZES = ("--seq-lens", "9,72", "--heads", "16", "--head-dims", "128", "--dtypes", "bfloat16")
HOSTILE = """
import torch
from attnbench.api import attention

@attention("hangs")
def hangs(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    torch.cuda._sleep(1 << 62)
    return q_BHLD.clone()

@attention("loses-device")
def loses_device(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    torch.cuda._sleep(-1)
    return q_BHLD.clone()
"""


@dataclass
class Part:
    """What one command did: its exit status, and the seconds it would take on the simulated GPU."""

    what: str
    status: int
    simulated_s: float
    real_s: float
    problems: list[str] = field(default_factory=list)


@dataclass
class Rehearsal:
    """One profile's."""

    profile: str
    folder: Path
    few: bool
    parts: list[Part] = field(default_factory=list)
    cells: int = 0
    worst_us: float = 0.0
    launch_bound: int = 0

    def command(
        self, what: str, *command: object, faults: str = "", **variables: object
    ) -> tuple[Part, str]:
        """Run a command whose processes find the simulated GPU."""
        log = self.folder / "time"
        log.mkdir(exist_ok=True)
        before = set(log.iterdir())
        environment = os.environ | {
            "ATTNBENCH_REHEARSAL": f"{self.profile} {faults}",
            SCALED: str(SCALE),
            "ATTNBENCH_REHEARSAL_LOG": str(log),
            "PYTHONPATH": f"{ROOT / 'tests/rehearsal/site'}{os.pathsep}{ROOT}",
            **{name: str(value) for name, value in variables.items()},
        }
        if self.few:
            environment["ATTNBENCH_REHEARSAL_FEW"] = "1"
        begin = time.monotonic()
        ended = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        taken = [x for x in log.iterdir() if x not in before and x.name.startswith("time-")]
        part = Part(
            what=what,
            status=ended.returncode,
            simulated_s=sum(struct.unpack("d", x.read_bytes())[0] for x in taken),
            real_s=time.monotonic() - begin,
        )
        self.parts.append(part)
        (self.folder / f"{what}.log").write_text(ended.stdout + ended.stderr)
        return part, ended.stdout

    def sweep(self, name: str, *options: object, faults: str = "", **variables: object) -> Any:
        """A sweep of its own, and the rows it left."""
        command = (sys.executable, "-m", "attnbench", "sweep", "--device", "cuda", *options)
        part, _ = self.command(
            name, *command, "--output", self.folder, "--name", name, faults=faults, **variables
        )
        lines = (self.folder / name / "records.jsonl").read_text().splitlines()
        return part, [json.loads(line) for line in lines]

    def compare(self, part: Part, run: str) -> None:
        """Hold the times of a run against the truth; note what is off by more than a tick."""
        file = self.folder / f"{run}.truth.json"
        truth, _ = self.command(
            f"{run}-truth", sys.executable, "-m", "tests.rehearsal.truth", self.folder / run, file
        )
        self.parts.remove(truth)
        if truth.status:
            part.problems.append(f"its truth could not be found: exit {truth.status}")
            return
        for row in json.loads(file.read_text()):
            part.problems += self._off(row)

    def _off(self, row: dict[str, Any]) -> Iterator[str]:
        tick_us = PROFILES[self.profile].tick_us
        time_us, e2e_us = median(row["samples_us"]), median(row["e2e_us"])
        issued_us = median(row["enqueue_us"])
        self.cells += 1
        where = f"{row['impl']} {row['case'].get('workload', 'attention')} {row['case']}"
        if row["launch_bound"]:
            self.launch_bound += 1
            if time_us < row["true_us"] - tick_us:
                yield f"{where}: launch-bound, and faster than its kernels"
            exposed_us = issued_us - median(row["hidden_us"])
            if row["true_us"] > exposed_us / HOST_BOUND + tick_us:
                yield f"{where}: launch-bound, and its kernels outlast their launches"
            return
        off_us = abs(time_us - row["true_us"])
        # The clock leaves a launch that is next to nothing of its call unhidden.
        unhidden = row["timer"] == "events" and not median(row["hidden_us"])
        may_us = tick_us + (issued_us if unhidden and issued_us <= NEGLIGIBLE * time_us else 0.0)
        if off_us > may_us:
            yield f"{where}: {time_us:.2f} us, in truth {row['true_us']:.2f}"
        if may_us == tick_us:
            self.worst_us = max(self.worst_us, off_us)
        # Of warm calls it is that of the first one after another implementation's.
        known = row["timer"] == "events" and row["cold"]
        if known and abs(e2e_us - row["true_e2e_us"]) > tick_us + AROUND_US:
            yield f"{where}: {e2e_us:.2f} us to the result, in truth {row['true_e2e_us']:.2f}"

    def all(self) -> None:
        """Every part of `make gpu`, other clocks, and what may go wrong."""
        for name in PARTS:
            own_sizes: dict[str, Any] = {}
            if name in ("gpu-test", "gpu-check"):
                if self.few:  # they ask little of which GPU it is
                    continue
                own_sizes = {SCALED: 1, "PYTEST_ADDOPTS": f'-k "not ({" or ".join(DESELECTED)})"'}
            part, _ = self.command(
                name, "make", name, f"OUT={self.folder}", f"PYTHON={sys.executable}", "LIMIT=3000",
                **own_sizes,
            )  # fmt: skip
            if part.status:
                part.problems.append(f"exit {part.status}")
            # The check goes on when it is called again.
            timed = self.profile == "H100" and name != "gpu-check"
            if timed and part.simulated_s > MOST_S:
                part.problems.append(f"takes {part.simulated_s:.0f} s, more than {MOST_S:.0f}")
            if name == "gpu-sweep":
                self.compare(part, "gpu")
        impls = ("--impls", "naive,sdpa,chunked", "--passes", "forward,both")
        for name, options in {
            "warm": ("--l2", "warm"),
            "graph": ("--timer", "graph"),
            "graph-warm": ("--timer", "graph", "--l2", "warm"),
        }.items():
            part, rows = self.sweep(name, *SIZES, *impls, *options)
            if {row["status"] for row in rows} != {"ok"}:
                part.problems.append(f"not all ok: {_statuses(rows)}")
            self.compare(part, name)
        self.faults()

    def faults(self) -> None:
        """What goes wrong costs the cell it belongs to, and is said."""
        impls = ("--impls", "naive,sdpa")
        part, rows = self.sweep(
            "capture-fails", *SIZES, *impls, "--timer", "graph", faults="capture"
        )
        _expect(part, rows, lambda row: row["status"] == "unsupported" and "graph" in row["reason"])
        part, rows = self.sweep(
            "out-of-memory", "--seq-lens", "64,1024", *impls,
            ATTNBENCH_REHEARSAL_MEMORY=2 * PROFILES[self.profile].cache_bytes + ROOM,
        )  # fmt: skip
        _expect(part, rows, lambda row: (row["status"] == "skipped") == _naive_at(row, 1024))
        hostile = self.folder / "hostile.py"
        hostile.write_text(HOSTILE)
        part, rows = self.sweep(
            "hostile", "--seq-lens", "64", "--impl", hostile, "--timeout", "20",
            "--impls", "naive,sdpa,hangs,loses-device",
        )  # fmt: skip
        wanted = {"hangs": "timeout", "loses-device": "crashed"}
        _expect(part, rows, lambda row: row["status"] == wanted.get(row["impl"], "ok"))
        for fault in ("throttle", "brake"):
            part, rows = self.sweep(fault, *SIZES, *impls, "--max-time", "0.3", faults=fault)
            _expect(part, rows, _slowness_is_said)


def _statuses(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['impl']} {row['status']} ({row.get('reason')})" for row in rows)


def _expect(
    part: Part, rows: list[dict[str, Any]], right: Callable[[dict[str, Any]], bool]
) -> None:
    wrong = [row for row in rows if not right(row)]
    if wrong or not rows:
        part.problems.append(f"not as expected: {_statuses(wrong)}")


def _naive_at(row: dict[str, Any], seq_len: int) -> bool:
    return bool(row["impl"] == "naive" and row["case"]["seq_len"] == seq_len)


def _slowness_is_said(row: dict[str, Any]) -> bool:
    """A time from a slowed GPU is there, and marked; before it was hot there is nothing to mark."""
    samples = row["samples"]  # by columns
    marked = any(samples.get("kept_despite", ()))
    hot = "gpu" in samples.get("discard_code", ())
    return bool(row["status"] == "ok" and (marked or not hot))


def main() -> int:
    """Rehearse with each profile; print a page, and write it beside what the runs left."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.rehearsal")
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help=", ".join(PROFILES))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "rehearsal")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="no tests and no check, and every third length, of the first profile, too",
    )
    given = parser.parse_args()
    profiles = given.profiles or list(PROFILES)
    if unknown := [name for name in profiles if name not in PROFILES]:
        parser.error(f"no profile {', '.join(unknown)}; there are {', '.join(PROFILES)}")
    failed, page = 0, []
    for name in profiles:
        folder = given.out / name
        if folder.exists():
            parser.error(f"{folder} exists; --out elsewhere, or remove it")
        folder.mkdir(parents=True)
        # The first has the whole preset, the tests and the check; the others every third length.
        few = given.brief or name != profiles[0]
        rehearsal = Rehearsal(profile=name, folder=folder, few=few)
        rehearsal.all()
        page.append(_page(rehearsal))
        print(page[-1], flush=True)
        failed += sum(bool(part.problems) for part in rehearsal.parts)
        rows = {"profile": name, "parts": [asdict(part) for part in rehearsal.parts]}
        (folder / "rehearsal.json").write_text(json.dumps(rows, indent=1))
    (given.out / "rehearsal.txt").write_text("\n".join(page))
    return 1 if failed else 0


def _page(rehearsal: Rehearsal) -> str:
    lines = [
        f"{rehearsal.profile}: {rehearsal.cells} cells held against the truth, the worst off by"
        f" {rehearsal.worst_us:.3f} us, {rehearsal.launch_bound} launch-bound"
    ]
    for part in rehearsal.parts:
        verdict = "ok" if not part.problems else f"{len(part.problems)} PROBLEMS"
        lines.append(
            f"  {part.what:<14} {part.simulated_s:6.0f} s on this GPU, {part.real_s:5.0f} s here"
            f"   {verdict}"
        )
        lines += [f"      {problem}" for problem in part.problems[:5]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
