"""Is the implementation that `attnbench advise` picks the best, and is it sure where it may be?"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnbench.analysis import table
from attnbench.analysis.advice import advices
from attnbench.base.stats import median
from attnbench.planning.caselist import listed
from attnbench.planning.plan import expand
from attnbench.store.runs import load_run
from attnbench.theory.choices import as_transformers
from attnbench.theory.traits import work
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

MOST_WORK = 1e9  # multiply-adds of a call, so that a round of six takes 2 s at most
CLOSE = 1.05
PROCESSES = 3


def examine(path: Path, tell: Tell, *, shapes: int, budget: float, longer: int, seed: int) -> Ended:
    """Advise on the shapes that the folder lacks, and judge each by a longer run."""

    def missing(done: list[Figures]) -> Iterator[Figures]:
        for number in range(len(done), shapes):
            shape, impls = drawn(seed + number)
            tell(f"shape {number + 1} of {shapes}: {shape}")
            yield judged(shape, impls, budget, longer)

    asked = {"budget_s": budget, "longer": longer, "seed": seed}
    return go_on(path, asked, missing, summarise, tables)


def drawn(seed: int) -> tuple[str, list[str]]:
    """A random call as `--case` takes it, and six implementations of it."""
    draw = random.Random(seed)
    while True:
        heads = draw.choice((4, 8, 16, 32))
        groups = draw.choice([g for g in (1, 2, 4, 8, 16, 32) if heads % g == 0])
        keys = draw.choice((96, 200, 512, 1000, 2048, 4096))
        queries = draw.choice((1, 1, keys, keys, keys // 4))
        mask = draw.choice(("full", "causal", "window:128")) if queries > 1 else "full"
        parts: dict[str, Any] = {
            "B": draw.choice((1, 2, 4)), "H": heads, "G": groups, "L": queries, "S": keys,
            "D": draw.choice((32, 64, 128)), "mask": mask,
            "dtype": draw.choice(("float32", "bfloat16")),
            "pass": draw.choice(("forward", "forward", "both")) if queries == keys else "forward",
        }  # fmt: skip
        shape = ",".join(f"{name}={value}" for name, value in parts.items())
        case = next(expand(listed([shape], None, {})[0], "cpu"))
        if work(case) <= MOST_WORK:
            last = "sdpa-expanded" if groups < heads else "sdpa-math"
            return shape, ["sdpa", "naive", "chunked", "split-kv", "sdpa-mask", last]


def judged(shape: str, impls: list[str], budget_s: float, longer: int) -> Figures:
    """What was advised, and how far each implementation is from the best of the longer run."""
    with tempfile.TemporaryDirectory() as folder:

        def attnbench(*arguments: str) -> tuple[int, float]:
            command = [sys.executable, "-m", "attnbench", *arguments, "--case", shape]
            command += ["--impls", ",".join(impls), "--output", folder, "--quiet"]
            begin = time.monotonic()
            ended = subprocess.run(command, capture_output=True, check=False)
            return ended.returncode, time.monotonic() - begin

        code, wall_s = attnbench("advise", "--budget", f"{budget_s:g}s", "--name", "advice")
        row: Figures = {"shape": shape, "exit": code, "wall_s": wall_s}
        if code not in (0, 3):
            return row | {"verdict": "declined"}
        run = load_run(Path(folder) / "advice")
        [found] = advices(run, table.load(run, "sdpa"))
        samples_s = sum(record.spent_s.get("samples", 0.0) for record in run.records)
        each_s = f"{longer * samples_s / len(impls) / PROCESSES:.3f}"
        timing = ("--processes", str(PROCESSES), "--min-time", each_s, "--max-time", each_s)
        attnbench("sweep", *timing, "--precision", "1e-9", "--ceilings", "none", "--name", "long")
        long = load_run(Path(folder) / "long")
    timed = {record.cell.impl: record for record in long.records if record.samples}
    frame = table.load(long, "sdpa")
    best = str(frame[frame["behind"] == 1]["impl"].iloc[0])
    behind = {impl: table.time_ratio(long, record, timed[best]) for impl, record in timed.items()}
    return row | {
        "verdict": found.verdict, "sure": found.sure, "pick": str(found.pick["impl"]),
        "best": best, "behind": behind, "transformers": as_transformers(found.case),
    }  # fmt: skip


def summarise(rows: list[Figures]) -> Figures:
    """How often the pick is close to the best, and what fixed choices would cost."""
    told = [row for row in rows if row["verdict"] != "declined"]
    off = [row["behind"][row["pick"]] for row in told]
    wrong = [
        row["shape"]
        for row, (_, low, _) in zip(told, off, strict=True)
        if row["sure"] and low is not None and low > CLOSE
    ]
    regrets: dict[str, list[float]] = {"advice": [value for value, _, _ in off]}
    for row in told:
        for name, impl in (("sdpa", "sdpa"), ("naive", "naive"), ("transformers", None)):
            if known := row["behind"].get(impl or row["transformers"]):
                regrets.setdefault(name, []).append(known[0])
    close, unsure = sum(x <= CLOSE for x in regrets["advice"]), sum(not r["sure"] for r in told)
    unsure += len(rows) - len(told)
    return {
        "shapes": len(rows), "close": close, "sure_and_wrong": wrong, "unsure": unsure,
        "wall_s": median(row["wall_s"] for row in rows) if rows else None,
        "regrets": {
            name: {"mean": math.exp(sum(map(math.log, found)) / len(found)), "worst": max(found)}
            for name, found in regrets.items() if found
        },
        "rows": [
            (row["shape"], row.get("pick", "–"), row.get("best", "–"), row["verdict"],
             row.get("sure"), row["behind"][row["pick"]][0] if "pick" in row else None)
            for row in rows
        ],
        "met": bool(rows) and close >= 0.95 * len(told) and not wrong
        and unsure <= 0.25 * len(rows),
    }  # fmt: skip


def tables(summary: Figures) -> list[Table]:
    """What choices cost, then a row for each shape."""
    costs = tuple(
        (name, f"{found['mean']:.3f}", f"{found['worst']:.2f}")
        for name, found in summary["regrets"].items()
    )
    counts = (
        f"{summary['close']} of {summary['shapes']} picks are within 5 % of the best of the longer"
        f" run; sure and wrong: {len(summary['sure_and_wrong'])}; not sure or declined:"
        f" {summary['unsure']}. An advice takes {summary['wall_s'] or 0:.1f} s in the median."
    )
    rows = tuple(
        (shape, pick, best, verdict, "sure" if sure else "–", f"{behind:.2f}" if behind else "–")
        for shape, pick, best, verdict, sure, behind in summary["rows"]
    )
    header = ("shape", "pick", "best", "verdict", "sure", "time / best")
    return [
        Table(title="What a choice costs: time / best", header=("always", "mean", "worst"),
              rows=costs, note=counts),
        Table(title="Shapes", header=header, rows=rows),
    ]  # fmt: skip
