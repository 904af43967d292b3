"""Do sweeps end well, alone, beside others and with spoilt clocks?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from attnbench.analysis import times
from attnbench.base.stats import median
from attnbench.store.runs import load_run
from tests.validation.clockfaults import FAULTS
from tests.validation.neighbours import neighbours
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

ALONE, BESIDE = "alone", "beside two"
CELLS = ("--seq-lens", "128,256", "--impls", "naive,sdpa")
FILE = Path(__file__).with_name("clockfaults.py")


def examine(path: Path, tell: Tell, *, runs: int, faulty: int, seed: int) -> Ended:
    """Make the sweeps that the folder lacks, in random order."""
    wanted = Counter({ALONE: runs, BESIDE: runs})
    wanted += Counter(FAULTS[i % len(FAULTS)] for i in range(faulty))

    def missing(done: list[Figures]) -> Iterator[Figures]:
        left = list((wanted - Counter(row["condition"] for row in done)).elements())
        random.Random(seed + len(done)).shuffle(left)
        for number, condition in enumerate(left, start=1):
            tell(f"sweep {number} of {len(left)}: {condition}")
            yield swept(condition, seed + number)

    return go_on(path, {"cells": CELLS, "seed": seed}, missing, summarise, tables)


def swept(condition: str, seed: int) -> Figures:
    """One sweep as a user starts it: how it ended, how long it took, its times and intervals."""
    fault = {"ATTNBENCH_CLOCK_FAULT": condition} if condition in FAULTS else {}
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        opened.enter_context(neighbours(2 if condition == BESIDE else 0, seed))
        command = [sys.executable, "-m", "attnbench", "sweep", *CELLS, "--output", folder]
        command += ["--name", "run", "--seed", str(seed), *(["--impl", str(FILE)] if fault else [])]
        begin = time.monotonic()
        ended = subprocess.run(
            command, env=os.environ | fault, capture_output=True, text=True, check=False
        )
        row = {"condition": condition, "exit": ended.returncode, "wall_s": time.monotonic() - begin}
        if ended.returncode:
            return row | {"said": ended.stderr[-2000:], "cells": []}
        records = load_run(Path(folder) / "run").records
    return row | {
        "cells": [
            (f"{r.cell.impl} {r.cell.case.seq_len}", times.time_us(r), times.interval_us(r))
            for r in records
            if r.status == "ok"
        ],
        "speeds": records[0].metrics.get("core_speeds"),
    }


def summarise(rows: list[Figures]) -> Figures:
    """How each condition's sweeps ended; how often their times lie in a sweep's that ran alone."""
    alone = [{cell: ends for cell, _, ends in r["cells"]} for r in rows if r["condition"] == ALONE]
    found = []
    for condition in dict.fromkeys((ALONE, BESIDE, *sorted({row["condition"] for row in rows}))):
        mine = [row for row in rows if row["condition"] == condition]
        others = [
            [ends for ends in alone if condition != ALONE or ends != own]
            for own in ({cell: ends for cell, _, ends in row["cells"]} for row in mine)
        ]
        held = [
            ends[cell][0] <= time_us <= ends[cell][1]
            for row, known in zip(mine, others, strict=True)
            for cell, time_us, _ in row["cells"]
            for ends in known
            if ends.get(cell)
        ]
        widths = [
            (ends[1] - ends[0]) / 2 / time_us
            for row in mine
            for _, time_us, ends in row["cells"]
            if ends
        ]
        found.append(
            {
                "condition": condition,
                "sweeps": len(mine),
                "exits_of_0": sum(row["exit"] == 0 for row in mine),
                "without_interval": sum(not c[2] for row in mine for c in row["cells"]),
                "held": sum(held) / len(held) if held else None,
                "half_width": median(widths) if widths else None,
                "wall_s": median(row["wall_s"] for row in mine) if mine else None,
            }
        )
    return {"conditions": found, "met": all(row["exit"] == 0 for row in rows)}


def tables(summary: Figures) -> list[Table]:
    """A row for each condition."""
    percent = lambda x: "–" if x is None else f"{100 * x:.1f} %"  # noqa: E731
    found = Table(
        title="Sweeps of four cells",
        header=(
            "condition", "sweeps", "exits of 0", "cells without interval",
            "times held by those alone", "half-width", "wall",
        ),
        rows=tuple(
            (
                row["condition"], str(row["sweeps"]), str(row["exits_of_0"]),
                str(row["without_interval"]), percent(row["held"]), percent(row["half_width"]),
                f"{row['wall_s'] or 0:.1f} s",
            )
            for row in summary["conditions"]
        ),
        note="Held: how often a time lies in the interval of the same cell in a sweep that ran"
        " alone, over all such sweeps (but its own). cpu: and wall: are clocks that fail in one"
        " reading of 400.",
    )  # fmt: skip
    return [found]
