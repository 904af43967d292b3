"""Do sweeps take as long as they say before they begin, in folders with runs and without?"""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attnbench.planning.forecast import SPREAD, Forecast
from attnbench.store.runs import Run, load_run
from tests.validation.page import Table
from tests.validation.runner import Ended, Figures, Tell, go_on

EXACT = ("naive", "sdpa", "chunked", "sdpa-math", "split-kv", "sdpa-mask")
OTHERS = ("linear", "performer", "linformer", "window-global", "nystrom", "strided")
MODELS = ("llama-3.1-8b", "mistral-7b-v0.1", "qwen3-8b", "bert-base", "vit-b-16")
KINDS = (
    "small", "large", "decode", "layer", "backward", "list", "prefill", "step", "families"
)  # fmt: skip
# What the folder holds when the first sweep begins.
BEFORE = (
    "--workload decode --seq-lens 512 --impls naive --max-time 0.2",
    "--seq-lens 128 --impls sdpa --max-time 0.2",
    "--workload layer --seq-lens 64 --impls naive --max-time 0.2",
)
LEARNED_FROM = 5  # runs, as a session does


def examine(path: Path, tell: Tell, *, sweeps: int, seed: int) -> Ended:
    """Make the sweeps that the folder lacks, each in a folder that holds those before it."""

    def missing(done: list[Figures]) -> Iterator[Figures]:
        with tempfile.TemporaryDirectory() as folder:
            for number, options in enumerate(BEFORE if len(done) < sweeps else ()):
                started(Path(folder), f"a{number}", options)
            for number in range(len(done), sweeps):
                options = drawn(seed + number)
                tell(f"sweep {number + 1} of {sweeps}: {options}")
                yield forecast(Path(folder), f"b{number:03}", options)

    return go_on(path, {"seed": seed}, missing, summarise, tables)


def drawn(seed: int) -> str:
    """The options of a random sweep; every kind comes as often."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]

    def some(names: tuple[str, ...], most: int) -> str:
        return ",".join(draw.sample(names, draw.randint(1, most)))

    dtypes = draw.choice(("float32", "float32", "bfloat16", "float16", "float32,bfloat16"))
    impls = f"--impls {some(EXACT, 3)} --dtypes {dtypes}"
    sizes = f"--heads {draw.choice((2, 8))} --head-dims {draw.choice((64, 128))}"
    lengths, more = {
        "small": (("16..128", "64..512"), f"--masks {draw.choice(('full', 'causal,window:64'))}"),
        "large": (("1024", "1024,2048", "3072"), f"--masks {draw.choice(('full', 'causal'))}"),
        "decode": (("128..1024", "2048", "512,4096"), "--workload decode"),
        "layer": (("64,256", "512"), "--workload layer"),
        "backward": (("64,256", "512"), f"--passes {draw.choice(('backward', 'both'))}"),
        "families": (("128,256", "512", "1024"), "--heads 2"),
    }.get(kind, ((), ""))
    if kind == "list":
        more = " ".join(f"--case {_case(draw)}" for _ in range(draw.randint(2, 5)))
    elif kind in ("prefill", "step"):
        model = draw.choice(MODELS if kind == "prefill" else MODELS[:3])
        more = f"--model {model} --step {'prefill' if kind == 'prefill' else 'decode'}"
        more += f" --tokens {draw.choice((128, 512, 1536))}" if model != "vit-b-16" else ""
        impls = f"--impls {some(EXACT, 2)} --dtypes {draw.choice(('float32', 'bfloat16'))}"
    elif kind == "families":
        impls = f"--impls sdpa,{some(OTHERS, 3)}"
    else:
        more += f" {sizes}"
    timing = draw.choice(("", "--max-time 0.3", "--min-time 0.02 --max-time 0.1"))
    seq_lens = f"--seq-lens {draw.choice(lengths)}" if lengths else ""
    return " ".join(f"{seq_lens} {more} {impls} {timing}".split())


def _case(draw: random.Random) -> str:
    keys = draw.choice((64, 200, 512, 1000, 2000))
    sizes = {"B": (1, 2, 4), "H": (2, 8, 16), "L": (1, keys), "S": (keys,), "D": (32, 64, 128)}
    masks = {"mask": ("full", "causal")}
    return ",".join(f"{name}={draw.choice(of)}" for name, of in {**sizes, **masks}.items())


def started(folder: Path, name: str, options: str) -> tuple[int, float, list[float]]:
    """A sweep as a user starts it: its exit code, its seconds and what it said they would be."""
    command = [sys.executable, "-m", "attnbench", "sweep", *options.split()]
    command += ["--output", str(folder), *(["--name", name] if name else ["--dry-run"])]
    begin = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s, text = time.monotonic() - begin, " ".join((ended.stdout + ended.stderr).split())
    said = re.search(r"about ([\w. ]+) \(([\w. ]+) to ([\w. ]+)\)", text)
    return ended.returncode, took_s, [_seconds(each) for each in said.groups()] if said else []


def forecast(folder: Path, name: str, options: str) -> Figures:
    """What a sweep was said to take, without runs and with those of the folder, and took."""
    with tempfile.TemporaryDirectory() as nothing:
        _, _, empty = started(Path(nothing), "", options)
    before = [load_run(path) for path in sorted(folder.iterdir())[-LEARNED_FROM:]]
    code, wall_s, used = started(folder, name, options)
    row = {"options": options, "exit": code, "wall_s": wall_s, "empty": empty, "used": used}
    return row | {"errors": errors(load_run(folder / name), before) if not code else {}}


def _seconds(text: str) -> float:
    """Read `0.35 s`, `12 min 3 s`, `2 h 5 min`."""
    parts, unit_s = text.split(), {"h": 3600.0, "min": 60.0, "s": 1.0}
    return sum(float(x) * unit_s[u] for x, u in zip(parts[::2], parts[1::2], strict=True))


def _timing(run: Run) -> tuple[float, float]:
    return run.info["settings"]["min_time_s"], run.info["settings"]["max_time_s"]


def errors(run: Run, before: list[Run]) -> dict[str, list[tuple[float, float]]]:
    """Of each stage how like the nearest kind was, and how far off the forecast, as a logarithm.

    By nothing, by the runs before, and by all other kinds of the run itself.
    """
    known, own = Forecast(_timing(run)), Forecast(_timing(run))
    for other in before:
        for part in other.parts:
            known.learn(part, _timing(other))
    for part in run.parts:
        own.learn(part)
    found: dict[str, list[tuple[float, float]]] = {stage: [] for stage in SPREAD}
    for kind, (*sums, count) in own.sums.items():
        means, like = known.off(kind)
        for stage, off, mean in zip(SPREAD, sums, means, strict=True):
            found[stage] += [(0.0, off / count), (like, off / count - mean)]
    return found


def summarise(rows: list[Figures]) -> Figures:
    """How many forecasts were near, and how far off those of the stages were."""
    summary: Figures = {"sweeps": [], "goals": {}, "stages": []}
    for row in rows:
        summary["sweeps"].append([row["options"], row["wall_s"], row["used"], row["empty"]])
    for name, factor, share, widest in (("used", 2, 0.9, 6.0), ("empty", 3, 0.8, math.inf)):
        said = [(row["wall_s"], *row[name]) for row in rows if row[name]]
        near = sum(1 / factor <= wall / seconds <= factor for wall, seconds, _, _ in said)
        inside = sum(low <= wall <= high for wall, _, low, high in said)
        ends = max((high / low for _, _, low, high in said), default=0.0)
        off = [math.log(wall / seconds) for wall, seconds, _, _ in said]
        ends_off = [
            math.log((high if x > 0 else low) / s)
            for x, (_, s, low, high) in zip(off, said, strict=True)
        ]
        needed = sorted(x / end for x, end in zip(off, ends_off, strict=True))
        summary["goals"][name] = {
            "of": len(rows), "factor": factor, "near": near, "inside": inside, "ends": ends,
            "needed": needed[int(0.9 * len(needed))] if needed else 0.0,
            "bias": sum(off) / len(off) if off else 0.0,
            "met": near >= share * len(rows) and inside >= 0.9 * len(rows) and ends <= widest,
        }  # fmt: skip
    for stage, (same, unlike) in SPREAD.items():
        for least, most in ((0.0, 0.0), (0.0, 0.4), (0.4, 0.7), (0.7, 1.0)):
            every = [pair for row in rows for pair in row["errors"].get(stage, [])]
            off = [x for like, x in every if like == most == 0 or least < like <= most]
            middle = (least + most) / 2
            if off:
                bound = middle * same + (1 - middle) * unlike
                ninety = sorted(map(abs, off))[int(0.9 * len(off))]
                span, mean = f"{least:g} – {most:g}", sum(off) / len(off)
                summary["stages"].append([stage, span, len(off), mean, ninety, bound])
    return summary | {"met": bool(rows) and all(goal["met"] for goal in summary["goals"].values())}


def tables(summary: Figures) -> list[Table]:
    """The goals, a row for each sweep, and the errors of the stages beside what is assumed."""
    goals = tuple(
        (f"{name} folder", f"{g['near']} of {g['of']} within {g['factor']}", f"{g['inside']}",
         f"{g['ends']:.1f}", f"{g['needed']:.2f}",
         f"{math.exp(g['bias']):.2f}", "met" if g["met"] else "MISSED")
        for name, g in summary["goals"].items()
    )  # fmt: skip
    shown = lambda said: "{:.1f} s ({:.1f} to {:.1f})".format(*said) if said else "–"  # noqa: E731
    sweeps = tuple(
        (options, f"{wall_s:.1f} s", shown(used), shown(empty))
        for options, wall_s, used, empty in summary["sweeps"]
    )
    stages = tuple(
        (stage, likeness, str(count), f"{mean:+.2f}", f"{ninety:.2f}", f"{bound:.2f}")
        for stage, likeness, count, mean, ninety, bound in summary["stages"]
    )
    return [
        Table(title="Forecasts of sweeps", rows=goals, header=(
            "forecast in a", "near", "inside", "ends apart at most", "of it is needed",
            "took / said", "goal",
        ), note="Of it is needed: how much of the interval, as a logarithm, holds 90 % of them."),
        Table(title="Sweeps", header=("sweep", "took", "used folder", "empty folder"), rows=sweeps),
        Table(title="Errors of the stages, as logarithms", rows=stages, header=(
            "stage", "likeness of the nearest", "cells", "mean", "90 % are below", "assumed"
        ), note="Likeness 0 is of sizes alone. Assumed is `SPREAD` at the middle likeness."),
    ]  # fmt: skip
