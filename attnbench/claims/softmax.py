"""Claims on softmax, the scaling of scores, and the first weights."""

from __future__ import annotations

import numpy as np

from attnbench.claims.claim import BASICS, CHAPTER, SCRATCH, Answer, identity
from attnbench.claims.exact import Array, decide, draws, error, said
from attnbench.claims.formulas import attention, softmax

_LENGTHS = (2, 10, 64, 513)
_WIDTHS = (16, 64, 256)


@identity(
    "softmax-rows",
    SCRATCH,
    "Step 3: Apply Softmax",
    "weights lie between 0 and 1, sum to 1 for each query, and keep the order of the scores",
)
def rows_sum_to_one() -> Answer:
    """Random scores of several lengths and spreads."""
    worst, ordered, within = 0.0, True, True
    for n in _LENGTHS:
        scores_LS = draws(1, n).normal(size=(n, n)) * n**0.5
        weights_LS = softmax(scores_LS)
        worst = max(worst, float(np.max(np.abs(weights_LS.sum(axis=-1) - 1))))
        within &= bool(np.all((weights_LS >= 0) & (weights_LS <= 1)))
        ranked = np.take_along_axis(weights_LS, np.argsort(scores_LS, axis=-1), axis=-1)
        ordered &= bool(np.all(np.diff(ranked, axis=-1) >= 0))
    broken = 0.0 if ordered and within else 1.0
    return decide(max(worst, broken), of="largest distance of a row's sum from 1,")


@identity(
    "softmax-masked",
    BASICS,
    "5. Scaled Dot-Product Attention Core",
    "adding −∞ to masked scores gives the softmax over the admitted keys alone",
    reading="every query sees at least one key; a row of −∞ alone would be undefined",
)
def masked_is_restricted() -> Answer:
    """A causal mask against the softmax of each row's admitted part."""
    worst = 0.0
    for n in _LENGTHS:
        scores_LS = draws(2, n).normal(size=(n, n))
        masked_LS = softmax(np.where(np.tri(n) > 0, scores_LS, -np.inf))
        for row in range(n):
            alone = np.zeros(n)
            alone[: row + 1] = softmax(scores_LS[row, : row + 1])
            worst = max(worst, error(masked_LS[row], alone))
    return decide(worst)


def score_variance(d: int, scale: float) -> tuple[float, float]:
    """Variance of q·k·scale over draws of normal vectors, and its standard error."""
    count = 8000
    q, k = draws(3, d).normal(size=(2, count, d))
    scores = (q * k).sum(axis=-1) * scale
    # The kurtosis of a sum of d products of two normals is 3 + 6/d.
    return float(scores.var()), d * scale**2 * float(np.sqrt((2 + 6 / d) / count))


@identity(
    "scale-variance",
    SCRATCH,
    "Step 2: Scale by √d_k",
    "dot products of random vectors grow with d, and division by √d keeps the scores' size",
)
def scaling_keeps_variance() -> Answer:
    """Variance d without the scaling and 1 with it, each within four standard errors."""
    worst, figures = 0.0, {}
    for d in _WIDTHS:
        plain, plain_se = score_variance(d, 1.0)
        scaled, scaled_se = score_variance(d, d**-0.5)
        figures[f"variance_unscaled_d{d}"] = plain
        figures[f"variance_scaled_d{d}"] = scaled
        worst = max(worst, abs(plain - d) / plain_se, abs(scaled - 1) / scaled_se)
    reason = (
        f"variance {figures['variance_unscaled_d256']:.0f} unscaled and"
        f" {figures['variance_scaled_d256']:.3f} scaled at d = 256;"
        f" at most {worst:.1f} standard errors from d and 1"
    )
    return said(worst < 4, reason, **figures)


@identity(
    "scores-times-d",
    BASICS,
    "5. Scaled Dot-Product Attention Core",
    "the scores are d_h · QKᵀ",
    wrong="the scores are QKᵀ/√d_h: multiplied by d_h their variance is d_h³ instead of 1",
    reading="taken as printed; the fraction bar and the root were probably lost in typesetting",
)
def printed_scale() -> Answer:
    """What scaling is for: the variance of the scores stays 1."""
    (printed, _), (corrected, spread) = score_variance(64, 64.0), score_variance(64, 64**-0.5)
    reason = (
        f"variance of the scores at d_h = 64: {printed:.3g} as printed, {corrected:.2f} divided"
    )
    if abs(corrected - 1) >= 4 * spread:
        return Answer(verdict="inconclusive", reason=f"{reason}, which is not 1 either")
    figures = {"variance_printed": printed, "variance_corrected": corrected}
    return said(abs(printed - 1) < 4 * 64**3 * spread and printed < 2, reason, **figures)


def jacobian_size(scores_LS: Array) -> float:
    """Typical (median over rows) Frobenius norm of the softmax's Jacobian diag(p) − ppᵀ."""
    p = softmax(scores_LS)
    squares, cubes = (p**2).sum(axis=-1), (p**3).sum(axis=-1)
    return float(np.median(np.sqrt(np.maximum(squares - 2 * cubes + squares**2, 0))))


@identity(
    "scale-gradients",
    SCRATCH,
    "Step 2: Scale by √d_k",
    "without the scaling softmax's gradients vanish as d grows; with it they do not",
)
def scaling_keeps_gradients() -> Answer:
    """Softmax's Jacobian over 64 keys at d = 4 and 256, scaled and not."""
    sizes: dict[str, float] = {}
    for d in (4, 256):
        q, k = draws(4, d).normal(size=(256, d)), draws(5, d).normal(size=(64, d))
        sizes[f"jacobian_unscaled_d{d}"] = jacobian_size(q @ k.T)
        sizes[f"jacobian_scaled_d{d}"] = jacobian_size(q @ k.T / np.sqrt(d))
    lost = sizes["jacobian_unscaled_d256"] / sizes["jacobian_unscaled_d4"]
    kept = sizes["jacobian_scaled_d256"] / sizes["jacobian_scaled_d4"]
    reason = (
        f"from d = 4 to 256 the Jacobian's norm goes to {lost:.2g} of itself unscaled,"
        f" to {kept:.2f} scaled"
    )
    return said(lost < 0.1 and 0.5 < kept < 2, reason, **sizes)


def first_step(width: int, weight_scale: float) -> tuple[float, float]:
    """Standard deviation of the first softmax's inputs, and the norm of W^Q's gradient.

    One head of 64 dimensions on 64 tokens of unit variance; the loss is a random projection of
    the output, whose gradient is passed back by hand: through V, the softmax, and K.
    """
    rng, d, n = draws(6, width), 64, 64
    x = rng.normal(size=(n, width))
    w_q, w_k, w_v = rng.normal(size=(3, width, d)) * weight_scale
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = q @ k.T / np.sqrt(d)
    weights = softmax(scores)
    passed = rng.normal(size=(n, d)) @ v.T
    at_scores = weights * (passed - (passed * weights).sum(axis=-1, keepdims=True))
    return float(scores.std()), float(np.linalg.norm(x.T @ (at_scores @ k) / np.sqrt(d)))


@identity(
    "init-small",
    BASICS,
    "Parameter Initialization Deep Dive",
    "weights of 0.01·randn keep the first softmax's inputs small, so that no large gradients"
    " come through it early in training",
    misleading="the inputs have standard deviation 1e-4·D (0.05 at D = 512): attention starts as"
    " plain averaging, and W^Q's gradient is about 30 times smaller than with 1/√D. Large"
    " scores make softmax's gradients vanish, not grow; and 0.01 is 1/√D at D = 10⁴ alone",
)
def small_weights() -> Answer:
    """Scores and gradients with 0.01 and with 1/√D, at widths 128, 512 and 2048."""
    figures, small, predicted = {}, True, True
    for width in (128, 512, 2048):
        spread, gradient = first_step(width, 0.01)
        _, usual = first_step(width, width**-0.5)
        figures[f"score_std_D{width}"] = spread
        figures[f"gradient_to_usual_D{width}"] = gradient / usual
        small &= spread < 0.5 and gradient < usual
        predicted &= abs(spread / (1e-4 * width) - 1) < 0.1
    reason = (
        f"scores of ± {figures['score_std_D512']:.3f} at D = 512"
        f" ({figures['score_std_D128']:.3f} at 128, {figures['score_std_D2048']:.3f} at 2048);"
        f" W^Q's gradient {figures['gradient_to_usual_D512']:.2g} of that with 1/√D"
    )
    return said(small and predicted, reason, **figures)


@identity(
    "online-softmax",
    CHAPTER,
    "Strategies to Mitigate Inefficiency: Memory-Efficient Implementations",
    "the same attention can be computed without ever holding the whole score matrix",
)
def online() -> Answer:
    """Blocks of keys with a running maximum and sum, against the whole."""
    worst = 0.0
    for n, block in ((64, 16), (200, 33), (513, 128)):
        q, k, v = draws(7, n).normal(size=(3, n, 32))
        top, total = np.full((n, 1), -np.inf), np.zeros((n, 1))
        gathered = np.zeros((n, 32))
        for start in range(0, n, block):
            scores = q @ k[start : start + block].T / np.sqrt(32)
            raised = np.maximum(top, scores.max(axis=-1, keepdims=True))
            powers, kept = np.exp(scores - raised), np.exp(top - raised)
            total = total * kept + powers.sum(axis=-1, keepdims=True)
            gathered = gathered * kept + powers @ v[start : start + block]
            top = raised
        worst = max(worst, error(gathered / total, attention(q, k, v)))
    return decide(worst)


@identity(
    "linear-attention",
    CHAPTER,
    "Strategies to Mitigate Inefficiency: Linear Attention",
    "with a kernel φ in place of softmax, QKᵀ need never be formed: φ(Q)(φ(K)ᵀV) is the same",
    reading="an identity of the kernel form alone; its result is not that of softmax attention",
)
def linear() -> Answer:
    """Both orders of the product, and how far the result is from softmax attention."""
    worst, apart = 0.0, 0.0
    for n in (16, 128, 400):
        q, k, v = draws(8, n).normal(size=(3, n, 16))
        phi_q, phi_k = np.maximum(q, 0) + 0.1, np.maximum(k, 0) + 0.1
        scale = phi_q @ phi_k.sum(axis=0)[:, None]
        formed = (phi_q @ phi_k.T) @ v / scale
        worst = max(worst, error(phi_q @ (phi_k.T @ v) / scale, formed))
        apart = max(apart, error(formed, attention(q, k, v)))
    return decide(worst, distance_from_softmax=apart)
