"""From the arguments of a call to its key and its description.

Each function is given what it needs of a capture, whether the output has a gradient, what the call
is inside of, and the arguments as the program gave them. It returns a key, which is cheap, what
describes the call, for new keys alone, and the address of the keys, 0 where they are in no cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attnbench.capturing.calls import Call, described
from attnbench.capturing.masks import Fingerprints, Found, classify, padding, top_left

Described = tuple[Any, Callable[[], Call], int]
Describe = Callable[..., Described]
_BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")


def _tensor(x: torch.Tensor) -> tuple[Any, ...]:
    """What tells tensors of different calls apart, but for their contents and device."""
    if x.is_nested:
        return tuple(part.shape for part in x.unbind()), x.dtype
    return x.shape, x.stride(), x.dtype


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """Where a call runs, and whether in another dtype than its tensors have."""
    device = x.device
    if not torch._C._is_any_autocast_enabled():  # 3 µs less than to ask for one device
        return device, None
    return device, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def _dropout(rate: float) -> list[str]:
    return [f"dropout {rate:g}"] * (rate > 0)


def refusals(*given: Any) -> tuple[tuple[str, str], ...]:
    """Which fast backends do not take a call of SDPA on CUDA, each with torch's first reason.

    Given are q, k, v, mask, dropout, is_causal and enable_gqa.
    """
    cuda, why = torch.backends.cuda, {}
    params = cuda.SDPAParams(*given)
    for name in ("flash", "efficient", "cudnn"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if not getattr(cuda, f"can_use_{name}_attention")(params, debug=True):
                texts = [str(warning.message).partition(" (Triggered")[0] for warning in said]
                why[name] = next(iter(texts), "torch gives no reason")
    return tuple(why.items())


def sdpa(
    prints: Fingerprints, grad: bool, outer: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Described:  # fmt: skip
    """`F.scaled_dot_product_attention`; inside of transformers with q, k and v as they were there.

    It repeats heads, and of a single query has those of a group as queries.
    """
    if query.is_nested:
        raise TypeError("a nested batch")
    op = outer.op if outer else "sdpa"
    q, k, v = shown = (outer.qkv if outer else None) or (query, key, value)
    bias = getattr(attn_mask, "variant", None)  # of torch's CausalBias, a tensor without contents
    content = str(bias) if bias is not None else prints.of(attn_mask)
    parts = [_tensor(x) for x in (shown if q is query and k is key else (*shown, query, key))]
    options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
               "enable_gqa": enable_gqa}  # fmt: skip

    def make() -> Call:
        L, S = q.shape[-2], key.shape[-2]
        if is_causal or (bias is not None and bias.name == "UPPER_LEFT"):
            mask = top_left(L, S)
        elif bias is not None or attn_mask is None:
            mask = Found("full" if bias is None else "causal", S)
        else:
            mask = classify(attn_mask[..., :L, :] if attn_mask.dim() > 1 else attn_mask, L, S)
        plain = None if bias is not None else attn_mask
        chosen = torch._fused_sdp_choice(query, key, value, attn_mask=plain, **options)
        asked = (query, key, value, plain, dropout_p, is_causal, enable_gqa)
        call = described(
            op, (q, k[..., :S, :], v[..., :S, :]), mask, device=q.device.type, scale=scale,
            grad=grad, backend=_BACKENDS[chosen], problems=_dropout(dropout_p),
        )  # fmt: skip
        return call | {"refusals": refusals(*asked) if query.is_cuda else ()}

    return (op, _place(query), *parts, content, *options.values(), grad), make, k.data_ptr()


def transformers(
    op: str, eager: bool, prints: Fingerprints, grad: bool, outer: Any, module: Any,
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    **more: Any,
) -> Described:  # fmt: skip
    """A function of transformers' registry that called no SDPA: eager, or a kernel of its own."""
    wrong = [
        text for name, text in (("position_bias", "a bias"), ("cu_seq_lens_q", "packed lengths"))
        if more.get(name) is not None
    ] + _dropout(dropout)  # fmt: skip
    scored = {"softcap": more.get("softcap")}
    scored["sinks"] = None if more.get("s_aux") is None else "learned"
    window = None if eager else more.get("sliding_window")
    causal = not eager and (getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def make() -> Call:
        L, S = query.shape[-2], key.shape[-2]
        mask = Found(f"window:{window}" if window else "causal" if causal and L > 1 else "full", S)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
            mask = classify(attention_mask[..., :S], L, S)
        elif attention_mask is not None:
            mask = Found("full", S, "a mask of a kernel's own")
        return described(op, (query, key, value), mask, device=query.device.type, scale=scaling,
                         grad=grad, problems=wrong, backend="eager" * eager, **scored)  # fmt: skip

    parts = [_tensor(x) for x in (query, key, value)]
    return (op, _place(query), *parts, prints.of(attention_mask), scaling, tuple(wrong), window,
            *scored.values(), causal, grad), make, key.data_ptr()  # fmt: skip


def multi_head(
    op: str, names: list[str], native: bool, prints: Fingerprints, grad: bool, outer: Any,
    *args: Any, **kwargs: Any,
) -> Described:  # fmt: skip
    """MultiheadAttention with weights, or a fast path: its batch is (B, L, E), or nested."""
    given = dict(zip(names, args, strict=False)) | kwargs
    x = given["src"] if "src" in given else given["query"]
    kv, mask, padded = given.get("key", x), given.get("attn_mask"), given.get("key_padding_mask")
    H = given.get("num_heads") or given["num_head"]
    if native:
        of_keys = given.get("mask_type") == 1
        mask, padded = (None, given.get("mask")) if of_keys else (given.get("mask"), None)
    more_keys = given.get("bias_k") is not None or bool(given.get("add_zero_attn"))
    dropout = given.get("dropout_p", 0.0) if given.get("training", True) else 0.0

    def make() -> Call:
        lengths = [len(part) for part in x.unbind()] if x.is_nested else []
        B, L, S = len(lengths), max(lengths, default=0), max(lengths, default=0)
        if not x.is_nested:
            B, L, S = (*x.shape[:2], kv.shape[1]) if native else (1, len(x), len(kv))
            B = x.shape[1] if not native and x.dim() == 3 else B
        by_head = mask.view(B, H, L, S) if mask is not None and mask.dim() == 3 else mask
        seen = _combined(by_head, padded, x.dtype)
        found = Found(padding(lengths) if lengths else "full", S)
        empty = partial(torch.empty, dtype=x.dtype, device="meta")
        return described(
            op, [empty(B, H, n, x.size(-1) // H) for n in (L, S, S)],
            found if seen is None else classify(seen, L, S), device=x.device.type,
            grad=grad, backend="" if native else "weights",
            problems=["keys of the module's own"] * more_keys + _dropout(dropout),
        )  # fmt: skip

    sizes = _tensor(x), None if kv is x else _tensor(kv), H
    return (op, _place(x), sizes, more_keys, dropout, prints.of(padded), prints.of(mask),
            grad), make, 0  # fmt: skip


def _combined(mask: Any, padding_BS: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Both masks, in which True drops a key, as one to be added."""
    if padding_BS is not None:
        padding_BS = padding_BS.view(-1, 1, 1, padding_BS.shape[-1])
    added = [
        torch.zeros(x.shape, dtype=dtype).masked_fill(x.cpu(), -torch.inf)
        if x.dtype is torch.bool
        else x.cpu()
        for x in (mask, padding_BS)
        if x is not None
    ]
    return sum(added[1:], added[0]) if added else None
