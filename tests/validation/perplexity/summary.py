"""What the trainings come to: perplexities of each variant, and ratios paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from scipy import stats

from attnbench.base.stats import median
from attnbench.schema.finding import Verdict
from tests.validation.perplexity.model import Variant

Figures = dict[str, Any]
# Note 000: RoPE takes a perplexity from 144 to 97, several heads one's by about a fifth. It names
# neither model, data nor token. The ratio of two losses on one text is the same for every token.
ROPE = {"per_word": 97 / 144, "loss": math.log(97) / math.log(144)}
HEADS = {"per_word": 0.8, "loss": None}


def summarise(rows: list[Figures], variants: Sequence[Variant], bytes_per_word: float) -> Figures:
    """Each variant's figures, and each pair of them that differs in one thing alone."""
    variants = [variant for variant in variants if _of(rows, variant)]
    pairs = [
        compared(rows, later, earlier, bytes_per_word)
        for number, later in enumerate(variants)
        for earlier in variants[:number]
        if (later.position == earlier.position) != (later.heads == earlier.heads)
    ]
    return {
        "trainings": len(rows),
        "seeds": len({row["seed"] for row in rows}),
        "wall_s_median": median(row["wall_s"] for row in rows) if rows else None,
        "cpu_s_median": median(row["cpu_s"] for row in rows) if rows else None,
        "variants": [_variant(_of(rows, variant), variant) for variant in variants],
        "pairs": pairs,
    }


def compared(
    rows: list[Figures], variant: Variant, base: Variant, bytes_per_word: float
) -> Figures:
    """A variant's perplexity over the base's, and its loss; `curve` is the ratio on the way.

    Lower holds if it is below the base's with 95 % confidence. `noted` is what note 000 says.
    """
    own, others = _of(rows, variant), _of(rows, base)
    pairs = [(own[seed], others[seed]) for seed in sorted(own.keys() & others.keys())]
    per_byte = ratio((a["loss"], b["loss"]) for a, b in pairs)
    looks = [zip(a["curve"], b["curve"], strict=True) for a, b in pairs]
    noted = ROPE if variant.heads == base.heads else HEADS if base.heads == 1 else None
    return {
        "variant": variant.name,
        "base": base.name,
        "per_byte": per_byte,
        "per_word": [None if x is None else x**bytes_per_word for x in per_byte],
        "loss": ratio((math.log(a["loss"]), math.log(b["loss"])) for a, b in pairs),
        "beyond": ratio((a["beyond"], b["beyond"]) for a, b in pairs),
        "curve": [
            [look[0][0][0], ratio((a[1], b[1]) for a, b in look)]
            for look in zip(*looks, strict=True)
        ],
        "noted": noted,
        "lower": _verdict(*per_byte[1:]),
    }


def ratio(pairs: Iterable[tuple[float, float]]) -> tuple[float, float | None, float | None]:
    """The ratio of two perplexities from losses (nats) paired by seed, and its 95 % interval.

    The mean of the differences by Student's t, exponentiated: a perplexity is the exponential of a
    loss. Of any other quantity give the logarithms. No interval from one seed.
    """
    logs = [first - second for first, second in pairs]
    if len(logs) < 2:
        return math.exp(mean(logs)), None, None
    interval = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return math.exp(mean(logs)), math.exp(interval.low), math.exp(interval.high)


def _verdict(low: float | None, high: float | None) -> Verdict:
    if low is None or high is None or low <= 1 <= high:
        return "inconclusive"
    return "holds" if high < 1 else "refuted"


def _of(rows: list[Figures], variant: Variant) -> dict[int, Figures]:
    """The variant's trainings by seed."""
    wanted = (variant.position, variant.heads)
    return {row["seed"]: row for row in rows if (row["position"], row["heads"]) == wanted}


def _variant(rows: dict[int, Figures], variant: Variant) -> Figures:
    """Means of the losses (nats a byte) over the seeds: in all, by bytes trained on, by place."""
    runs = list(rows.values())
    means = {key: mean(row[key] for row in runs) for key in ("loss", "beyond", "cut")}
    return {
        "variant": variant.name,
        "seeds": len(runs),
        "loss": means["loss"],
        "loss_lowest": min(row["loss"] for row in runs),
        "loss_highest": max(row["loss"] for row in runs),
        "loss_beyond": means["beyond"],
        "loss_cut": means["cut"],
        "beyond_over_cut": ratio([(row["beyond"], row["cut"]) for row in runs]),
        "curve": [
            [looks[0][0], mean(loss for _, loss in looks)]
            for looks in zip(*(row["curve"] for row in runs), strict=True)
        ],
        "by_place": [mean(of) for of in zip(*(row["by_place"] for row in runs), strict=True)],
    }
