"""What is stored stands damage, and large runs load fast."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from attnbench.base.stats import median
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import load_run, new_run
from tests import synthetic
from tests.validation.fuzz import fuzz
from tests.validation.runner import Ended, Tell


def examine(tell: Tell, *, inputs: int, seed: int) -> Ended:
    """Whether no damaged input ends otherwise than it may, and all goals of speed are reached."""
    with tempfile.TemporaryDirectory(prefix="attnbench-fuzz-") as folder:
        found = fuzz(Path(folder) / "fuzz", inputs, seed, tell)
    end = f"{inputs} inputs, {len(found.findings)} findings, {found.slowest_s:.1f} s at most"
    with tempfile.TemporaryDirectory(prefix="attnbench-store-", dir=".") as folder:
        fast = measured(Path(folder), tell)
    return Ended(met=fast and not found.findings, lines=[*found.findings, end])


def record(n: int, samples: int) -> Record:
    """A cell of its own for each n."""
    like = synthetic.ok(Case(seq_len=64), "naive")
    cell = replace(like.cell, case=Case(seq_len=n))
    return replace(like, cell=cell, samples=synthetic.samples(100.0, str(n), samples))


def measured(folder: Path, tell: Tell) -> bool:
    """Whether all goals are reached; `folder` is new, and may be deleted."""
    met = True

    def goal(what: str, took_s: float, most_s: float) -> None:
        nonlocal met
        met &= took_s <= most_s
        tell(f"{what}: {took_s:.4g} s, at most {most_s:g} s")

    for cells, samples, most_s in ((10_000, 15, 2.0), (1_000, 1_000, 1.0)):
        made = (record(64 + i, samples) for i in range(cells))
        path = synthetic.write_run(folder, f"{cells}", made)
        goal(f"load {cells} records of {samples} samples", fastest_load(path), most_s)
    took, stored = [], [record(64 + i, 15) for i in range(300)]
    with new_run(folder, "appended", {}) as run:
        for each in stored:
            begin = time.perf_counter()
            run.append(each.to_line())
            took.append(time.perf_counter() - begin)
    goal("append and sync a record, the median of 300", median(took), 0.002)
    return met


def fastest_load(path: Path) -> float:
    """The least processor time of three, in s: nothing waits, and other work only adds."""
    took = []
    for _ in range(3):
        begin = time.process_time()
        load_run(path)
        took.append(time.process_time() - begin)
    return min(took)
