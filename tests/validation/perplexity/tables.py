"""The figures as tables and sentences, for the terminal and for `perplexity.md`."""

from __future__ import annotations

import math
from typing import Any

from attnbench.base import units
from tests.validation.page import Table

Figures = dict[str, Any]


def tables(summary: Figures) -> list[Table]:
    """The pairs that differ in one thing, these on the way and beyond, and each variant."""
    return [_pairs(summary), _on_the_way(summary), _variants(summary)]


def facts(summary: Figures) -> list[str]:
    """What was trained on what, for how long, and what follows from it and what does not."""
    recipe, count = summary["recipe"], units.count
    steps, batch, length = recipe["steps"], recipe["batch"], recipe["length"]
    per_word = summary["bytes_per_word"]
    return [
        f"attnbench {summary['attnbench']}, Python {summary['python']}, torch {summary['torch']}:"
        f" decoders over bytes of {count(summary['parameters'])} parameters"
        f" ({recipe['blocks']} blocks of width {recipe['width']}), trained on"
        f" {count(steps * batch * length)} bytes ({count(steps)} steps of {batch} windows of"
        f" {length}) out of {count(summary['bytes_train'])} bytes of the standard library's"
        f" docstrings, and judged on {count(summary['bytes_held_out'])} bytes of other files"
        f" ({per_word:.2f} bytes a word).",
        f"{summary['trainings']} trainings, {summary['seeds']} of each variant, each in one thread:"
        f" in the median"
        f" {units.seconds(summary['cpu_s_median'])} of processor time,"
        f" {units.seconds(summary['wall_s_median'])} by the clock.",
        "One seed gives every variant the same initial weights and the same windows in the same"
        " order. Ratios are paired by seed, with 95 % intervals by Student's t on the differences"
        " of loss: they hold what another seed would change, not another text, model or recipe.",
        f"Per word is the ratio per byte to the power {per_word:.2f}. Note 000 names neither model,"
        " data nor token, so that its figures can be held beside a ratio per word, but neither"
        " confirmed nor refuted by it.",
        "Training is short, and all variants share a recipe whose learning rate was chosen for the"
        " sinusoidal one.",
    ]


def _pairs(summary: Figures) -> Table:
    rows = []
    for pair in summary["pairs"]:
        noted = pair["noted"] or {"per_word": None, "loss": None}
        rows.append(
            (
                _subject(pair),
                _ratio(pair["per_byte"]),
                pair["lower"],
                _ratio(pair["per_word"]),
                units.digits(noted["per_word"]),
                _ratio(pair["loss"]),
                units.digits(noted["loss"]),
            )
        )
    header = (
        "perplexity of", "ratio per byte", "lower", "per word", "note 000", "loss", "note 000",
    )  # fmt: skip
    note = (
        "Lower holds where the interval lies below 1. Loss: the ratio of the losses, which is the"
        " same for bytes, words and tokens of one text. Note 000: what it says per token, and the"
        " ratio of the losses that this implies."
    )
    return Table(title="Ratios of perplexities", header=header, rows=tuple(rows), note=note)


def _on_the_way(summary: Figures) -> Table:
    pairs = summary["pairs"]
    looks = [f"{trained / 1000:.0f} kB" for trained, _ in pairs[0]["curve"]] if pairs else []
    rows = [
        (_subject(pair), *(_ratio(found) for _, found in pair["curve"]), _ratio(pair["beyond"]))
        for pair in pairs
    ]
    note = (
        "After so many bytes of the training, whose rate falls to 0 at its end: not what trainings"
        " of that length would give. Beyond: on the second half of windows of twice the trained"
        " length, at the end."
    )
    header = ("perplexity per byte of", *looks, "beyond")
    return Table(
        title="While they are trained, and beyond", header=header, rows=tuple(rows), note=note
    )


def _subject(pair: Figures) -> str:
    return f"{pair['variant']} against {pair['base']}"


def _variants(summary: Figures) -> Table:
    per_word = summary["bytes_per_word"]
    rows = [
        (
            row["variant"],
            f"{row['loss']:.3f} ({row['loss_lowest']:.3f} … {row['loss_highest']:.3f})",
            f"{math.exp(row['loss']):.2f}",
            units.digits(math.exp(per_word * row["loss"])),
            f"{math.exp(row['loss_cut']):.2f}",
            f"{math.exp(row['loss_beyond']):.2f}",
            _ratio(row["beyond_over_cut"]),
        )
        for row in summary["variants"]
    ]
    header = (
        "variant", "loss, nats per byte", "perplexity per byte", "per word", "cut", "beyond",
        "beyond over cut",
    )  # fmt: skip
    note = (
        "Loss: mean (least … largest) over the seeds; perplexities are geometric means. Cut and"
        " beyond are of the same bytes: in windows of the trained length, and as the second half of"
        " windows of twice that, where positions are new. Above 1, the longer context harms."
    )
    return Table(title="Variants", header=header, rows=tuple(rows), note=note)


def _ratio(figures: list[float | None]) -> str:
    middle, low, high = figures
    assert middle is not None
    if low is None or high is None:
        return f"{middle:.3f}"
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
