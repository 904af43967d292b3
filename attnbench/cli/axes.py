"""The axes of a sweep as options: what `sweep` multiplies out, and what `gate` watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from attnbench.cli.options import NAMES, SIZES, Command

# Option, field of Axes, type, help. One row an axis; None as a default keeps the axis's own.
AXES: tuple[tuple[str, str, Any, str], ...] = (
    ("--passes", "passes", NAMES, "forward, backward, both [forward]"),
    ("--dtypes", "dtypes", NAMES, "float32, bfloat16, float16, float64 [float32]"),
    ("--batch-sizes", "batch_sizes", SIZES, "B [1]"),
    ("--heads", "heads", SIZES, "query heads H [4]"),
    ("--kv-heads", "kv_heads", SIZES, "key/value heads G, a divisor of H [as heads]"),
    (
        "--seq-lens",
        "seq_lens",
        SIZES,
        "queries L, or the context of decode: 128,256 or 128..8192 [512]",
    ),
    ("--kv-lens", "kv_lens", SIZES, "keys and values S [as seq-lens]"),
    ("--head-dims", "head_dims", SIZES, "D [64]"),
    ("--value-dims", "value_dims", SIZES, "V [as head-dims]"),
    ("--masks", "masks", NAMES, "full, causal, window:256 [full]"),
    ("--positions", "positions", NAMES, "none, rope, rope-interleaved, rope:500000 [none]"),
    (
        "--widths",
        "widths",
        SIZES,
        "layer, decode, recurrent: model width E; heads stay and D = E/H, or with --head-dims"
        " alone D stays and H = E/D [heads x head-dim]",
    ),
    ("--projections", "projections", NAMES, "layer: fused, separate, per-head [fused]"),
    ("--caches", "caches", NAMES, "decode: rerun, none, concat, static [static]"),
    ("--new-tokens", "new_tokens", SIZES, "decode: tokens generated a call [8]"),
    ("--impls", "impls", NAMES, "implementations by name [all]"),
)


def axes_options(seq_lens: str = "512") -> Callable[[Command], Command]:
    """`--workload`, and an option for each axis; `seq_lens` is what help says of their default."""

    def add(command: Command) -> Command:
        for flag, name, kind, text in reversed(AXES):
            shown = text.replace("[512]", f"[{seq_lens}]")
            command = click.option(flag, name, type=kind, help=shown)(command)
        return click.option(
            "--workload", metavar="NAME", help="attention, layer, decode or recurrent [attention]"
        )(command)

    return add
