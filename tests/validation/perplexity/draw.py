"""The picture: perplexity by bytes trained on, and by place in a window of twice the length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

from attnbench.report import figures
from tests.validation.page import write_picture

Figures = dict[str, Any]


def draw(summary: Figures, folder: Path) -> str:
    """Write perplexity.png and perplexity.svg, and return the Markdown; nothing without trainings.

    Raises:
        StoreError: the folder cannot be written.
    """
    variants = summary["variants"]
    if not variants:
        return ""
    length = summary["recipe"]["length"]
    names = [row["variant"] for row in variants]
    looks = dict(zip(names, list(figures.KNOWN.values())[::2], strict=False))
    with mpl.rc_context(figures.RC):
        figure, (by_bytes, by_place) = figures.panels(
            2, 3.0, "Perplexity per byte of held-out text", "means over the seeds"
        )
        for row in variants:
            look = looks[row["variant"]]
            style = {"color": look.colour, "marker": look.marker, **figures.FILLED}
            trained, losses = zip(*row["curve"], strict=True)
            millions = [number / 1e6 for number in trained]
            by_bytes.plot(millions, [math.exp(loss) for loss in losses], **style)
            width = 2 * length / len(row["by_place"])
            places = [(i + 0.5) * width for i in range(len(row["by_place"]))]
            by_place.plot(places, [math.exp(loss) for loss in row["by_place"]], **style)
        by_bytes.set(title="while it is trained", xlabel="million bytes trained on")
        by_place.axvline(length, color=figures.QUIET, linestyle="--", linewidth=0.8)
        by_place.set(title="by place; dashed: the trained length", xlabel="place in the window")
        figures.legend(figure, names, looks)
        return write_picture(
            figure, "perplexity", folder, "perplexities while trained and by place"
        )
