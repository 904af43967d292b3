"""Projections of a layer, without torch: the weights of each way, and the heads that it leaves.

What is timed stands in `worker/workloads/projections.py` by the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from attnbench.base.parameters import Parameter, Values, read_name
from attnbench.base.registry import Registry
from attnbench.schema.case import Case

Shapes = dict[str, tuple[int, int]]  # of weights, (out features, in features)


@dataclass(frozen=True, kw_only=True)
class ProjectionTraits:
    """One way to project, from sizes and its parameters.

    `weights(case, …)` are the matrices that q, k and v come from, in the order in which they are
    passed; what is no factor of a matrix product is not called w. `heads(case, …)` are the query
    and the key/value heads that are computed. `against` says why a case makes no sense. With
    `tied` all layers have the weights of the first.
    """

    doc: str
    weights: Callable[..., Shapes]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    heads: Callable[..., tuple[int, int]] = lambda case, **_: (case.heads, case.kv_heads)
    against: Callable[..., str | None] = lambda case, **_: None
    tied: bool = False


def parts_of(case: Case) -> dict[str, tuple[int, int]]:
    """(heads, dims a head) of q, k and v."""
    groups, d = case.kv_heads, case.head_dim
    return {"q": (case.heads, d), "k": (groups, d), "v": (groups, case.value_dim)}


def _fused(case: Case) -> Shapes:
    rows = case.heads * case.head_dim + case.kv_heads * (case.head_dim + case.value_dim)
    return {"wqkv": (rows, case.model_width)}


def _separate(case: Case) -> Shapes:
    parts = parts_of(case).items()
    return {f"w{name}": (heads * dims, case.model_width) for name, (heads, dims) in parts}


def _left(case: Case, *, heads: int) -> tuple[int, int]:
    """The query and the key/value heads that are left: whole groups are pruned."""
    return case.heads - heads, case.kv_heads - heads * case.kv_heads // case.heads


def _against_pruning(case: Case, *, heads: int) -> str | None:
    sharing = case.heads // case.kv_heads
    if heads < case.heads and heads % sharing == 0:
        return None
    whole = f" in whole groups of {sharing}" if sharing > 1 else ""
    return f"{heads} of {case.heads} heads cannot be pruned{whole}"


_PROJECTIONS = {
    "fused": ProjectionTraits(
        doc="one matrix for q, k and v, its result cut in three", weights=_fused
    ),
    "separate": ProjectionTraits(doc="wq, wk and wv, as in Llama", weights=_separate),
    "per-head": ProjectionTraits(
        doc="a matrix for each head, the formula to the letter; heads are stacked",
        weights=lambda case: {
            f"w{name}{head}": (dims, case.model_width)
            for name, (heads, dims) in parts_of(case).items()
            for head in range(heads)
        },
    ),
    "mla": ProjectionTraits(
        doc="multi-head latent attention (DeepSeek-V2): k and v from a latent of rank=128",
        weights=lambda case, *, rank: {
            "wq": (case.heads * case.head_dim, case.model_width),
            "wdown": (rank, case.model_width),
            "wupk": (case.kv_heads * case.head_dim, rank),
            "wupv": (case.kv_heads * case.value_dim, rank),
        },
        parameters={"rank": Parameter(default=128)},
        against=lambda case, *, rank: (
            f"a latent of rank {rank} is wider than the model, E = {case.model_width}"
            if rank > case.model_width
            else None
        ),
    ),
    "pruned": ProjectionTraits(
        doc="the last heads (as many as heads=1 says) are left out, with their rows of all weights",
        weights=lambda case, *, heads: _separate(_with_heads(case, _left(case, heads=heads))),
        parameters={"heads": Parameter(default=1)},
        heads=_left,
        against=_against_pruning,
    ),
    "tied": ProjectionTraits(
        doc="one wq for all heads, each of which weighs its dims (collaborative attention)",
        weights=lambda case: (
            _separate(_with_heads(case, (1, 1))) | {"mixing": (case.heads, case.head_dim)}
        ),
        against=lambda case: (
            "tied heads share one key/value head (--kv-heads 1)" if case.kv_heads > 1 else None
        ),
    ),
    "tied-layers": ProjectionTraits(
        doc="fused, and all --layers have the weights of the first (ALBERT)",
        weights=_fused,
        tied=True,
    ),
}
PROJECTIONS: Registry[ProjectionTraits] = Registry("projection", "--projections", _PROJECTIONS)


def _with_heads(case: Case, heads: tuple[int, int]) -> Case:
    return replace(case, width=case.model_width, heads=heads[0], kv_heads=heads[1])


def _of(case: Case) -> tuple[ProjectionTraits, Values]:
    """The case's way, `fused` where it names none, and the values of its parameters."""
    return read_name(case.projection or "fused", PROJECTIONS)[1:]


def weights_of(case: Case) -> Shapes:
    """Shapes of one layer's weights by name, that of the output projection the last."""
    traits, values = _of(case)
    heads, _ = traits.heads(case, **values)
    return traits.weights(case, **values) | {"wo": (case.model_width, heads * case.value_dim)}


def sets_of_weights(case: Case) -> int:
    """How many of its layers have weights of their own."""
    return 1 if _of(case)[0].tied else case.layers


def computed(case: Case) -> Case:
    """The case with the heads that are computed."""
    traits, values = _of(case)
    return _with_heads(case, traits.heads(case, **values))


def reason_against(case: Case) -> str | None:
    """Why the case's projection makes no sense in it, or None."""
    traits, values = _of(case)
    reason = traits.against(case, **values)
    return f"{reason} (--projections {case.projection})" if reason else None
