"""Claims of the notes' worked examples: numbers and shapes, computed again."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import BASICS, CHAPTER, SCRATCH, Answer, identity
from attnbench.claims.exact import Array, listed, rounded, said
from attnbench.claims.formulas import merge, softmax, split

COMPLETE = "Practical Example: Complete Attention"
Q = np.array([[0.9, 0.3], [0.6, 0.8]])
K = np.array([[0.8, 0.4], [0.5, 0.9]])
V = np.array([[1.2, 0.7], [0.9, 1.1]])
SCALED = Q @ K.T / np.sqrt(2)


@identity(
    "example-softmax",
    SCRATCH,
    "Step 3: Apply Softmax",
    "softmax of [2.4, 1.2, 0.3] is [0.66, 0.24, 0.10]",
    wrong="it is [0.70, 0.21, 0.09]",
)
def softmax_of_three() -> Answer:
    """Computed, to half a unit of the last decimal."""
    return rounded(np.array([0.66, 0.24, 0.10]), softmax(np.array([2.4, 1.2, 0.3])))


CAT = np.array([0.4, 0.9, 0.5])


@identity(
    "example-scale",
    SCRATCH,
    "Step 4: Weighted Sum of Values",
    "the scores [0.4, 0.9, 0.5] divided by √64 are [0.05, 0.11, 0.06]",
)
def scores_of_cat() -> Answer:
    """Computed, to half a unit of the last decimal."""
    return rounded(np.array([0.05, 0.11, 0.06]), CAT / np.sqrt(64))


@identity(
    "example-cat",
    SCRATCH,
    "Step 4: Weighted Sum of Values",
    "the softmax of these scaled scores is [0.3, 0.5, 0.2]",
    wrong="it is nearly uniform, [0.32, 0.35, 0.33]; and 0.3 for a score of 0.4 beside 0.2 for 0.5"
    " would turn their order round",
)
def weights_of_cat() -> Answer:
    """Computed from the exact scaled scores; one printed decimal allows for half a tenth."""
    printed, exact = np.array([0.3, 0.5, 0.2]), softmax(CAT / np.sqrt(64))
    off = float(np.max(np.abs(printed - exact)))
    ordered = bool(np.array_equal(np.argsort(printed), np.argsort(CAT)))
    reason = (
        f"computed {listed(exact, 3)}; the order of the scores is {'' if ordered else 'not '}kept"
    )
    return said(off <= 0.05 and ordered, reason, computed=listed(exact, 4), largest_difference=off)


@identity(
    "example-products",
    SCRATCH,
    COMPLETE,
    "for two words QKᵀ is [[0.84, 0.72], [0.80, 1.02]]",
)
def two_by_two() -> Answer:
    """Computed, to half a unit of the last decimal."""
    return rounded(np.array([[0.84, 0.72], [0.80, 1.02]]), Q @ K.T)


@identity(
    "example-scaled",
    SCRATCH,
    COMPLETE,
    "divided by √2 = 1.41 they are [[0.60, 0.51], [0.57, 0.72]]",
    misleading="the first is 0.59: 0.60 comes of dividing by the rounded 1.41; nothing after it"
    " changes",
    reading="by 1.41, as printed",
)
def divided_by_root() -> Answer:
    """By 1.41; and how far the printed figures are from those by √2."""
    printed = np.array([[0.60, 0.51], [0.57, 0.72]])
    off = float(np.max(np.abs(printed - SCALED)))
    return rounded(printed, Q @ K.T / 1.41, by_root_two=listed(SCALED, 4), off_by_root_two=off)


@identity(
    "example-weights",
    SCRATCH,
    COMPLETE,
    "their softmax is [0.52, 0.48] for the first word and [0.46, 0.54] for the second",
)
def two_softmaxes() -> Answer:
    """Computed without rounding between."""
    return rounded(np.array([[0.52, 0.48], [0.46, 0.54]]), softmax(SCALED))


@identity(
    "example-output",
    SCRATCH,
    COMPLETE,
    "the first word's output is [1.06, 0.89]",
)
def first_output() -> Answer:
    """Computed without rounding between."""
    return rounded(np.array([1.06, 0.89]), (softmax(SCALED) @ V)[0])


@identity(
    "example-perplexity",
    BASICS,
    "Experimental Results",
    "from 144 to 97 is a reduction by 32.6 %",
    reading="as arithmetic; the perplexities themselves are rope-perplexity",
)
def reduction() -> Answer:
    """100 · (1 − 97/144)."""
    percent = 100 * (1 - 97 / 144)
    return said(abs(percent - 32.6) <= 0.05, f"computed {percent:.2f} %", percent=percent)


def _shapes(found: dict[str, tuple[int, ...]], printed: dict[str, tuple[int, ...]]) -> Answer:
    wrong = {name: shape for name, shape in found.items() if printed[name] != shape}
    texts = [f"{name} is {shape}, printed {printed[name]}" for name, shape in wrong.items()]
    reason = "; ".join(texts) or f"{len(found)} shapes as printed: {', '.join(found)}"
    return said(not wrong, reason, shapes=len(found), wrong=len(wrong))


@identity(
    "shapes-code",
    BASICS,
    "Workflow explanation",
    "the shapes along the code: 512 → 1536 → 3 × 512; (2, 5, 8) → (2, 5, 2, 4) → (2, 2, 5, 4);"
    " scores (B, H, S, S); merged (B, S, D)",
)
def shapes_of_the_code() -> Answer:
    """The printed operations on zeros of the printed sizes."""
    combined = np.zeros((2, 5, 512)) @ np.zeros((3 * 512, 512)).T
    viewed = np.zeros((2, 5, 8)).reshape(2, 5, 2, 4)
    heads = viewed.transpose(0, 2, 1, 3)
    out = (heads @ heads.swapaxes(-1, -2)) @ heads
    found = {
        "x @ qkv.T": combined.shape,
        "a third of it": np.split(combined, 3, axis=-1)[0].shape,
        "view": viewed.shape,
        "transpose": heads.shape,
        "scores": (heads @ heads.swapaxes(-1, -2)).shape,
        "merged": out.transpose(0, 2, 1, 3).reshape(2, 5, 8).shape,
    }
    printed: dict[str, tuple[int, ...]] = {
        "x @ qkv.T": (2, 5, 1536),
        "a third of it": (2, 5, 512),
        "view": (2, 5, 2, 4),
        "transpose": (2, 2, 5, 4),
        "scores": (2, 2, 5, 5),
        "merged": (2, 5, 8),
    }
    return _shapes(found, printed)


@identity(
    "shapes-original",
    SCRATCH,
    "Dimension Flow Example",
    "8 heads of 512/8 = 64: (3, 512) → (3, 64) a head → (3, 64) after attention → (3, 512)"
    " side by side → (3, 512); scores of (10, 64) are (10, 10)",
)
def shapes_of_the_original() -> Answer:
    """The steps on zeros of the printed sizes."""
    x = np.zeros((3, 512))
    head = x @ np.zeros((512, 512 // 8))
    after = (head @ head.T) @ head
    beside = np.concatenate([after] * 8, axis=-1)
    ten: Array = np.zeros((10, 64))
    found: dict[str, tuple[int, ...]] = {
        "a head": head.shape,
        "after attention": after.shape,
        "side by side": beside.shape,
        "projected": (beside @ np.zeros((8 * 64, 512))).shape,
        "scores of ten": (ten @ ten.T).shape,
    }
    printed: dict[str, tuple[int, ...]] = {
        "a head": (3, 64),
        "after attention": (3, 64),
        "side by side": (3, 512),
        "projected": (3, 512),
        "scores of ten": (10, 10),
    }
    return _shapes(found, printed)


@identity(
    "shapes-toy",
    CHAPTER,
    "A Simple Example",
    "4 tokens of width 8: one 4 × 4 score matrix with one head, two with two heads of 4, each"
    " with an output of 4 × 4; side by side 4 × 8",
)
def shapes_of_the_toy() -> Answer:
    """Split into one head and into two."""
    x = np.arange(32.0).reshape(4, 8)
    one, two = split(x, 1), split(x, 2)
    scores = two @ two.swapaxes(-1, -2)
    found = {
        "scores of one head": (one @ one.swapaxes(-1, -2)).shape,
        "scores of two heads": scores.shape,
        "outputs of two heads": (scores @ two).shape,
        "side by side": merge(scores @ two).shape,
    }
    printed = {
        "scores of one head": (1, 4, 4),
        "scores of two heads": (2, 4, 4),
        "outputs of two heads": (2, 4, 4),
        "side by side": (4, 8),
    }
    return _shapes(found, printed)


@identity(
    "shapes-cache",
    CHAPTER,
    "4. Shapes and Practical Considerations",
    "with q of (B, h, 1, d_k) and a cache of (B, h, T, d_k) the scores are (B, h, 1, T)",
)
def shapes_of_the_cache() -> Answer:
    """The product on zeros, and the output's shape."""
    q, k = np.zeros((2, 3, 1, 4)), np.zeros((2, 3, 7, 4))
    scores = q @ k.swapaxes(-1, -2)
    found = {"scores": scores.shape, "output": (scores @ k).shape}
    return _shapes(found, {"scores": (2, 3, 1, 7), "output": (2, 3, 1, 4)})
