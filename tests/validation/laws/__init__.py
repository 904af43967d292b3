"""Kernels of known law, measured on a busy machine and imagined: are the verdicts right?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.validation.laws import imagined, live
from tests.validation.runner import Ended, Figures, Tell, go_on


def examine(path: Path, tell: Tell, *, runs: int, neighbours: int, draws: int, seed: int) -> Ended:
    """Judge `draws` imagined series of each kernel, and `runs` sweeps beside `neighbours`.

    Raises:
        StoreError: the folder cannot be written, or holds runs that were asked for differently.
    """

    def missing(done: list[Figures]) -> Iterator[Figures]:
        known = {(row["kernel"], row["range"], row["draws"]) for row in done if "kernel" in row}
        for name, sizes in imagined.ASKED:
            if (name, imagined.label(sizes), draws) not in known:
                tell(f"{draws} imagined series: {name}, n = {imagined.label(sizes)}")
                yield imagined.judged(name, sizes, draws, seed)
        for number in range(sum("kernel" not in row for row in done), runs):
            tell(f"sweep {number + 1} of {runs}")
            yield live.measured(neighbours, seed + number)

    def summarise(rows: list[Figures]) -> Figures:
        measured = live.summarise([row for row in rows if "kernel" not in row])
        drawn = imagined.summarise([row for row in rows if row.get("draws") == draws])
        return {"live": measured, "imagined": drawn, "met": measured["met"] and drawn["met"]}

    return go_on(
        path, {"neighbours": neighbours, "seed": seed}, missing, summarise,
        lambda summary: [live.table(summary), imagined.table(summary["imagined"])],
    )  # fmt: skip
