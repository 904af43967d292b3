"""How errors of approximations fall with features, rank or landmarks, beside what is expected.

`make validate PART=approximation` writes `errors.csv` and `errors.png`: the relative distance from
exact attention (root mean square, float64, two draws of inputs, one seed of the method each)
against the parameter. Expected: Performer ∝ features^(-1/2) once these outnumber exp(|q + k|²);
Linformer, whose projections are drawn and not learned, √(1 + n/rank); Nyströmformer 0 at n
landmarks and a converged inverse, and a fall before that only where tokens resemble their
neighbours (over about 16 of them in the local inputs); elsewhere A is nearly singular, and an
inverse that has not converged errs less.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from attnbench.api import Case, implementation
from attnbench.api.loader import load_built_in
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS

N, D = 512, 16
Row = tuple[str, str, int, float]
NORMAL = D**-0.5, False  # the usual scale, inputs that are not local
# Panel, what it is against, line, implementation with that left open, most of it, scale, local.
LINES = [
    ("performer", "features", f"mean |q + k|² = {size:g}", "performer:{}:seed={}", 4096,
     size / 2 / D, False)
    for size in (0.5, 2.0, 2 * math.sqrt(D))
] + [
    ("linformer", "rank", "normal inputs", "linformer:{}:seed={}", N, *NORMAL),
    ("nystrom", "landmarks", "normal inputs", "nystrom:{}", N, *NORMAL),
    ("nystrom", "landmarks", "normal, 30 iterations", "nystrom:{}:iterations=30", N, *NORMAL),
    ("nystrom", "landmarks", "local inputs", "nystrom:{}", N, D**-0.5, True),
    ("nystrom", "landmarks", "local, 30 iterations", "nystrom:{}:iterations=30", N, D**-0.5, True),
]  # fmt: skip


def error(name: str, scale: float, seed: int, *, local: bool) -> float:
    """Distance of the implementation from exact attention, over the size of that."""
    case, workload = Case(seq_len=N, head_dim=D, scale=scale, dtype="float64"), "attention"
    tensors = WORKLOADS.get(workload).tensors(case)
    WORKLOADS.get(workload).fill(case, tensors, Draw(seed=seed, local=local))
    exact = WORKLOADS.get(workload).exact_output(case, tensors)
    o = implementation(name).build(case)(*(tensors[x] for x in "qkv"))
    return float((o - exact).norm() / exact.norm())


def measured() -> list[Row]:
    """Panel, line, parameter and the mean square's root over two draws."""
    rows = []
    for panel, _, line, name, most, scale, local in LINES:
        for power in range(3, int(math.log2(most)) + 1):
            draws = [error(name.format(2**power, s), scale, s, local=local) for s in (0, 1)]
            rows.append((panel, line, 2**power, math.hypot(*draws) / math.sqrt(2)))
    return rows


def drawn(rows: list[Row]) -> Figure:
    """A panel for each method, log-log, with the expected slope or curve dashed."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    names = list(dict.fromkeys(panel for panel, *_ in rows))
    for ax, panel in zip(figure.subplots(1, len(names)), names, strict=True):
        for line in dict.fromkeys(line for own, line, *_ in rows if own == panel):
            points = [(x, y) for own, which, x, y in rows if (own, which) == (panel, line)]
            ax.loglog(*zip(*points, strict=True), marker="o", markersize=4, label=line)
            x, y = points[-1]
            if panel == "performer":
                ax.loglog([8, x], [y * (x / 8) ** 0.5, y], "--", color="#777777", linewidth=0.8)
        if panel == "linformer":
            expected = [(x, math.sqrt(1 + N / x)) for x, _ in points]
            ax.loglog(*zip(*expected, strict=True), "--", color="#777777", label="√(1 + n/rank)")
        against = next(x for own, x, *_ in LINES if own == panel)
        ax.set(title=panel, xlabel=against, ylabel="error / exact output (rms)")
        ax.legend(frameon=False, fontsize=8)
    return figure


def write(folder: Path) -> None:
    """Measure, and write the table and the figure."""
    torch.set_num_threads(1)
    load_built_in()
    rows = measured()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "errors.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("method", "inputs", "parameter", "error"), *((*x, f"{y:.4g}") for *x, y in rows)]
        )
    drawn(rows).savefig(folder / "errors.png", dpi=110, metadata={"Software": "attnbench"})
