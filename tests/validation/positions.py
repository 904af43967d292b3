"""What position encodings cost, from a run, and what they do past the length of training.

The scores of the second part follow from the definitions: nothing is trained or timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.analysis.table import load, rope_cost
from attnbench.api import position_bias
from attnbench.base.parameters import base_name
from attnbench.base.units import size
from attnbench.execution.store import Run
from attnbench.report import figures
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.position import POSITIONS
from tests.validation.page import Table, markdown, write_picture, write_texts

TRAINED, LENGTH, DIMS = 512, 2048, 64
ROTARY = (
    "rope",
    "rope-linear",
    "rope-ntk",
    f"rope-yarn:factor=4:length={TRAINED}",
    f"rope-llama3:factor=4:length={TRAINED}:base=10000",
)
BIASES = ("alibi", "t5", "shaw")
IMPLS = ("naive", "sdpa", "chunked")


def examine(run: Run) -> str:
    """Write positions.md and its pictures into the run's folder; return the page."""
    costs, frame = rope_cost(run), load(run)
    with mpl.rc_context(figures.RC):
        alt = "Scores against distance, for rotary encodings and biases, past the trained length"
        picture = write_picture(_patterns(), "patterns", run.path, alt)
        alt = "Time added by each position encoding, with intervals"
        picture = write_picture(_costs(costs), "costs", run.path, alt) + "\n\n" + picture
    tables = [*cost_tables(costs), *memory_tables(frame), beyond()]
    page = markdown("What position encodings cost, and how far they reach", tables, picture=picture)
    write_texts(run.path, {"positions.md": page})
    return page


def cost_tables(costs: pd.DataFrame) -> Iterable[Table]:
    """Of each workload and n: time with an encoding / without, in pairs, with their intervals."""
    for (workload, n), rows in costs.groupby(["workload", "seq_len"]):
        impls = _in_order(rows["impl"], IMPLS)
        cells = {(r.position, r.impl): _interval(r) for r in rows.itertuples()}
        positions = _in_order(rows["position"], POSITIONS.names())
        yield Table(
            title=f"Time added in {workload}, n = {n}",
            header=("position", *impls),
            rows=tuple((p, *(cells.get((p, impl), "–") for impl in impls)) for p in positions),
        )


def _in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    return sorted(set(names), key=lambda name: order.index(base_name(name)))


def _interval(row: object) -> str:
    added = [100 * (getattr(row, name) - 1) for name in ("cost", "cost_low", "cost_high")]
    return "{:+.0f} % [{:+.0f}, {:+.0f}]".format(*added)


def memory_tables(frame: pd.DataFrame) -> Iterable[Table]:
    """Prepared memory and workspace of attention at the largest n."""
    rows = frame[(frame["workload"] == "attention") & (frame["status"] == "ok")]
    rows = rows[rows["seq_len"] == rows["seq_len"].max()]
    impls = _in_order(rows["impl"], IMPLS)
    positions = _in_order(rows["position"], POSITIONS.names())
    for column, what in (("prepared", "held from call to call"), ("workspace", "of a call")):
        cells = {
            (r.position, r.impl): size(getattr(r, f"memory_{column}_bytes"))
            for r in rows.itertuples()
        }
        yield Table(
            title=f"Memory {what}, n = {rows['seq_len'].max()}",
            header=("position", *impls),
            rows=tuple((p, *(cells.get((p, impl), "–") for impl in impls)) for p in positions),
        )


def frequencies(text: str) -> list[float]:
    """The angles a place of the encoding at n = LENGTH."""
    position = parse_position(text)
    return position.encoding.frequencies(position.values, DIMS, LENGTH)


def kernel(text: str, distances: Sequence[float]) -> list[float]:
    """Scores of a key equal to its query, both of variance 1, at each distance: √D · mean of cos.

    The mean over directions of q, times what the encoding multiplies scores by.
    """
    position, thetas = parse_position(text), frequencies(text)
    most = math.sqrt(DIMS) * position.encoding.factor(position.values) ** 2 / len(thetas)
    return [most * sum(math.cos(d * theta) for theta in thetas) for d in distances]


def beyond() -> Table:
    """What a model trained to n = TRAINED meets at n = LENGTH."""
    rows = []
    for text in ROTARY:
        position, thetas = parse_position(text), frequencies(text)
        pairs = list(zip(thetas, frequencies("rope"), strict=True))
        # A pair that went round in training has been at every angle.
        new = [
            theta * LENGTH > trained * TRAINED * (1 + 1e-9)
            for theta, trained in pairs
            if trained * TRAINED < 2 * math.pi
        ]
        finest = thetas[0] / frequencies("rope")[0]
        scores = position.encoding.factor(position.values) ** 2
        shown = f"{sum(new)} of {len(thetas)}", f"{finest:.3g}", f"{scores:.3g}"
        rows.append((position.name, *shown))
    return Table(
        title=f"Trained to n = {TRAINED}, used at n = {LENGTH} (D = {DIMS})",
        header=("encoding", "pairs at new angles", "angle between neighbours", "scores times"),
        rows=tuple(rows),
        note="The angle between neighbours is that of the fastest pair, as a part of RoPE's.",
    )


def _patterns() -> Figure:
    figure = Figure(figsize=(figures.NARROW * 2, 3.6), dpi=figures.DPI, layout="constrained")
    rotary, biases = figure.subplots(1, 2)
    distances = list(dict.fromkeys(int(2 ** (x / 24)) for x in range(24 * 11 + 1)))
    looks = figures.looks([*ROTARY, *BIASES], {})
    for text in ROTARY:
        line = {"color": looks[text].colour, "label": parse_position(text).name, "linewidth": 1.3}
        rotary.plot(distances, kernel(text, distances), **line)
    rotary.set_title("Rotary: score of a key equal to its query", loc="left")
    torch.manual_seed(0)
    query = torch.randn(1, 4, 1, DIMS)
    for text in BIASES:
        case = Case(
            kv_heads=1, seq_len=1, kv_len=LENGTH + 1, mask=parse_mask("causal"),
            position=parse_position(text),
        )  # fmt: skip
        bias = position_bias(case)
        assert bias is not None
        columns = bias.columns(query * DIMS**-0.5)
        whole = bias.block(columns, slice(0, 1), slice(0, LENGTH + 1))
        added = whole.expand(1, 4, 1, LENGTH + 1)[0, :, 0].flip(-1)  # by distance back
        for head in range(4) if text == "alibi" else (0,):
            name = {"alibi": "alibi, a head each", "t5": "t5, one head", "shaw": "shaw, one query"}
            biases.plot(
                distances, added[head, distances].tolist(), color=looks[text].colour,
                label=name[text] if head == 0 else None, linewidth=1.3,
            )  # fmt: skip
    biases.set_ylim(-12, 4)
    biases.set_title("Biases: what is added to the score", loc="left")
    for ax in (rotary, biases):
        _finish(ax)
    return figure


def _finish(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlabel("distance")
    ax.axvline(TRAINED, color=figures.QUIET, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.annotate(
        "trained so far", (TRAINED, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -2),
        textcoords="offset points", va="top", color=figures.QUIET, fontsize=7.5,
    )  # fmt: skip
    ax.legend(frameon=False, fontsize=7.5, loc="lower left")


def _costs(costs: pd.DataFrame) -> Figure:
    groups = list(costs.groupby(["workload", "seq_len"]))
    looks = figures.looks(dict.fromkeys(costs["impl"]))
    height = 1.2 + 0.23 * costs["position"].nunique()
    figure = Figure(
        figsize=(2.6 * len(groups) + 1.6, height), dpi=figures.DPI, layout="constrained"
    )
    for ax, ((workload, n), rows) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True
    ):
        impls = _in_order(rows["impl"], IMPLS)
        positions = _in_order(rows["position"], POSITIONS.names())
        for number, impl in enumerate(impls):
            some = rows[rows["impl"] == impl]
            places = [positions.index(p) + 0.2 * (number - 1) for p in some["position"]]
            bars = [some["cost"] - some["cost_low"], some["cost_high"] - some["cost"]]
            ax.errorbar(
                some["cost"], places, xerr=bars, fmt=looks[impl].marker, color=looks[impl].colour,
                markersize=4, linewidth=1, label=impl,
            )  # fmt: skip
        ax.axvline(1, color=figures.QUIET, linewidth=0.9)
        ax.set_yticks(range(len(positions)), positions)
        ax.invert_yaxis()
        ax.set_title(f"{workload}, n = {n}", loc="left")
        ax.set_xlabel("time / time without")
    figure.axes[0].legend(frameon=False, fontsize=7.5)
    return figure


def examine_folder(name: str, output: Path) -> str:
    """As `examine`, of a run by its name or folder."""
    from attnbench.execution.store import find_run, load_run

    return examine(load_run(find_run(name, output)))
