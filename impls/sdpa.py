"""torch's scaled_dot_product_attention: as torch chooses, or with one of its kernels forced."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import Case, Mask, attention_builder, core_flops, dense_mask, output_bytes

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_cuda = torch.backends.cuda  # where the switches live; they govern the CPU kernels too
SWITCHES: dict[str, tuple[Callable[[bool], None], Callable[[], bool]]] = {
    "math": (_cuda.enable_math_sdp, _cuda.math_sdp_enabled),
    "flash": (_cuda.enable_flash_sdp, _cuda.flash_sdp_enabled),
    "efficient": (_cuda.enable_mem_efficient_sdp, _cuda.mem_efficient_sdp_enabled),
    "cudnn": (_cuda.enable_cudnn_sdp, _cuda.cudnn_sdp_enabled),
}
FUSED = ("flash", "efficient", "cudnn")

# A route is how SDPA is asked: one of SWITCHES, `any` (torch chooses), or `mask` (torch chooses
# with a boolean mask that is always passed).


def masking(case: Case, route: str) -> str:
    """How the case's mask goes in: `none`, `is_causal`, `lower_right` or `dense`."""
    if route != "mask" and case.unmasked:
        return "none"
    if route == "mask" or case.mask.text != "causal":
        return "dense"
    if case.seq_len == case.kv_len:
        return "is_causal"
    # is_causal is top-left where L != S. The bottom-right variant has kernels on CUDA alone, and
    # torch warns that they give NaN where queries see no key.
    lower_right = case.device == "cuda" and route in ("flash", "efficient")
    return "lower_right" if lower_right and case.seq_len < case.kv_len else "dense"


def prepare(case: Case, route: str) -> Attend:
    """SDPA along the route, with all that the case fixes already bound."""
    kind, mask = masking(case, route), None
    if kind == "dense":
        mask = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)
    if kind == "lower_right":
        from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo

        mask = causal_lower_right(case.seq_len, case.kv_len)
    plain = functools.partial(
        scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=kind == "is_causal",
        scale=case.softmax_scale,
        enable_gqa=case.kv_heads != case.heads,
    )
    return forced(plain, route) if route in SWITCHES else plain


def forced(plain: Attend, kernel: str) -> Attend:
    """`plain` with every other kernel switched off, so that it runs `kernel` or raises.

    The six switches cost 0.9 µs a call; entering torch.nn.attention.sdpa_kernel costs 11.5 µs
    (beside 7 µs for SDPA itself at n = 8, torch 2.13). They are global, hence off in the call only.
    """
    others = [(set_, enabled()) for name, (set_, enabled) in SWITCHES.items() if name != kernel]

    def only(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        for set_, _ in others:
            set_(False)
        try:
            return plain(q_BHLD, k_BGSD, v_BGSV)
        finally:
            for set_, before in others:
                set_(before)

    return only


def tiny(case: Case) -> Case:
    """A small case that a kernel takes or refuses for the same reasons as `case`.

    It keeps widths, dtype, device and the kind of mask, and which of L and S is the longer.
    """
    groups, shorter = min(case.kv_heads, 2), min(case.seq_len, case.kv_len, 33)
    band = case.mask if case.mask.text == "causal" else Mask(text="window:2", before=1, after=0)
    return Case(
        pass_="both" if case.needs_grad else "forward",
        device=case.device,
        dtype=case.dtype,
        heads=groups * (case.heads // case.kv_heads),
        kv_heads=groups,
        seq_len=shorter + min(32, max(0, case.seq_len - case.kv_len)),
        kv_len=shorter + min(32, max(0, case.kv_len - case.seq_len)),
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        mask=Mask() if case.unmasked else band,
    )


def run_once(case: Case, call: Attend) -> None:
    """Run the case's pass on random tensors.

    Raises:
        RuntimeError: torch refuses, or a query that sees no key does not come out as zero.
    """
    generator = torch.Generator(case.device).manual_seed(0)
    like = {"device": case.device, "dtype": getattr(torch, case.dtype), "generator": generator}
    q_BHLD = torch.randn(case.batch, case.heads, case.seq_len, case.head_dim, **like)
    k_BGSD = torch.randn(case.batch, case.kv_heads, case.kv_len, case.head_dim, **like)
    v_BGSV = torch.randn(case.batch, case.kv_heads, case.kv_len, case.value_dim, **like)
    inputs = [x.requires_grad_(case.needs_grad) for x in (q_BHLD, k_BGSD, v_BGSV)]
    results = [call(*inputs)]
    if case.needs_grad:
        results += torch.autograd.grad(results[0], inputs, torch.ones_like(results[0]))
    blind = 0 if case.unmasked else max(0, case.seq_len - case.kv_len)
    loud = any(x[:, :, :blind].any() for x in results[:2])  # o and dq
    if loud or any(x.isnan().any() for x in results):
        raise RuntimeError("queries that see no key do not give zero")


@functools.cache
def refusal(case: Case, route: str) -> str | None:
    """Why SDPA does not take this tiny case along the route, in torch's words: it is run."""
    if case.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if case.device == "cpu" and route in ("efficient", "cudnn"):
        return f"{route}: no CPU kernel"
    with warnings.catch_warnings(record=True) as spoken:
        warnings.simplefilter("always")
        try:
            run_once(case, prepare(case, route))
        except RuntimeError as error:
            words = [one_line(str(warning.message)) for warning in spoken]
            said = [w for w in words if "because:" not in w and "runtime disabled" not in w]
            return f"{route}: {[*said, one_line(str(error))][0]}"
    return None


def one_line(text: str) -> str:
    """The message without the place in torch's sources and without the sizes of the trial."""
    for tail in (" (Triggered internally", " Got ", "\n"):
        text = text.partition(tail)[0]
    return text.strip().rstrip(".")


def kernel_taken(case: Case, route: str) -> str:
    """The kernel that runs: the forced one, or a fused one where one takes the case, else math."""
    if route in SWITCHES:
        return route
    fits = (kernel for kernel in FUSED if refusal(tiny(case), kernel) is None)
    on_cuda_masked = case.device == "cuda" and masking(case, route) == "dense"
    return next((k for k in fits if k != "flash" or not on_cuda_masked), "math")


def flash_blocks(case: Case) -> tuple[int, int]:
    """Queries and keys that a flash kernel takes at a time.

    torch's CPU kernel (FlashAttentionKernel.cpp) takes 32, 64 or 256 queries and 512 keys. The
    tiles of the CUDA kernels vary with D and the device: 128 is an estimate.
    """
    if case.device == "cuda":
        return 128, 128
    return 256 if case.seq_len >= 768 else 64 if case.seq_len >= 192 else 32, 512


def pairs_multiplied(case: Case, kernel: str, kind: str) -> int:
    """(query, key) pairs multiplied out: causal fused kernels skip key blocks past the diagonal."""
    queries, keys = case.seq_len, case.kv_len
    if kernel == "math" or kind in ("none", "dense"):
        return queries * keys
    q_block, k_block = flash_blocks(case)
    pairs = 0
    for first in range(0, queries, q_block):
        last = min(first + q_block, queries)
        seen = -(-(last + keys - queries) // k_block) * k_block
        pairs += (last - first) * min(keys, seen)
    return pairs


def flops(route: str, case: Case) -> int:
    """FLOPs executed: over the pairs multiplied out; a fused backward recomputes the scores."""
    kernel = kernel_taken(case, route)
    pairs = pairs_multiplied(case, kernel, masking(case, route))
    return core_flops(case, pairs, recompute=kernel != "math")


def workspace(route: str, case: Case) -> int:
    """Bytes allocated beyond the outputs at the worst moment, from sizes alone."""
    kernel, kind = kernel_taken(case, route), masking(case, route)
    if kernel == "math":
        return math_workspace(case, kind)
    # A boolean mask becomes one of numbers in every call.
    mask = case.seq_len * case.kv_len * case.element_bytes if kind == "dense" else 0
    statistics = case.batch * case.heads * case.seq_len * max(4, case.element_bytes)
    scratch = cpu_flash_scratch if case.device == "cpu" else cuda_flash_scratch
    forward, backward = scratch(case, "forward"), scratch(case, "backward")
    kept = mask + statistics  # for the backward pass
    return {
        "forward": kept + forward,
        "backward": backward,
        # While it goes forward its gradients are not there yet.
        "both": kept + max(backward, forward - tensor_bytes(case)[1]),
    }[case.pass_]


def tensor_bytes(case: Case) -> tuple[int, int]:
    """Bytes of o; of dq, dk and dv."""
    o, grads = replace(case, pass_="forward"), replace(case, pass_="backward")
    return output_bytes(o), output_bytes(grads)


def cpu_flash_scratch(case: Case, pass_: str) -> int:
    """Blocks that each thread works in; backward also copies do, which it wants as (B, L, H, V).

    What oneDNN adds for bfloat16 matmuls (up to a sixth of it, backward) is left out.
    """
    q_block, k_block = flash_blocks(case)
    q_block, k_block = min(q_block, case.seq_len), min(k_block, case.kv_len)
    wide, half = max(4, case.element_bytes), 2 if case.element_bytes == 2 else 0
    threads, scores = torch.get_num_threads(), q_block * k_block
    if pass_ == "forward":
        return threads * (scores * (wide + half) + q_block * (2 + case.head_dim) * wide)
    copied = tensor_bytes(case)[0] if min(case.heads, case.seq_len) > 1 else 0
    return copied + threads * (2 * scores * (wide + half) + q_block * wide)


def cuda_flash_scratch(case: Case, pass_: str) -> int:
    """As FlashAttention-2 has it: dq in float32 and its row sums; dk, dv of every query head."""
    if pass_ == "forward":
        return 0
    queries = case.seq_len * (case.head_dim + 1) * 4
    keys = case.kv_len * (case.head_dim + case.value_dim) * case.element_bytes
    return case.batch * case.heads * (queries + keys * (case.kv_heads != case.heads))


def math_workspace(case: Case, kind: str) -> int:
    """Bytes beyond the outputs of the math path, which works in float32 at least."""
    half, wide = case.element_bytes == 2, max(4, case.element_bytes)
    shared = case.kv_heads != case.heads
    row, square = case.batch * case.heads * wide, case.seq_len * case.kv_len
    q = row * case.seq_len * case.head_dim
    k, v = row * case.kv_len * case.head_dim, row * case.kv_len * case.value_dim
    scores = row * square
    bare = {"dense": square * case.element_bytes, "is_causal": square * wide}.get(kind, 0)
    bare += (q + (k + v) * case.kv_heads // case.heads) * half  # q, k and v in float32
    bare += q + (k + v) * shared + k * case.needs_grad  # scaled q and k, k and v of every head
    # softmax looks for rows without keys: a boolean matrix beside the scores and the weights.
    # Of few queries the scores are small, and scaled k, which goes with their product, is not.
    forward = bare + scores + max(scores + scores // wide, k * (not case.needs_grad))
    own_v = v if shared or half else 0
    out, grads = tensor_bytes(case)
    held = q + k + scores + own_v + out
    return {
        "forward": forward - out,
        "backward": v + 2 * scores - grads,
        "both": max(forward, held - own_v + v + 2 * scores) - out - grads,
    }[case.pass_]


def register(
    name: str, route: str, memory: str, doc: str, devices: tuple[str, ...] = ("cpu", "cuda")
) -> None:
    """Add one of the family; `doc` is what `attnbench list` says of it."""

    def build(case: Case) -> Attend:
        return prepare(case, route)

    attention_builder(
        name,
        time="n^2 d",
        memory=memory,
        devices=devices,
        masks=("full", "causal", "window"),
        flops=functools.partial(flops, route),
        workspace=functools.partial(workspace, route),
        supports=lambda case: refusal(tiny(case), route),
        doc=doc,
    )(build)


register("sdpa", "any", "O(n)", "scaled_dot_product_attention with the kernel that torch chooses.")
register("sdpa-math", "math", "n^2", "SDPA's math path, forced: the whole score matrix.")
register("sdpa-flash", "flash", "O(n)", "SDPA's flash kernel, forced: blocks of scores.")
register(
    "sdpa-efficient", "efficient", "O(n)", "SDPA's memory-efficient kernel, forced.", ("cuda",)
)
register("sdpa-cudnn", "cudnn", "O(n)", "SDPA's cuDNN kernel, forced.", ("cuda",))
register(
    "sdpa-mask",
    "mask",
    "O(n^2)",
    """SDPA with a boolean mask, tril(ones(L, S), S - L) for causal, passed even when full.

As models with a cache do. It bars the flash kernels on CUDA, hides from the CPU's that it is
causal, and becomes an (L, S) mask of numbers in every call.""",
)
