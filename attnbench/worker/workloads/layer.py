"""Workload `layer`: x_BLE -> o_BLE, multi-head attention with its projections around any core.

All projections cut the rows of one canonical matrix wqkv, (H·D + G·D + G·V, E), into weights of
their own: those of the query heads, then of the key heads, then of the value heads. Hence the same
numbers give the same layer, and gradients of the parts, laid one under the other, that of wqkv.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from attnbench.api import Implementation
from attnbench.base.registry import Registry
from attnbench.schema.case import Case, Position
from attnbench.theory import costs
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal, needle_pairs, wanted_keys
from attnbench.worker.positions import rotated, rotated_back, rotated_squares
from attnbench.worker.reference import Core, PlainResult, plain_attention
from attnbench.worker.workloads.attention import rotated_workspace, with_position
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, bind_pass

_RIDGE = 0.05  # of weights whose rows have length 1, and so singular values between 0 and 2
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_BHLD, k_BGLD, v_BGLV
Project = Callable[[torch.Tensor, Sequence[torch.Tensor]], Heads]


def parts_of(case: Case) -> dict[str, tuple[int, int]]:
    """(heads, dims a head) of q, k and v."""
    groups, d = case.kv_heads, case.head_dim
    return {"q": (case.heads, d), "k": (groups, d), "v": (groups, case.value_dim)}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One way to project: the names and heights of its weights, and what is timed.

    `rows(case)` are in the order of wqkv's rows. `heads(case)` returns the projection of x_BLE
    with those weights. `strided`: q, k and v are views whose heads lie side by side in every
    token, and not tensors (B, heads, L, dims) of their own.
    """

    doc: str
    rows: Callable[[Case], dict[str, int]]
    heads: Callable[[Case], Project]
    strided: bool = True


def by_head(x_BLF: torch.Tensor, dims: int) -> torch.Tensor:
    """(B, L, heads·dims) seen as (B, heads, L, dims)."""
    return x_BLF.view(*x_BLF.shape[:2], -1, dims).transpose(1, 2)


def _fused(case: Case) -> Project:
    parts = list(parts_of(case).values())
    widths = [heads * dims for heads, dims in parts]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        chunks = torch.split(linear(x_BLE, weights[0]), widths, dim=-1)
        q, k, v = (by_head(x, dims) for x, (_, dims) in zip(chunks, parts, strict=True))
        return q, k, v

    return project


def _separate(case: Case) -> Project:
    widths = [dims for _, dims in parts_of(case).values()]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        q, k, v = (by_head(linear(x_BLE, w), d) for w, d in zip(weights, widths, strict=True))
        return q, k, v

    return project


def _per_head(case: Case) -> Project:
    counts = [heads for heads, _ in parts_of(case).values()]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        left = iter(weights)
        q, k, v = (
            torch.stack([linear(x_BLE, next(left)) for _ in range(count)], dim=1)
            for count in counts
        )
        return q, k, v

    return project


PROJECTIONS: Registry[Projection] = Registry("projection", "--projections")
PROJECTIONS.add(
    "fused",
    Projection(
        doc="one matrix for q, k and v, its result cut in three",
        rows=lambda case: {"wqkv": sum(heads * dims for heads, dims in parts_of(case).values())},
        heads=_fused,
    ),
)
PROJECTIONS.add(
    "separate",
    Projection(
        doc="wq, wk and wv, as in Llama",
        rows=lambda case: {f"w{name}": h * dims for name, (h, dims) in parts_of(case).items()},
        heads=_separate,
    ),
)
PROJECTIONS.add(
    "per-head",
    Projection(
        doc="a matrix for each head, the formula to the letter; heads are stacked",
        rows=lambda case: {
            f"w{name}{head}": dims
            for name, (heads, dims) in parts_of(case).items()
            for head in range(heads)
        },
        heads=_per_head,
        strided=False,
    ),
)


def projection_of(case: Case) -> Projection:
    """The case's projection; `fused` where it names none."""
    return PROJECTIONS.get(case.projection or "fused")


def core_case(case: Case) -> Case:
    """The attention case that the core sees; q and k come to it rotated, hence no encoding."""
    return replace(case, workload="attention", position=Position(), width=None, projection=None)


def layer_call(case: Case, impl: Implementation) -> Callable[..., torch.Tensor]:
    """What is timed: projections, position encoding, core, heads merged, output projection.

    It takes x_BLE, the weights of the projection and wo, and returns (B, L, E).
    """
    project = projection_of(case).heads(case)
    turning = replace(core_case(case), position=case.position)
    core = with_position(impl.build(core_case(case)), turning)

    def call(x_BLE: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        # Nothing but the core's arguments holds q, k and v, so that they are free once it is done.
        o_BHLV = core(*project(x_BLE, weights[:-1]))
        return linear(o_BHLV.transpose(1, 2).flatten(2), weights[-1])

    return call


class _Layer(Workload):
    """x_BLE -> o_BLE: O(nd² + n²d)."""

    def core_case(self, case: Case) -> Case:
        return core_case(case)

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """x_BLE, the projection's weights, wo, and do_BLE where the pass differentiates."""
        e = case.model_width
        shapes: dict[str, tuple[int, ...]] = {"x": (case.batch, case.seq_len, e)}
        shapes |= {name: (rows, e) for name, rows in projection_of(case).rows(case).items()}
        shapes["wo"] = (e, case.heads * case.value_dim)
        tensors = {name: empty(case, shape) for name, shape in shapes.items()}
        if case.needs_grad:
            for x in tensors.values():
                x.requires_grad_()
            tensors["do"] = empty(case, shapes["x"])
        return tensors

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """The canonical weights are drawn and then cut, so that all projections get the same."""
        names = list(projection_of(case).rows(case))
        rows = sum(tensors[name].shape[0] for name in names)
        wqkv = empty(case, (rows, case.model_width))
        others = {name: x for name, x in tensors.items() if name not in names}
        fill_normal([wqkv, *others.values()], draw.seed)
        with torch.no_grad():
            for weight in (wqkv, tensors["wo"]):
                weight.mul_(weight.shape[1] ** -0.5)
            if draw.needles:
                plant_needle_tokens(case, tensors["x"], wqkv, draw.seed)
            wqkv[: case.heads * case.head_dim].mul_(draw.query_amplitude)
            parts = torch.split(wqkv, list(projection_of(case).rows(case).values()))
            for name, part in zip(names, parts, strict=True):
                tensors[name].copy_(part)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """The layer for the case's pass; gradients of x and of every weight."""
        inputs = tuple(x for name, x in tensors.items() if name != "do")

        def named(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            dx, *dweights, dwo = gradients  # by the names that all projections share
            return {"dx": dx, "dwqkv": torch.cat(dweights), "dwo": dwo}

        return bind_pass(case.pass_, layer_call(case, impl), inputs, tensors.get("do"), named)

    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        return _plain_layer(case, tensors, core, terms=terms)

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        projections, core = costs.layer_projection_flops(case), core_case(case)
        return {
            "flops_useful": projections + costs.attention_flops_useful(core),
            "flops_executed": projections + impl.flops(core) if impl.flops else None,
            "bytes_min": costs.layer_bytes_min(case),
            "memory_predicted_bytes": workspace(case, impl),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """What the core multiplies in vain; the projections waste nothing."""
        return costs.why_core_flops(core_case(case), flops - costs.layer_projection_flops(case))


def plant_needle_tokens(case: Case, x_BLE: torch.Tensor, wqkv: torch.Tensor, seed: int) -> None:
    """Turn a few tokens, in place, so that each one's keys align with the queries of another.

    The pairs are those of `needle_pairs`, less those whose query would be rotated, too. The tokens
    solve wk·x = wanted by ridge regression: where wk has as many rows as columns, exact solutions
    are huge along its weakest directions, and their values would hide all others. The logits,
    which an exact solution would give ln(n) + 6, come out a quarter lower at most.
    """
    pairs = needle_pairs(case.mask, case.seq_len, case.kv_len, seed)
    aligned_tokens = {key for _, key in pairs}
    pairs = [(query, key) for query, key in pairs if query not in aligned_tokens]
    if not pairs:
        return
    queries, keys = (torch.tensor(side, device=x_BLE.device) for side in zip(*pairs, strict=True))
    groups, d = parts_of(case)["k"]
    wq, wk = wqkv[: case.heads * d], wqkv[case.heads * d : (case.heads + groups) * d].double()
    rows_BGMD = by_head(x_BLE[:, queries] @ wq.mT, d)[:, :: case.heads // groups]
    wanted_BMK = wanted_keys(case, rows_BGMD, queries, keys, case.kv_len)
    gram_KK = wk @ wk.mT + _RIDGE * torch.eye(len(wk), dtype=wk.dtype, device=wk.device)
    solved_BKM: torch.Tensor = torch.linalg.solve(gram_KK, wanted_BMK.mT)
    x_BLE[:, keys] = (solved_BKM.mT @ wk).to(x_BLE.dtype)


def _plain_layer(case: Case, tensors: Tensors, core: Core, *, terms: bool) -> PlainResult:
    """The layer by its definition and, where `do` is given, its gradients; with their terms."""
    x, wo = tensors["x"], tensors["wo"]
    weights = [tensors[name] for name in projection_of(case).rows(case)]
    parts, places = parts_of(case), torch.arange(case.seq_len, device=x.device)
    turning = case.position, places, case.seq_len
    widths = [heads * dims for heads, dims in parts.values()]
    projected = torch.split(x @ torch.cat(weights).mT, widths, dim=-1)
    inputs = {n: by_head(y, parts[n][1]) for n, y in zip(parts, projected, strict=True)}
    for name in "qk":
        inputs[name] = rotated(inputs[name], *turning)
    if "do" in tensors:
        inputs["do"] = by_head(tensors["do"] @ wo, case.value_dim)
    found = core(core_case(case), inputs, terms=terms)
    merged = _merged(found.values["o"])
    result = PlainResult(values={"o": merged @ wo.mT})
    if terms:
        result.terms["o"] = (_merged(found.terms["o"]).square() @ wo.square().mT).sqrt()
    if "do" not in tensors:
        return result
    # Each weight adds its part to dx in the dtype of x, as one after another they do in the layer.
    for name in ("dq", "dk"):
        found.values[name] = rotated_back(found.values[name], *turning)
    result.values["dwo"] = _over_tokens(tensors["do"], merged)
    dprojected = _side_by_side(found.values).to(x.dtype)
    cut = torch.split(dprojected, [weight.shape[0] for weight in weights], dim=-1)
    result.values["dx"] = sum(
        (part @ weight for part, weight in zip(cut, weights, strict=True)), torch.zeros_like(x)
    )
    result.values["dwqkv"] = _over_tokens(dprojected, x)
    if not terms:
        return result
    squares = {name: found.terms[name].square() for name in ("o", "dq", "dk", "dv")}
    for name in ("dq", "dk"):
        squares[name] = rotated_squares(squares[name], *turning)
    # What goes into these sums is as uncertain as the terms it was made of, and as its own size.
    summands = dprojected.square() + _side_by_side(squares)
    result.terms["dx"] = (summands @ torch.cat(weights).square()).sqrt()
    result.terms["dwqkv"] = _over_tokens(summands, x.square()).sqrt()
    result.terms["dwo"] = _over_tokens(tensors["do"].square(), _merged(squares["o"])).sqrt()
    return result


def _merged(x_BHLD: torch.Tensor) -> torch.Tensor:
    return x_BHLD.transpose(1, 2).flatten(2)


def _side_by_side(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([_merged(values[name]) for name in ("dq", "dk", "dv")], dim=-1)


def _over_tokens(left_BLF: torch.Tensor, right_BLE: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens of the outer products: (F, E)."""
    return left_BLF.flatten(0, 1).mT @ right_BLE.flatten(0, 1)


def workspace(case: Case, impl: Implementation) -> int | None:
    """Bytes that a forward call allocates beyond its output: q, k, v, o, and what the core takes.

    Or what the projections hold before, where that is more. None where sizes alone do not say it:
    for passes that differentiate; for strided heads of several batch items, which torch copies or
    not as the core goes about it; in half precision on CPU, where oneDNN packs the operands of
    products; and where the heads to be merged weigh most, which some cores need no copy for.
    """
    core = rotated_workspace(replace(core_case(case), position=case.position), impl)
    projection, element = projection_of(case), case.batch * case.seq_len * case.element_bytes
    packed = case.device == "cpu" and case.element_bytes < 4
    if core is None or case.needs_grad or packed or (projection.strided and case.batch > 1):
        return None
    q, k, v = (element * heads * dims for heads, dims in parts_of(case).values())
    o, output = element * case.heads * case.value_dim, element * case.model_width
    projecting = q + k + v if projection.strided else max(2 * q, q + 2 * k, q + k + 2 * v)
    most = max(projecting, q + k + v + o + core)
    merging = (o if min(case.heads, case.seq_len) == 1 else 2 * o) + output
    return None if merging > most else type(core)(most - output)


WORKLOADS.add("layer", _Layer())
