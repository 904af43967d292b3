"""The gate across environments: one version twice, and a slowdown planted in one's torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.base.files import check_name
from attnbench.base.stats import median
from attnbench.errors import UsageError
from tests.validation.gate.tables import rate, signed
from tests.validation.gate.tally import share
from tests.validation.page import Table, markdown, write_texts

SUMMARY, PAGE = "summary.json", "environments.md"
KINDS = ("A/A", "planted")
PLANTED_IMPL = "sdpa"
LONGEST_S = 300.0  # that a run may take with its environments in place
Run = dict[str, Any]

MARK = "# Planted by attnbench's validation"
PLANT = f"""

{MARK}: each call takes 10 % more processor time.
def _planted(call):  # type: ignore[no-untyped-def]
    import functools
    import time

    now = time.thread_time_ns

    @functools.wraps(call)
    def slowed(*args, **kwargs):  # type: ignore[no-untyped-def]
        begin = now()
        result = call(*args, **kwargs)
        end = now()
        until = end + (end - begin) // 10
        while now() < until:
            pass
        return result

    return slowed


scaled_dot_product_attention = _planted(scaled_dot_product_attention)
"""

# What the plant adds, without attnbench: calls with and without it in turns, of processor time.
_MEASURE = """
import json, random, statistics, time
import torch
from torch.nn.functional import scaled_dot_product_attention as slowed
torch.set_num_threads(1)
now, found = time.thread_time_ns, {}
for n in (128, 256, 512, 1024):
    q, k, v = (torch.randn(1, 4, n, 64) for _ in range(3))
    taken = {slowed: [], slowed.__wrapped__: []}
    with torch.no_grad():
        for _ in range(400):
            for call in random.sample(list(taken), 2):
                begin = now()
                call(q, k, v)
                taken[call].append(now() - begin)
    found[n] = statistics.median(a / b for a, b in zip(*taken.values()))
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """`base`, `same` and `slow` are interpreters of environments with one version of torch.

    `each` is how many runs there shall be of base against `same`, and of base against `slow`, of
    naive and sdpa at each of `seq_lens`.
    """

    base: Path
    same: Path
    slow: Path
    each: int = 20
    seq_lens: tuple[int, ...] = (128, 256, 512, 1024)
    output: Path = Path("results")
    name: str = "selftest-environments"


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, list[Table]]:
    """Make the runs that are missing, of both kinds in turns; the page and its tables.

    Raises:
        UsageError: an environment cannot be used.
        StoreError: the folder cannot be written.
    """
    folder = request.output / check_name(request.name)
    path = folder / SUMMARY
    if path.exists():
        summary = json.loads(path.read_text())
    else:
        summary = {"plant": planted(request.slow), "runs": []}
        folder.mkdir(parents=True, exist_ok=True)
    others = dict(zip(KINDS, (request.same, request.slow), strict=True))
    for number in range(request.each):
        for kind, other in others.items():
            if sum(run["kind"] == kind for run in summary["runs"]) > number:
                continue
            run = {"kind": kind} | gate(request.base, other, request.seq_lens)
            summary["runs"].append(run)
            write_texts(folder, {SUMMARY: json.dumps(summary) + "\n"})
            named = ", ".join(cell for cell in run["cells"] if against(run, cell)) or "no cell"
            spent = units.seconds(run["spent_s"])
            tell(f"{kind} run {number + 1}: exit {run['exit_code']}, names {named}; {spent}")
    tables = [runs_of(summary["runs"]), cells_of(summary["runs"], summary["plant"])]
    title = f"make validate PART=environments: {folder.name}"
    write_texts(folder, {PAGE: markdown(title, tables)})
    return folder / PAGE, tables


def planted(python: Path) -> dict[str, float]:
    """Plant the slowdown in this environment's torch, once; what it adds by n, as a ratio.

    Raises:
        UsageError: the environment has no torch.
    """
    file = Path(_said_by(python, "import torch.nn.functional as f; print(f.__file__)"))
    text = file.read_text()
    if MARK not in text:
        file.write_text(text + PLANT)
    found: dict[str, float] = json.loads(_said_by(python, _MEASURE))
    return found


def _said_by(python: Path, code: str) -> str:
    # Memory as the gate's processes have it: page faults of each call are no part of the plant.
    settled = {f"MALLOC_{name}_THRESHOLD_": str(32 << 20) for name in ("MMAP", "TRIM")}
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, env=os.environ | settled
        )
    except OSError as err:
        raise UsageError(f"--slow {python} does not start ({err.strerror})") from err
    if done.returncode:
        raise UsageError(f"--slow {python}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def gate(base: Path, candidate: Path, seq_lens: tuple[int, ...]) -> Run:
    """One run of the command: how it ended, its time, and of each cell the verdict and ratio."""
    begin, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sides = "--python", str(base), "--python", str(candidate)
        cells = "--impls", f"naive,{PLANTED_IMPL}", "--seq-lens", ",".join(map(str, seq_lens))
        done = subprocess.run(
            [sys.executable, "-m", "attnbench", "gate", *sides, *cells, "--quiet",
             "--output", folder, "--name", "run"], capture_output=True, text=True,
        )  # fmt: skip
        spent_s = round(time.monotonic() - begin, 1)
        file = Path(folder, "run", "gate.json")
        if not file.exists():
            raise UsageError(f"the gate ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        stored = json.loads(file.read_text())
    decided = {}
    for row in stored["decided"]["rows"]:
        cell = stored["cells"][row["cell"]]
        figures = {name: row[name] and round(row[name], 4) for name in ("ratio", "low", "high")}
        name = f"{cell['impl']} n={cell['case']['seq_len']}"
        decided[name] = {"verdict": row["verdict"], "rounds": row["rounds"]} | figures
    return {
        "exit_code": done.returncode, "spent_s": spent_s, "rounds": len(stored["rounds"]),
        "load": round(load, 1), "cells": decided,
    }  # fmt: skip


def against(run: Run, cell: str) -> bool:
    """Whether a verdict on the cell would end a build."""
    return run["cells"][cell]["verdict"] in ("regressed", "incorrect", "grown")


def _slowed(cell: str) -> bool:
    return cell.startswith(PLANTED_IMPL)


def runs_of(runs: Iterable[Run]) -> Table:
    """A row for each kind: how its runs ended, which cells they named, and how long they took."""
    rows = []
    for kind in KINDS:
        some = [run for run in runs if run["kind"] == kind]
        named = [cell for run in some for cell in run["cells"] if against(run, cell)]
        right = kind == "planted"
        wrong = sum(not (right and _slowed(cell)) for cell in named)
        of = sum(_slowed(cell) for run in some for cell in run["cells"]) if right else 0
        codes = [run["exit_code"] for run in some]
        endings = (rate(share(codes.count(code), len(some))) for code in (1, 0, 3, 4))
        spent = [run["spent_s"] for run in some] or [0.0]
        over = sum(x > LONGEST_S for x in spent)
        rows.append((
            kind, *endings, f"{len(named) - wrong} of {of}" if of else "–", str(wrong),
            units.seconds(median(spent)), units.seconds(max(spent)), str(over),
        ))  # fmt: skip
    header = (
        "runs", "exit 1", "exit 0", "exit 3", "exit 4", "slowed cells named", "others named",
        "time", "longest", "over 5 min",
    )  # fmt: skip
    return Table(
        title="Runs of the gate", header=header, rows=tuple(rows),
        note="Exit 1: slower, 0: passed, 3: inconclusive or blind, 4: untrusted. In brackets the"
        " exact 95 % interval. Time is wall time with the checks and the page.",
    )  # fmt: skip


def cells_of(runs: Iterable[Run], plant: dict[str, float]) -> Table:
    """A row for each kind and cell: how often it was named, and what its ratio read."""
    rows = []
    for kind in KINDS:
        some = [run for run in runs if run["kind"] == kind]
        for cell in some[0]["cells"] if some else ():
            slowed = kind == "planted" and _slowed(cell)
            truth = plant[cell.split("=")[1]] if slowed else 1.0
            found = [run["cells"][cell] for run in some if run["cells"][cell]["ratio"]]
            ratios = [one["ratio"] for one in found]
            bounds = [(one["low"], one["high"]) for one in found if one["low"]]
            held = sum(low <= truth <= high for low, high in bounds)
            named = sum(against(run, cell) for run in some)
            extremes = [signed(x - 1) for x in (median(ratios), min(ratios), max(ratios))]
            rows.append((
                f"{kind} {cell}", signed(truth - 1), f"{named} of {len(some)}", *extremes,
                f"{held} of {len(bounds)}",
            ))  # fmt: skip
    header = "cell", "truth", "named", "median", "least", "most", "interval holds truth"
    return Table(
        title="Cells", header=header, rows=tuple(sorted(rows)),
        note="The truth of a slowed cell is measured without attnbench: calls with and without"
        " the plant in turns, processor time.",
    )  # fmt: skip
