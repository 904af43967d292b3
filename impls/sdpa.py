"""torch's scaled_dot_product_attention: as torch chooses, or with one of its kernels forced.

A route is how SDPA is asked: the name of a kernel to force, `any` (torch chooses), or `mask` (torch
chooses with a boolean mask that is always passed).
"""

import dataclasses
import functools
import importlib.util
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import (
    ALL_BIASES,
    ALL_MASKS,
    AttentionCall,
    Case,
    Estimate,
    Mask,
    attention_builder,
    bias_flops,
    core_flops,
    dense_bias,
    dense_mask,
    mask_for,
    visible_blocks,
)

Build = Callable[[Case], AttentionCall]
# The switches in torch.backends.cuda; they govern the CPU kernels, too.
SWITCHES = {"math": "math", "flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}


def masking(case: Case, route: str) -> str:
    """How the mask goes in: `none`, `is_causal`, `lower_right`, `dense`, in a `bias` or `sinks`."""
    if case.sinks:
        return "sinks"
    if case.position.encoding.kind == "bias":
        return "bias"
    if route != "mask" and case.unmasked:
        return "none"
    if route == "mask" or case.mask.text != "causal":
        return "dense"
    if case.mask.after == case.seq_len - case.kv_len:  # else it is not top-left
        return "is_causal"
    # is_causal is top-left where L != S. The bottom-right variant has kernels on CUDA alone, and
    # torch warns that they give NaN where queries see no key.
    lower_right = case.device == "cuda" and route in ("flash", "efficient")
    return "lower_right" if lower_right and case.seq_len < case.kv_len else "dense"


def build(route: str, case: Case, attend: Any = scaled_dot_product_attention) -> AttentionCall:
    """SDPA (or what takes its arguments) along the route, with all that the case fixes bound.

    A kernel is forced by switching the others off in the call, so that it runs or raises: that
    costs 0.9 µs, where entering torch.nn.attention.sdpa_kernel costs 11.5 µs (torch 2.13).
    """
    kind, mask = masking(case, route), None
    if kind == "dense":
        sizes = case.seq_len, case.kv_len, case.device
        mask = dense_mask(case.mask, *sizes, batch=case.batch)
    if kind == "lower_right":
        from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo

        mask = causal_lower_right(case.seq_len, case.kv_len)
    plain: AttentionCall = functools.partial(
        attend,
        attn_mask=mask,
        is_causal=kind == "is_causal",
        scale=case.softmax_scale,
        # torch 2.4, of an environment that the gate compares, has no such keyword.
        **({"enable_gqa": True} if case.kv_heads != case.heads else {}),
    )
    if kind == "bias":
        plain = with_bias(case, plain)
    if kind == "sinks":
        plain = with_sinks(case, plain)
    if route not in SWITCHES:
        return plain
    cuda: Any = torch.backends.cuda
    others = [
        (getattr(cuda, f"enable_{switch}_sdp"), getattr(cuda, f"{switch}_sdp_enabled")())
        for name, switch in SWITCHES.items()
        if name != route
    ]

    def forced(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /) -> torch.Tensor:
        for switch, _ in others:
            switch(False)
        try:
            return plain(q_BHLD, k_BGSD, v_BGSV)
        finally:
            for switch, before in others:
                switch(before)

    return forced


def with_bias(case: Case, plain: Any) -> AttentionCall:
    """SDPA with a position bias, which it takes as a whole: an (H, L, S) mask of numbers."""
    admitted = mask_for(case)
    bias = dense_bias(case, None if admitted is None else ~admitted)
    assert bias is not None

    def biased(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /) -> torch.Tensor:
        o_BHLV: torch.Tensor = plain(q_BHLD, k_BGSD, v_BGSV, attn_mask=bias(q_BHLD))
        return o_BHLV

    return biased


def with_sinks(case: Case, plain: Any) -> AttentionCall:
    """SDPA with one more key: its score, in a mask of numbers, is the sink, its value is 0."""
    admitted, dtype = mask_for(case), getattr(torch, case.dtype)
    hidden = None if admitted is None else ~admitted
    bias = dense_bias(case, hidden)
    zeros = torch.zeros(1, 1, case.seq_len, case.kv_len, dtype=dtype, device=case.device)
    numbers = zeros if hidden is None else zeros.masked_fill(hidden, float("-inf"))

    def sunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sink: torch.Tensor) -> Any:
        added_BHLS = (numbers if bias is None else bias(q)).expand(-1, case.heads, -1, -1)
        column = sink[0].view(-1, 1, 1).expand(*added_BHLS.shape[:-1], 1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return plain(q, k, v, attn_mask=torch.cat((added_BHLS, column), -1))

    return sunk


def tiny(case: Case) -> Case:
    """A small case that a kernel takes or refuses for the same reasons as `case`.

    It keeps widths, dtype, device and the kind of mask, and which of L and S is the longer.
    """
    groups, shorter = min(case.kv_heads, 2), min(case.seq_len, case.kv_len, 33)
    mask = case.mask if case.mask.text == "causal" else Mask(text="window:2", before=1, after=0)
    if case.mask.lengths:
        least = min(1, *case.mask.lengths)  # an empty item sees no key
        mask = Mask(text=f"padding:{least}", lengths=(least,))
    return dataclasses.replace(
        case,
        pass_="both" if case.needs_grad else "forward",
        batch=1,
        heads=groups * (case.heads // case.kv_heads),
        kv_heads=groups,
        seq_len=shorter + min(32, max(0, case.seq_len - case.kv_len)),
        kv_len=shorter + min(32, max(0, case.kv_len - case.seq_len)),
        mask=Mask() if case.unmasked else mask,
        scale=None,
    )


def inputs_of(case: Case) -> list[torch.Tensor]:
    """What a tiny case is called with, the same each time."""
    queries, keys = (1, case.heads, case.seq_len), (1, case.kv_heads, case.kv_len)
    shapes: list[tuple[int, ...]] = [
        (*queries, case.head_dim),
        (*keys, case.head_dim),
        (*keys, case.value_dim),
    ]
    shapes += [(case.heads,)] if case.sinks else []
    like: Any = {"device": case.device, "dtype": getattr(torch, case.dtype)}
    like["generator"] = torch.Generator(case.device).manual_seed(0)
    return [torch.randn(shape, **like, requires_grad=case.needs_grad) for shape in shapes]


@functools.cache
def refusal(case: Case, route: str) -> str | None:
    """Why SDPA does not take this tiny case along the route, in torch's words: it is run.

    Nor where a query that sees no key does not come out as zero from a kernel that was forced:
    where torch chooses that is a wrong result like any other, for the check to say.
    """
    if case.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if case.device == "cpu" and route in ("efficient", "cudnn"):
        return f"{route}: no CPU kernel"
    inputs = inputs_of(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = [build(route, case)(*inputs)]
            if case.needs_grad:
                results += torch.autograd.grad(results[0], inputs, torch.ones_like(results[0]))
        except RuntimeError as error:
            texts = [str(warning.message) for warning in caught]
            why = [t for t in texts if "because:" not in t and "runtime disabled" not in t]
            # Without the place in torch's sources, and without the sizes of the trial.
            text = re.split(r" \(Triggered internally| Got |\n", [*why, str(error)][0])[0]
            return f"{route}: {text.strip().rstrip('.')}"
    blind = 0 if case.mask.after is None else max(0, case.seq_len - case.kv_len)
    blind = case.seq_len if case.mask.lengths == (0,) else blind
    loud = any(x[:, :, :blind].any() for x in results[:2])  # o and dq
    if route not in SWITCHES:
        return None
    if loud or any(x.isnan().any() for x in results):
        return f"{route}: queries that see no key do not give zero"
    return None


def supports(route: str, case: Case) -> str | None:
    """Why the route cannot take the case, or None."""
    return refusal(tiny(case), route)


@functools.cache
def chosen(case: Case, route: str) -> str:
    """The kernel that torch says it takes for this tiny case where it may choose.

    It asks cuDNN first on some GPUs (`priority_order` in aten's sdp_utils.cpp).
    """
    if case.device == "cuda" and not torch.cuda.is_available():
        return "math"
    with torch.set_grad_enabled(case.needs_grad):  # a bias made of q has a gradient, too
        number = int(build(route, case, torch._fused_sdp_choice)(*inputs_of(case)))
    return {1: "flash", 2: "efficient", 3: "cudnn"}.get(number, "math")


def kernel_taken(case: Case, route: str) -> str:
    """The kernel that runs: the forced one, or the one that torch chooses."""
    return route if route in SWITCHES else chosen(tiny(case), route)


def flash_blocks(case: Case) -> tuple[int, int]:
    """Queries and keys that a flash kernel takes at a time.

    torch's CPU kernel (FlashAttentionKernel.cpp) takes 32, 64 or 256 queries and 512 keys. The
    tiles of the CUDA kernels vary with D and the device: 128 is an estimate.
    """
    if case.device == "cuda":
        return 128, 128
    return 256 if case.seq_len >= 768 else 64 if case.seq_len >= 192 else 32, 512


def flops(route: str, case: Case) -> int:
    """FLOPs executed: causal fused kernels skip blocks past the diagonal, and recompute scores."""
    kernel, pairs = kernel_taken(case, route), case.seq_len * (case.kv_len + bool(case.sinks))
    if kernel != "math" and masking(case, route) in ("is_causal", "lower_right"):
        pairs = sum(len(i) * len(j) for i, j in visible_blocks(case, *flash_blocks(case)))
    bias = bias_flops(case, recompute=False)
    return core_flops(case, pairs, recompute=kernel != "math") + bias


def workspace(route: str, case: Case) -> Estimate:
    """Bytes beyond the outputs, about: three matrices of scores in math, a fused kernel's blocks.

    And what each call makes of a mask, copies of q, k and v in math, their gradients in blocks.
    """
    kernel, kind, wide = kernel_taken(case, route), masking(case, route), max(4, case.element_bytes)
    rows, columns = (case.batch * case.heads * x * wide for x in (case.seq_len, case.kv_len))
    # A boolean mask becomes one of numbers; so does math's causal one. Shaw's is made of q.
    mask = case.seq_len * case.kv_len * wide * (case.batch if case.mask.lengths else 1)
    mask *= kind == "dense" or (kernel == "math" and kind == "is_causal")
    mask += 2 * rows * case.kv_len * (case.position.name == "shaw" or kind == "sinks")
    mask *= case.pass_ != "backward"
    if kernel == "math":
        copies = (rows + columns) * (case.head_dim + case.value_dim)
        return Estimate(mask + 3 * rows * case.kv_len + copies * (1 + (case.heads > case.kv_heads)))
    queries, keys = map(min, flash_blocks(case), (case.seq_len, case.kv_len))
    # Of half precision the kernel holds scores in both widths.
    blocks = queries * (keys + case.head_dim + 2) * (wide + case.element_bytes % wide)
    blocks *= (1 + case.needs_grad) * (torch.get_num_threads() if case.device == "cpu" else 0)
    return Estimate(mask + blocks + rows * (1 + case.value_dim * case.needs_grad))


# name, route, memory, what `attnbench list` says of it.
FAMILY = (
    ("sdpa", "any", "O(n)", "torch's own, with the kernel that torch chooses."),
    ("sdpa-math", "math", "n^2", "SDPA's math path, forced: the whole score matrix."),
    ("sdpa-flash", "flash", "O(n)", "SDPA's flash kernel, forced: blocks of scores."),
    ("sdpa-efficient", "efficient", "O(n)", "SDPA's memory-efficient kernel, forced."),
    ("sdpa-cudnn", "cudnn", "O(n)", "SDPA's cuDNN kernel, forced."),
    # As models with a cache do. The mask bars the flash kernels on CUDA, hides from the CPU's that
    # it is causal, and becomes an (L, S) mask of numbers in every call.
    ("sdpa-mask", "mask", "O(n^2)", "SDPA with a boolean mask, passed even when full."),
)
for name, route, memory, doc in FAMILY:
    attention_builder(
        name,
        time="n^2 d",
        memory=memory,
        devices=("cuda",) if route in ("efficient", "cudnn") else ("cpu", "cuda"),
        masks=ALL_MASKS,
        positions=ALL_BIASES,
        sinks=route == "mask",
        flops=functools.partial(flops, route),
        workspace=functools.partial(workspace, route),
        supports=functools.partial(supports, route),
        doc=doc,
    )(functools.partial(build, route))


def made_of(
    name: str, calls: Callable[[Case], list[Case]], route: str = "any", **own: Any
) -> Callable[[Build], Build]:
    """Registers what makes these `calls` of SDPA; `own` holds in place of what follows of them."""

    def against(case: Case) -> str | None:
        if cases := calls(case):
            return supports(route, dataclasses.replace(cases[0], mask=Mask()))
        masks = " and ".join(f"{mask}:…" for mask in own["masks"])
        return f"is for {masks} with keys"

    formulas: Any = {
        "time": "n^2 d", "supports": against,
        "flops": lambda case: sum(flops(route, each) for each in calls(case)),
        "workspace": lambda case: workspace(route, calls(case)[0]),
    }  # fmt: skip
    return attention_builder(name, **(formulas | own))


def folded(case: Case) -> Case:
    """The case whose queries are those of all heads that share a key/value head, in a row."""
    queries = case.seq_len * case.heads // case.kv_heads
    return dataclasses.replace(case, heads=case.kv_heads, seq_len=queries, mask=Mask())


def spread(case: Case) -> Case:
    """The case whose keys and values are those of every query head, copied."""
    return dataclasses.replace(case, kv_heads=case.heads)


def spread_workspace(case: Case) -> Estimate:
    """Bytes of SDPA's own, of the copies, and of their gradients."""
    copies = case.batch * case.heads * case.kv_len * (case.head_dim + case.value_dim)
    own = workspace("any", spread(case))
    return Estimate(own + copies * case.element_bytes * (1 + case.needs_grad))


@made_of(
    "sdpa-expanded", lambda case: [spread(case)], memory="O(n^2)", masks=ALL_MASKS,
    workspace=spread_workspace,
    supports=lambda case: (
        supports("any", spread(case)) if case.heads > case.kv_heads else "each head has its keys"
    ),
)  # fmt: skip
def build_expanded(case: Case) -> AttentionCall:
    """SDPA, shared keys copied for every head first.

    So transformers calls it where heads share keys and there is a mask (`repeat_kv`, 5.24).
    """
    plain, times = build("any", spread(case)), case.heads // case.kv_heads

    def expanded(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /
    ) -> torch.Tensor:
        k_BHSD, v_BHSV = (x.repeat_interleave(times, dim=1) for x in (k_BGSD, v_BGSV))
        return plain(q_BHLD, k_BHSD, v_BHSV)

    return expanded


@made_of("sdpa-grouped", lambda case: [folded(case)], memory="O(n)", masks=("full",))
def build_grouped(case: Case) -> AttentionCall:
    """SDPA, the heads that share keys as rows of one.

    With `enable_gqa` torch's CPU kernel copies no keys, but reads them for every query head again
    (torch 2.13): in decoding, where reading is all there is to do, groups then save no time.
    """
    plain = build("any", folded(case))

    def grouped(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /
    ) -> torch.Tensor:
        q_BGMD = q_BHLD.reshape(*k_BGSD.shape[:2], -1, q_BHLD.shape[-1])
        return plain(q_BGMD, k_BGSD, v_BGSV).reshape(*q_BHLD.shape[:-1], -1)

    return grouped


def parts(case: Case, item: int) -> tuple[list[int], list[int], list[Case | None]]:
    """Of a batch item: how its queries and its keys are split, and what each pair of these is.

    Documents, or a padded item: all queries with its keys, if it is causal top-left where L = S.
    None has no query or no key. Blind queries are those of the first document.
    """
    length = case.mask.length(case.kv_len, item)
    rows, keys = [case.seq_len], [length, case.kv_len - length]
    if case.mask.documents:
        starts = itertools.accumulate(itertools.cycle(case.mask.documents), initial=0)
        edges = [*itertools.takewhile(lambda start: start < length, starts), length]
        ends = [0, *(max(0, edge - length + case.seq_len) for edge in edges[1:])]
        rows, keys = ([b - a for a, b in itertools.pairwise(x)] for x in (ends, edges))
    mask = Mask() if case.mask.after is None else Mask(text="causal", after=case.kv_len - length)
    own = functools.partial(dataclasses.replace, case, batch=1, mask=mask)
    pairs = zip(rows, keys, strict=False)
    return rows, keys, [own(seq_len=q, kv_len=k) if q and k else None for q, k in pairs]


def ragged(case: Case) -> list[Case]:
    """All calls of `parts`; none where nothing is padded or packed, or no item has a key."""
    items = range(case.batch if case.mask.name in ("padding", "document") else 0)
    return [own for item in items for own in parts(case, item)[2] if own]


def ragged_workspace(case: Case) -> Estimate:
    """Bytes of SDPA's own without a mask, of outputs that are joined, of gradients of parts."""
    alone = workspace("any", dataclasses.replace(case, mask=Mask(), pass_="forward"))
    rows = max(each.seq_len for each in ragged(case))
    if case.needs_grad:
        rows = int(case.batch * case.seq_len * {"backward": 1.5, "both": 2.5}[case.pass_])
    return Estimate(alone + rows * case.heads * case.value_dim * case.element_bytes)


@made_of(
    "sdpa-items", ragged, masks=("padding", "document"), workspace=ragged_workspace,
    memory="O(n^2)",
)  # fmt: skip
def build_items(case: Case) -> AttentionCall:
    """SDPA for each item with its keys, or each document.

    Inputs are split and not sliced: each slice has a gradient as large as its whole tensor.
    """
    nothing: AttentionCall = lambda q, k, v, /: q.new_zeros(*q.shape[:3], v.shape[3])  # noqa: E731
    plans = []
    for rows, keys, cases in (parts(case, item) for item in range(case.batch)):
        plans.append((rows, keys, [build("any", own) if own else nothing for own in cases]))

    sizes = [count for rows, *_ in plans for count in rows]

    def outputs(*inputs_BHLD: torch.Tensor) -> Iterator[torch.Tensor]:
        for *inputs_HLD, (rows, keys, calls) in zip(*inputs_BHLD, plans, strict=True):
            pieces = map(torch.split, inputs_HLD, (rows, keys, keys), (1, 1, 1))
            for call, *own in zip(calls, *pieces, strict=False):
                yield call(*(x[None] for x in own))[0].transpose(0, 1)

    def joined(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /) -> torch.Tensor:
        found = outputs(q_BHLD, k_BGSD, v_BGSV)
        if case.needs_grad:
            o_THV = torch.cat([*found])
        else:  # one output at a time takes less memory
            o_THV = q_BHLD.new_empty(case.batch * case.seq_len, case.heads, case.value_dim)
            for rows in torch.split(o_THV, sizes):
                rows.copy_(next(found))
        return o_THV.view(case.batch, case.seq_len, case.heads, -1).transpose(1, 2)

    return joined


def trimmed(case: Case) -> Case:
    """The case whose keys end with the longest item; each query sees the same keys."""
    longest = max(1, *(case.mask.length(case.kv_len, item) for item in range(case.batch)))
    after = None if case.mask.after is None else case.kv_len - longest
    mask = dataclasses.replace(case.mask, after=after)
    return dataclasses.replace(case, kv_len=longest, mask=mask)


@made_of(
    "sdpa-trimmed", lambda case: [trimmed(case)] if ragged(case) else [], masks=("padding",),
    memory="O(n^2)",
)  # fmt: skip
def build_trimmed(case: Case) -> AttentionCall:
    """SDPA, keys and mask cut to the longest item."""
    plain, keys = build("any", trimmed(case)), trimmed(case).kv_len
    if keys == case.kv_len:
        return plain
    return lambda q, k_BGSD, v_BGSV, /: plain(q, k_BGSD[:, :, :keys], v_BGSV[:, :, :keys])


def reason_against_varlen(case: Case) -> str | None:
    """Why varlen_attn cannot take the case, or None."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no varlen_attn"
    if case.seq_len != case.kv_len or not (cases := ragged(case)):
        return "is for document:… with keys, L = S"
    return supports("flash", dataclasses.replace(cases[0], mask=Mask()))


@made_of(
    "sdpa-varlen", ragged, "flash", masks=("document",), devices=("cuda",), memory="O(n)",
    workspace=ragged_workspace, supports=reason_against_varlen,
)  # fmt: skip
def build_varlen(case: Case) -> AttentionCall:
    """Torch's varlen_attn: packed documents, no mask."""
    from torch.nn.attention import varlen

    sizes, causal = parts(case, 0)[1] * case.batch, case.mask.after == 0
    starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=case.device)
    attend: Any = functools.partial(
        varlen.varlen_attn, cu_seq_q=starts, cu_seq_k=starts, max_q=max(sizes), max_k=max(sizes),
        scale=case.softmax_scale, window_size=(-1, 0 if causal else -1),
        enable_gqa=case.kv_heads != case.heads,
    )  # fmt: skip

    def packed(*inputs: torch.Tensor) -> torch.Tensor:  # (T, heads, width): tokens of all items
        o_THV = attend(*(x_BHLD.transpose(1, 2).flatten(0, 1) for x_BHLD in inputs))
        o_BHLV: torch.Tensor = o_THV.unflatten(0, (case.batch, -1)).transpose(1, 2)
        return o_BHLV

    return packed
