"""From the arguments of a call to its key, its description, and the storage of its keys.

Each function is given what it needs of a capture, the output, what the call is inside of, and the
arguments as the program gave them. The key is cheap; what describes runs for new keys alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnbench.capturing.calls import Call, described, sdpa_backend
from attnbench.capturing.masks import Fingerprints, Found, classify, padding, top_left

Described = tuple[Any, Callable[[], Call], int]
Describe = Callable[..., Described]


def _tensor(x: torch.Tensor) -> tuple[Any, ...]:
    """What tells tensors of different calls apart, but for their contents."""
    if x.is_nested:
        return tuple(part.shape for part in x.unbind()), x.dtype, x.device
    return x.shape, x.stride(), x.dtype, x.device, torch.is_autocast_enabled(x.device.type)


def _grad(out: Any) -> bool:
    return bool(getattr(out, "requires_grad", False))


def sdpa(
    prints: Fingerprints, out: Any, outer: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Described:  # fmt: skip
    """`F.scaled_dot_product_attention`; inside of transformers with q, k and v as they were there.

    It repeats heads, and of a single query has those of a group as queries.
    """
    op = outer.op if outer else "sdpa"
    q, k, v = (outer.qkv if outer else None) or (query, key, value)
    bias = getattr(attn_mask, "variant", None)  # of torch's CausalBias, a tensor without contents
    content = str(bias) if bias is not None else prints.of(attn_mask)
    parts = (_tensor(query), _tensor(key), _tensor(q), _tensor(k), _tensor(v))
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    known = (op, *parts, content, dropout_p, *options.values(), _grad(out))

    def make() -> Call:
        if query.is_nested:
            return _packed(op, query, key, value, is_causal, scale, dropout_p, _grad(out))
        L, S = q.shape[-2], key.shape[-2]
        if bias is not None:
            mask = top_left(L, S) if bias.name == "UPPER_LEFT" else Found("causal", S)
        elif attn_mask is not None:
            mask = classify(attn_mask[..., :L, :] if attn_mask.dim() > 1 else attn_mask, L, S)
        else:
            mask = top_left(L, S) if is_causal else Found("full", S)
        plain = None if bias is not None else attn_mask
        chosen = sdpa_backend(query, key, value, plain, dropout_p, **options)
        return described(
            op, (q, k[..., :S, :], v[..., :S, :]), mask, scale=scale, grad=_grad(out),
            problems=_dropout(dropout_p), **chosen,
        )  # fmt: skip

    return known, make, k.data_ptr() if not k.is_nested else 0


def _dropout(rate: float) -> list[str]:
    return [f"dropout {rate:g}"] * (rate > 0)


def _empty(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """A tensor of sizes and dtype alone."""
    return torch.empty(sizes, dtype=x.dtype, device="meta")


def _packed(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool,
    scale: float | None, dropout_p: float, grad: bool,
) -> Call:  # fmt: skip
    """A nested batch, as packed documents."""
    lengths, kv_lengths = ([part.shape[-2] for part in x.unbind()] for x in (q, k))
    text = f"document:{'+'.join(map(str, lengths))}" + ":causal=0" * (not causal)
    sizes = ((q, sum(lengths)), (k, sum(kv_lengths)), (v, sum(kv_lengths)))
    tensors = [_empty(x, 1, x.size(1), n, x.size(-1)) for x, n in sizes]
    wrong = _dropout(dropout_p) + ["a nested batch with L ≠ S"] * (lengths != kv_lengths)
    return described(
        op, tensors, Found(text, sum(kv_lengths)), scale=scale, problems=wrong, grad=grad,
        device=q.device.type,
    )  # fmt: skip


def transformers(
    op: str, eager: bool, prints: Fingerprints, out: Any, outer: Any, module: Any,
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    **more: Any,
) -> Described:  # fmt: skip
    """A function of transformers' registry that called no SDPA: eager, or a kernel of its own."""
    content = prints.of(attention_mask)
    wrong = [
        text for name, text in (("softcap", "a soft-cap"), ("s_aux", "sinks"),
                                ("position_bias", "a bias"), ("cu_seq_lens_q", "packed lengths"))
        if more.get(name) is not None
    ] + _dropout(dropout)  # fmt: skip
    window = None if eager else more.get("sliding_window")
    causal = not eager and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    known = (op, _tensor(query), _tensor(key), _tensor(value), content, scaling, tuple(wrong),
             window, causal, _grad(out))  # fmt: skip

    def make() -> Call:
        L, S = query.shape[-2], key.shape[-2]
        mask = Found(f"window:{window}" if window else "causal" if causal and L > 1 else "full", S)
        if isinstance(attention_mask, torch.Tensor):
            if attention_mask.dim() == 2:  # keys that are there, of flash-attention
                mask = Found("full", S, "padding of a kernel that unpads")
            else:
                mask = classify(attention_mask[..., :S], L, S)
        elif attention_mask is not None:
            mask = Found("full", S, f"a {type(attention_mask).__name__}")
        return described(op, (query, key, value), mask, scale=scaling, grad=_grad(out),
                         problems=wrong, backend="eager" * eager)  # fmt: skip

    return known, make, key.data_ptr()


def _heads(x: torch.Tensor, B: int, H: int, n: int, D: int) -> torch.Tensor:
    """Sizes and strides of q, k or v as MultiheadAttention projects them."""
    return _empty(x, n, B, H, D).permute(1, 2, 0, 3)


def multi_head(
    prints: Fingerprints, out: Any, outer: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, embed_dim: int, heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, *rest: Any,
    training: bool = True, key_padding_mask: Any = None, attn_mask: Any = None, **more: Any,
) -> Described:  # fmt: skip
    """`F.multi_head_attention_forward` with weights: baddbmm, softmax and bmm, no SDPA."""
    rate = dropout_p if training else 0.0
    known = ("mha", _tensor(query), _tensor(key), heads, rate, add_zero_attn, bias_k is None,
             prints.of(key_padding_mask), prints.of(attn_mask), _grad(out))  # fmt: skip

    def make() -> Call:
        L, S, B = query.shape[0], key.shape[0], query.shape[1] if query.dim() == 3 else 1
        D, padded = embed_dim // heads, key_padding_mask
        if attn_mask is not None and attn_mask.dim() == 3:
            seen = _combined(attn_mask.view(B, heads, L, S), padded, query.dtype)
        else:
            seen = _combined(attn_mask, padded, query.dtype)
        wrong = ["keys of the module's own"] * (bias_k is not None or add_zero_attn)
        sizes = ((query, L), (key, S), (value, S))
        return described(
            "MultiheadAttention", [_heads(x, B, heads, n, D) for x, n in sizes],
            Found("full", S) if seen is None else classify(seen, L, S), scale=None,
            grad=_grad(out), device=query.device.type, backend="weights",
            problems=wrong + _dropout(rate),
        )  # fmt: skip

    return known, make, key.data_ptr()


def _combined(attn_mask: Any, padding_BS: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Both masks of MultiheadAttention, in which True drops a key, as one to be added."""
    if padding_BS is not None:
        padding_BS = padding_BS.view(-1, 1, 1, padding_BS.shape[-1])
    added = [
        torch.zeros(x.shape, dtype=dtype).masked_fill(x.cpu(), -torch.inf)
        if x.dtype is torch.bool
        else x.cpu()
        for x in (attn_mask, padding_BS)
        if x is not None
    ]
    return sum(added[1:], added[0]) if added else None


def _native(
    op: str, prints: Fingerprints, out: Any, x: torch.Tensor, kv: torch.Tensor, embed_dim: int,
    heads: int, mask: Any, mask_type: int | None,
) -> Described:  # fmt: skip
    """A fast path: its batch is (B, L, E), or nested, which it pads."""
    known = (op, _tensor(x), _tensor(kv), heads, prints.of(mask), mask_type)

    def make() -> Call:
        D = embed_dim // heads
        if x.is_nested:
            lengths = [part.shape[0] for part in x.unbind()]
            B, L, S = len(lengths), max(lengths), max(lengths)
            found = Found(padding(lengths), S)
        else:
            B, L, S, found = x.shape[0], x.shape[1], kv.shape[1], Found("full", kv.shape[1])
        if mask is not None:
            padded = mask_type == 1
            seen = _combined(None if padded else mask, mask if padded else None, x.dtype)
            assert seen is not None
            found = classify(seen, L, S)
        tensors = (_empty(x, B, heads, n, D) for n in (L, S, S))
        return described(op, tensors, found, scale=None, device=x.device.type, backend="fast path")

    return known, make, 0


def native_multi_head(
    prints: Fingerprints, out: Any, outer: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, embed_dim: int, num_heads: int, *rest: Any, mask: Any = None,
    mask_type: int | None = None, **more: Any,
) -> Described:  # fmt: skip
    """The fast path of MultiheadAttention, called with all of its arguments by place."""
    mask = rest[4] if len(rest) > 4 else mask
    mask_type = rest[7] if len(rest) > 7 else mask_type
    op = "MultiheadAttention, fast path"
    return _native(op, prints, out, query, key, embed_dim, num_heads, mask, mask_type)


def encoder_layer(
    prints: Fingerprints, out: Any, outer: Any, src: torch.Tensor, embed_dim: int, num_heads: int,
    *rest: Any, mask: Any = None, mask_type: int | None = None, **more: Any,
) -> Described:  # fmt: skip
    """The fast path of TransformerEncoderLayer, attention with all that follows it."""
    mask = rest[16] if len(rest) > 16 else mask
    mask_type = rest[17] if len(rest) > 17 else mask_type
    op = "encoder layer, fast path"
    return _native(op, prints, out, src, src, embed_dim, num_heads, mask, mask_type)
