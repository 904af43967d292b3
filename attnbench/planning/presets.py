"""Presets: ready lists of sweeps by name, one row each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnbench.base.registry import Registry
from attnbench.machine.allocator import Policy
from attnbench.planning.plan import Axes


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named list of sweeps, and how to measure them unless something else is asked for.

    `min_time_s` and `max_time_s` are the time budget of a cell; `threads` None means torch's own.
    """

    doc: str
    sweeps: tuple[Axes, ...]
    min_time_s: float
    max_time_s: float
    threads: int | None = None
    allocator: Policy = "settled"


_POWERS = tuple(128 << i for i in range(5))
_DECODE_CACHES = ("rerun", "none", "concat", "static")

PRESETS: Registry[Preset] = Registry("preset", "--preset")
PRESETS.add(
    "quick",
    Preset(
        doc="a few minutes on two CPU cores: attention to n = 2048, decode to context 1024",
        sweeps=(
            Axes(
                seq_lens=_POWERS,
                heads=(4, 8),
                batch_sizes=(1, 2),
                positions=("none", "rope"),
                impls=("naive", "naive-heads", "sdpa", "sdpa-math", "chunked"),
            ),
            Axes(
                workload="decode",
                seq_lens=_POWERS[:4],
                caches=_DECODE_CACHES,
                impls=("naive", "sdpa"),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.15,
    ),
)
_GPU_IMPLS = ("naive", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "chunked")
PRESETS.add(
    "gpu",
    Preset(
        doc="one large GPU in under 8 minutes: bf16 to n = 16384, decode to context 131072",
        sweeps=(
            Axes(
                dtypes=("bfloat16",),
                passes=("forward", "both"),
                seq_lens=tuple(512 << i for i in range(6)),
                heads=(16,),
                head_dims=(64, 128),
                masks=("full", "causal"),
                impls=_GPU_IMPLS,
            ),
            Axes(
                dtypes=("bfloat16",),
                passes=("both",),
                seq_lens=(2048, 8192),  # two shapes alone: each compilation takes a while
                heads=(16,),
                head_dims=(128,),
                masks=("causal",),
                impls=("flex", "naive-compiled"),
            ),
            Axes(
                workload="decode",
                dtypes=("bfloat16",),
                seq_lens=tuple(2048 << i for i in range(7)),
                heads=(16,),
                kv_heads=(4,),
                head_dims=(128,),
                caches=("concat", "static"),
                impls=("naive", "sdpa"),
            ),
            Axes(
                workload="decode",
                dtypes=("bfloat16",),
                seq_lens=(512, 2048, 8192),
                heads=(16,),
                kv_heads=(4,),
                head_dims=(128,),
                caches=("rerun", "none"),
                impls=("sdpa",),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.25,
    ),
)


_LENGTHS = (256, 512, 1024, 2048, 4096)


def _verify_cores(impls: tuple[str, ...]) -> tuple[Axes, ...]:
    """What the growth of a core is judged by: n, d with n, heads, heads at a width, batch.

    n = 1 is the floor: what a call costs that has nothing to do.
    """
    floor_and = (1, 1024)
    return (
        Axes(seq_lens=(1, 128, *_LENGTHS, 8192), heads=(2,), impls=impls),
        Axes(seq_lens=(1, *_LENGTHS[:4]), heads=(2,), head_dims=(16, 32, 128, 256), impls=impls),
        Axes(seq_lens=floor_and, heads=(1, 2, 4, 8), impls=(*impls, "naive-heads")),
        *(
            Axes(seq_lens=floor_and, heads=(heads,), head_dims=(256 // heads,), impls=impls)
            for heads in (1, 2, 4, 8, 16)
        ),
        Axes(seq_lens=floor_and, heads=(2,), batch_sizes=(1, 2, 4, 8), impls=impls),
    )


_LAYER_LENGTHS = (1, 64, 128, 256, 512, 1024, 2048)
PRESETS.add(
    "verify",
    Preset(
        doc="what `attnbench verify` needs on a CPU: cores, layers, decoding, a recurrent network",
        sweeps=(
            *_verify_cores(("naive", "sdpa", "chunked")),
            Axes(seq_lens=(1024,), heads=(2,), positions=("none", "rope"), impls=("naive", "sdpa")),
            Axes(
                passes=("both",), seq_lens=(1, 128, *_LENGTHS), heads=(2,), impls=("naive", "sdpa")
            ),
            Axes(
                workload="layer",
                seq_lens=_LAYER_LENGTHS,
                widths=(256, 512, 1024),
                impls=("naive", "sdpa"),
            ),
            Axes(workload="layer", seq_lens=(1, 512), widths=(128,), impls=("naive", "sdpa")),
            Axes(
                workload="layer",
                passes=("forward", "both"),
                seq_lens=(1, 64, 128, 256, 512),
                heads=(8,),
                widths=(512,),
                projections=("fused", "separate", "per-head"),
                impls=("sdpa",),
            ),
            Axes(
                workload="recurrent",
                passes=("forward", "both"),
                seq_lens=(1, 64, 128, 256, 512),
                widths=(512,),
                impls=("gru",),
            ),
            Axes(
                workload="decode",
                seq_lens=(16, 128, 512, *(1024 << i for i in range(8))),
                caches=("static", "concat"),
                impls=("naive", "sdpa"),
            ),
            Axes(
                workload="decode",
                seq_lens=(16, 128, 256, 512, 1024, 2048),
                caches=("none",),
                impls=("naive", "sdpa"),
            ),
            Axes(
                workload="decode",
                seq_lens=(16, 64, 128, 256, 512, 1024),
                caches=("rerun",),
                impls=("naive", "sdpa"),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.5,
        threads=1,  # a second core that comes and goes would bend every curve
        allocator="keep",  # so would pages that are returned from one size on, not from another
    ),
)
_WIDE = Axes(dtypes=("bfloat16",), heads=(16,))
PRESETS.add(
    "verify-gpu",
    Preset(
        doc="what `attnbench verify` needs on a GPU, in bf16",
        sweeps=(
            replace(
                _WIDE,
                seq_lens=(1, *(256 << i for i in range(7))),
                head_dims=(64,),
                impls=("naive", "sdpa", "chunked"),
            ),
            replace(
                _WIDE,
                seq_lens=(1, 1024, 2048, 4096, 8192),
                head_dims=(32, 128, 256),
                impls=("naive", "sdpa", "chunked"),
            ),
            *(
                Axes(
                    dtypes=("bfloat16",),
                    seq_lens=(1, 4096),
                    heads=(heads,),
                    head_dims=(1024 // heads,),
                    impls=("naive", "sdpa"),
                )
                for heads in (4, 8, 16, 32)
            ),
            replace(_WIDE, seq_lens=(1, 2048), batch_sizes=(1, 2, 4, 8), impls=("naive", "sdpa")),
            replace(
                _WIDE,
                workload="layer",
                seq_lens=(1, *(256 << i for i in range(7))),
                widths=(1024, 2048, 4096),
                impls=("naive", "sdpa"),
            ),
            replace(
                _WIDE,
                workload="layer",
                passes=("forward", "both"),
                seq_lens=(512, 2048),
                widths=(1024,),
                projections=("fused", "separate", "per-head"),
                impls=("sdpa",),
            ),
            Axes(
                workload="recurrent",
                dtypes=("bfloat16",),
                passes=("forward", "both"),
                seq_lens=(1, 128, 256, 512, 1024, 2048),
                widths=(1024,),
                impls=("gru",),
            ),
            replace(
                _WIDE,
                workload="decode",
                seq_lens=(16, *(1024 << i for i in range(8))),
                caches=("static", "concat"),
                impls=("sdpa",),
            ),
            replace(
                _WIDE,
                workload="decode",
                seq_lens=(16, *(256 << i for i in range(6))),
                caches=("none", "rerun"),
                impls=("sdpa",),
            ),
        ),
        min_time_s=0.05,
        max_time_s=0.2,
    ),
)
