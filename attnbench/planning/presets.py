"""Presets: ready lists of sweeps by name, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from attnbench.base.registry import Registry
from attnbench.base.units import ALL_THREADS
from attnbench.machine.host import AllocatorPolicy
from attnbench.planning.plan import Axes


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named list of sweeps, and how to measure them unless something else is asked for.

    `min_time_s` and `max_time_s` are the time budget of a cell. `device` is where it runs unless
    one is named: a preset for a GPU does not fall back to a CPU.
    """

    doc: str
    sweeps: tuple[Axes, ...]
    max_time_s: float
    min_time_s: float = 0.05
    allocator: AllocatorPolicy = "settled"
    device: str = "auto"


def _doubled(first: int, count: int) -> tuple[int, ...]:
    return tuple(first << i for i in range(count))


PRESETS: Registry[Preset] = Registry("preset", "--preset")
_TWO = ("naive", "sdpa")
_BOTH = ("forward", "both")

# How each core grows with n, and with heads and batch at one n; what rotary positions, more threads
# and the caches change.
_quick = partial(Axes, impls=_TWO)
_QUICK = (
    _quick(
        seq_lens=_doubled(128, 5), impls=("naive", "naive-heads", "sdpa", "sdpa-math", "chunked")
    ),
    _quick(heads=(1, 2, 4, 8), impls=("naive", "naive-heads", "sdpa")),
    _quick(batch_sizes=(1, 2, 4)),
    _quick(seq_lens=(512, 2048), positions=("none", "rope")),
    _quick(seq_lens=(512, 2048), threads=(1, ALL_THREADS), impls=(*_TWO, "chunked")),
    _quick(
        workload="decode",
        seq_lens=_doubled(128, 4),
        caches=("rerun", "none", "concat", "static"),
    ),
)
_QUICK_DOC = "two minutes on two CPU cores: attention to n = 2048, decode to context 1024"
PRESETS.add("quick", Preset(doc=_QUICK_DOC, sweeps=_QUICK, max_time_s=0.15))

_encoded = partial(Axes, seq_lens=(512, 2048), masks=("causal",))
_POSITIONS = (
    _encoded(
        positions=(
            "none", "rope", "rope-interleaved", "rope-partial", "rope-matrix", "rope-yarn",
            "alibi", "t5", "shaw",
        ),
        impls=("naive", "sdpa", "chunked"),
    ),
    _encoded(
        workload="layer",
        positions=("none", "sinusoidal", "learned", "rope", "alibi", "t5", "shaw"),
        impls=_TWO,
    ),
)  # fmt: skip
_POSITIONS_DOC = "what each kind of position encoding costs, on a CPU in three minutes"
PRESETS.add("positions", Preset(doc=_POSITIONS_DOC, sweeps=_POSITIONS, max_time_s=0.5))

# Every family along n, in the same cases as exact attention; and what a parameter buys at one n.
_EXACT, _EITHER = ("naive", "sdpa", "chunked"), (
    "sliding-window", "dilated-window", "window-global", "bigbird", "strided", "reformer",
    "linear", "performer",
)  # fmt: skip
_family = partial(Axes, heads=(2,), seq_lens=_doubled(512, 4))
_FAMILIES = (
    _family(impls=(*_EXACT, *_EITHER, "linformer", "nystrom")),
    _family(impls=(*_EXACT, *_EITHER, "retention"), masks=("causal",)),
    _family(
        seq_lens=(2048,),
        impls=(
            *_EXACT, "sliding-window:window=64..1024", "bigbird:random_blocks=1..8",
            "performer:features=16..1024", "linformer:rank=16..1024", "nystrom:landmarks=16..512",
        ),
    ),
)  # fmt: skip
_FAMILIES_DOC = "every family beside exact attention to n = 4096, in five minutes on a CPU"
PRESETS.add("families", Preset(doc=_FAMILIES_DOC, sweeps=_FAMILIES, max_time_s=0.5))

_wide = partial(Axes, dtypes=("bfloat16",), heads=(16,))
_served = partial(_wide, workload="decode", kv_heads=(4,), head_dims=(128,), new_tokens=(4,))
_cores = partial(
    _wide,
    passes=_BOTH,
    seq_lens=_doubled(512, 6),
    impls=("naive", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "chunked"),
)
# As many as four minutes hold on a GPU whose SDPA takes half a second to plan for each new shape,
# which in decoding is each new length of the cache, in two processes.
_GPU = (
    _cores(head_dims=(128,), masks=("full", "causal")),
    _cores(head_dims=(64,), masks=("causal",)),
    _wide(
        passes=("both",),
        seq_lens=(2048, 8192),  # two shapes alone: each compilation takes a while
        head_dims=(128,),
        masks=("causal",),
        impls=("flex", "naive-compiled"),
    ),
    _served(seq_lens=(2048, 8192, 32768, 131072), caches=("concat", "static"), impls=_TWO),
    _served(seq_lens=(512, 8192), caches=("rerun", "none"), impls=("sdpa",)),
)
_GPU_DOC = "one large GPU: bf16 to n = 16384, decode to context 131072"
PRESETS.add("gpu", Preset(doc=_GPU_DOC, sweeps=_GPU, max_time_s=0.25, device="cuda"))

# What verdicts on growth need: every core along n, d with n, heads, heads at a width, and batch.
# n = 1 is the overhead: what a call costs that has nothing to do.
_CORES = ("naive", "sdpa", "chunked")
_core = partial(Axes, impls=_CORES, heads=(2,))
_layer = partial(Axes, workload="layer", impls=_TWO)
_decode = partial(Axes, workload="decode", impls=_TWO)
_recurrent = partial(Axes, workload="recurrent", passes=_BOTH, impls=("gru",))
_projected: dict[str, Any] = {
    "passes": _BOTH, "projections": ("fused", "separate", "per-head"), "impls": ("sdpa",)
}  # fmt: skip
_VERIFY = (
    _core(seq_lens=(1, 128, *_doubled(256, 6))),
    _core(seq_lens=(1, *_doubled(256, 4)), head_dims=(16, 32, 128, 256)),
    _core(seq_lens=(1, 1024), heads=(1, 2, 4, 8), impls=(*_CORES, "naive-heads")),
    *(_core(seq_lens=(1, 1024), heads=(h,), head_dims=(256 // h,)) for h in _doubled(1, 5)),
    _core(seq_lens=(1, 1024), batch_sizes=(1, 2, 4, 8)),
    _core(seq_lens=(1024,), positions=("none", "rope"), impls=_TWO),
    _core(passes=("both",), seq_lens=(1, *_doubled(128, 6)), impls=_TWO),
    _layer(seq_lens=(1, *_doubled(64, 6)), widths=(256, 512, 1024)),
    _layer(seq_lens=(1, 512), widths=(128,)),
    _layer(seq_lens=(1, *_doubled(64, 4)), heads=(8,), widths=(512,), **_projected),
    _recurrent(seq_lens=(1, *_doubled(64, 4)), widths=(512,)),
    _decode(seq_lens=(16, 128, 512, *_doubled(1024, 8)), caches=("static", "concat")),
    _decode(seq_lens=(16, *_doubled(128, 5)), caches=("none",)),
    _decode(seq_lens=(16, *_doubled(64, 5)), caches=("rerun",)),
)
PRESETS.add(
    "verify",
    Preset(
        doc="what `attnbench verify` needs on a CPU: attention, layers, decoding, recurrence",
        sweeps=_VERIFY,
        max_time_s=0.5,
        allocator="keep",  # so would pages that are returned from one size on, not from another
    ),
)

_wide_layer = partial(_wide, workload="layer")
_wide_decode = partial(_wide, workload="decode", impls=("sdpa",))
_VERIFY_GPU = (
    _wide(seq_lens=(1, *_doubled(256, 7)), head_dims=(64,), impls=_CORES),
    _wide(seq_lens=(1, *_doubled(1024, 4)), head_dims=(32, 128, 256), impls=_CORES),
    *(
        _wide(seq_lens=(1, 4096), heads=(h,), head_dims=(1024 // h,), impls=_TWO)
        for h in _doubled(4, 4)
    ),
    _wide(seq_lens=(1, 2048), batch_sizes=(1, 2, 4, 8), impls=_TWO),
    _wide_layer(seq_lens=(1, *_doubled(256, 7)), widths=(1024, 2048, 4096), impls=_TWO),
    _wide_layer(seq_lens=(512, 2048), widths=(1024,), **_projected),
    # cuDNN takes a GRU in bfloat16 from its version 9.13 and torch 2.10 on (pytorch PR #164411).
    _recurrent(seq_lens=(1, *_doubled(128, 5)), widths=(1024,), dtypes=("float16",)),
    _wide_layer(
        passes=_BOTH, seq_lens=(512, 2048), widths=(1024,), dtypes=("float16",), impls=("sdpa",)
    ),
    _wide_decode(seq_lens=(16, *_doubled(1024, 8)), caches=("static", "concat")),
    _wide_decode(seq_lens=(16, *_doubled(256, 6)), caches=("none", "rerun")),
)
PRESETS.add(
    "verify-gpu",
    Preset(
        doc="what `attnbench verify` needs on a GPU, in bf16 (a GRU in fp16)",
        sweeps=_VERIFY_GPU,
        max_time_s=0.2,
        device="cuda",
    ),
)
