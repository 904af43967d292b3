"""Is a count of instructions stable enough to be worth its place? Repeats in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.base.stats import median
from attnbench.machine.callgrind import under_callgrind
from tests.validation.page import Table, markdown, write_texts

NAME, SUMMARY, PAGE = "selftest-instructions", "summary.json", "instructions.md"
SEQ_LENS = (16, 64)
# What is planted, and in what.
PLANTS = {
    "naive + copy of k": "naive",
    "sdpa + copy of k": "sdpa",
    "sdpa + .contiguous() without effect": "sdpa",
    "sdpa behind a Python wrapper": "sdpa",
}


def cells(n: int) -> dict[str, Callable[[], Any]]:
    """Calls by name: what attnbench times in one thread (B1 H4 D64, float32), and plants in it."""
    import torch

    from attnbench.api import implementation
    from attnbench.schema.case import Case

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 64) for _ in range(3))
    case = Case(heads=4, kv_heads=4, seq_len=n, kv_len=n)
    naive, sdpa = (implementation(name).build(case) for name in ("naive", "sdpa"))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return sdpa(*args, **kwargs)

    return {
        "naive": lambda: naive(q, k, v),
        "sdpa": lambda: sdpa(q, k, v),
        "naive + copy of k": lambda: naive(q, k.clone(), v),
        "sdpa + copy of k": lambda: sdpa(q, k.clone(), v),
        "sdpa + .contiguous() without effect": lambda: sdpa(q, k.contiguous(), v),
        "sdpa behind a Python wrapper": lambda: wrapper(q, k, v),
    }


def child() -> None:
    """Print instructions a call of each cell, and the processor time of all: under Callgrind."""
    import torch

    from attnbench.api.loader import load_built_in
    from attnbench.machine.callgrind import VARIABLE
    from attnbench.measure.instructions import instructions

    torch.set_num_threads(1)
    load_built_in()  # before anything is instrumented
    counted, dumps = {}, Path(os.environ[VARIABLE])
    with torch.no_grad():
        for n in SEQ_LENS:
            for name, call in cells(n).items():
                if name not in PLANTS or n == SEQ_LENS[0]:
                    counted[f"{name}, n = {n}"] = instructions(call, dumps)
    print(json.dumps({"counts": counted, "cpu_s": time.process_time()}))


def repeat() -> dict[str, Any]:
    """What one fresh process counts."""
    begin, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "tests.validation.instructions"]
        done = subprocess.run(
            under_callgrind(command, Path(folder, "callgrind")), check=True, capture_output=True,
            env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"wall_s": round(time.monotonic() - begin, 1), "load": load}


def examine(output: Path, repeats: int, tell: Callable[[str], None]) -> tuple[Path, list[Table]]:
    """Repeat until there are so many; the page and its tables.

    Raises:
        StoreError: the folder cannot be written.
    """
    folder = output / NAME
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SUMMARY
    runs = json.loads(path.read_text()) if path.exists() else []
    while len(runs) < repeats:
        runs.append(repeat())
        tell(f"repeat {len(runs)}: {runs[-1]['wall_s']:.0f} s")
        write_texts(folder, {SUMMARY: json.dumps(runs, indent=1) + "\n"})
    found = [spreads(runs), plants(runs), costs(runs)]
    write_texts(folder, {PAGE: markdown("make validate PART=instructions", found)})
    return folder / PAGE, found


def _of(runs: list[dict[str, Any]], cell: str) -> list[float]:
    return [run["counts"][cell] for run in runs]


def spreads(runs: list[dict[str, Any]]) -> Table:
    """Of each cell: the counts of fresh processes, and (largest − smallest) / median."""
    rows = []
    for cell in runs[0]["counts"]:
        if cell.split(", ")[0] not in PLANTS:
            counts = _of(runs, cell)
            usual, least, most = median(counts), min(counts), max(counts)
            shown = (f"{count:,.0f}" for count in (usual, least, most))
            rows.append((cell, str(len(runs)), *shown, f"{100 * (most - least) / usual:.2g} %"))
    header = "cell", "repeats", "instructions a call", "least", "most", "spread"
    return Table(title="How far repeats differ", header=header, rows=tuple(rows))


def plants(runs: list[dict[str, Any]]) -> Table:
    """What a planted change adds, against the range of what it is planted in."""
    rows = []
    for name, of in PLANTS.items():
        base, changed = (_of(runs, f"{x}, n = {SEQ_LENS[0]}") for x in (of, name))
        added = median(changed) - median(base)
        share = 100 * added / median(base)
        seen = sum(after > max(base) for after in changed)
        wide = max(base) - min(base)
        row = f"{name}, n = {SEQ_LENS[0]}", f"{added:+,.0f}", f"{share:+.2g} %", f"{wide:,.0f}"
        rows.append((*row, f"{seen} of {len(runs)}"))
    header = (
        "planted",
        "instructions added",
        "share",
        "range of repeats",
        "above every unchanged one",
    )
    return Table(title="What planted changes add", header=header, rows=tuple(rows))


def costs(runs: list[dict[str, Any]]) -> Table:
    """Seconds of one repeat, which counts all cells, and how busy the machine was."""
    rows = []
    for name, key, unit in (
        ("processor time", "cpu_s", " s"), ("wall time", "wall_s", " s"),
        ("load average as it began", "load", ""),
    ):  # fmt: skip
        values = [run[key] for run in runs]
        figures = (f"{value:.0f}{unit}" for value in (median(values), min(values), max(values)))
        rows.append((name, *figures))
    header = "one repeat of all cells", "median", "least", "most"
    return Table(title="What it costs", header=header, rows=tuple(rows))


if __name__ == "__main__":
    child()
