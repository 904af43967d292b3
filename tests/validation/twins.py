"""Is SDPA under another name ever advised in place of SDPA?"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attnbench.analysis import table
from attnbench.analysis.advice import advices
from attnbench.store.runs import load_run
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

# The default's own call, and the same with one small op more: what differs is the op, or chance.
KERNEL = """
from torch.nn.functional import scaled_dot_product_attention
from attnbench.api import attention


@attention("twin", memory="n")
def twin(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
    {more}
    shared = {{"enable_gqa": True}} if q_BHLD.shape[1] != k_BGSD.shape[1] else {{}}
    causal = causal and q_BHLD.shape[2] > 1
    return scaled_dot_product_attention(
        q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale, **shared)
"""
KINDS = {"same call": "pass", "one op more": "k_BGSD[:1, :1, :1].clone()"}


def examine(path: Path, tell: Tell, *, twins: int, budget: float, seed: int) -> Ended:
    """Advise on the twins that the folder lacks."""

    def missing(done: list[Figures]) -> Iterator[Figures]:
        for number in range(len(done), twins):
            kind, shape = list(KINDS)[number % len(KINDS)], drawn(seed + number)
            tell(f"twin {number + 1} of {twins}: {kind}, {shape}")
            yield advised(kind, shape, budget)

    return go_on(path, {"budget_s": budget, "seed": seed}, missing, summarise, tables)


def drawn(seed: int) -> str:
    """A random call as `--case` takes it."""
    draw = random.Random(seed)
    keys, heads = draw.choice((64, 200, 512, 1024)), draw.choice((4, 8, 16))
    queries = draw.choice((1, keys))
    mask = draw.choice(("full", "causal")) if queries > 1 else "full"
    groups, width = draw.choice((heads, heads // 4)), draw.choice((64, 128))
    dtype = draw.choice(("float32", "bfloat16"))
    return f"H={heads},G={groups},L={queries},S={keys},D={width},mask={mask},dtype={dtype}"


def advised(kind: str, shape: str, budget_s: float) -> Figures:
    """What is advised where SDPA and its twin are tried."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "twin.py"
        file.write_text(KERNEL.format(more=KINDS[kind]))
        command = [sys.executable, "-m", "attnbench", "advise", "--case", shape, "--impl", file]
        command += ["--impls", "sdpa,twin", "--budget", f"{budget_s:g}s", "--output", folder]
        begin = time.monotonic()
        ended = subprocess.run([*map(str, command), "--quiet", "--name", "advice"],
                               capture_output=True, check=False)  # fmt: skip
        row: Figures = {"kind": kind, "shape": shape, "wall_s": time.monotonic() - begin}
        row["exit"] = ended.returncode
        if ended.returncode not in (0, 3):
            return row | {"verdict": "declined"}
        run = load_run(Path(folder) / "advice")
        [advice] = advices(run, table.load(run, "sdpa"))
        same = any(record.metrics.get("same_as") for record in run.records)
        return row | {"verdict": advice.verdict, "regret": advice.regret, "one_candidate": same}


def summarise(rows: list[Figures]) -> Figures:
    """How often a twin was advised, or named as faster."""
    verdicts = {kind: Counter(r["verdict"] for r in rows if r["kind"] == kind) for kind in KINDS}
    merged = {kind: sum(bool(r.get("one_candidate")) for r in rows if r["kind"] == kind)
              for kind in KINDS}  # fmt: skip
    total = sum(verdicts.values(), Counter())
    met = not total["switch"] and total["likely"] <= 1 and not total["declined"]
    return {"twins": len(rows), "verdicts": verdicts, "merged": merged, "met": bool(rows) and met}


def tables(summary: Figures) -> list[Table]:
    """A row for each kind."""
    names = ("keep", "open", "likely", "switch", "declined")
    rows = [
        (kind, str(sum(counts.values())), str(summary["merged"][kind]),
         *(str(counts.get(name, 0)) for name in names))
        for kind, counts in summary["verdicts"].items()
    ]  # fmt: skip
    header = ("a twin of SDPA with the", "twins", "one candidate", *names)
    note = "The goal: switch and declined in none, likely in at most one."
    return [Table(title="Twins", header=header, rows=tuple(rows), note=note)]
