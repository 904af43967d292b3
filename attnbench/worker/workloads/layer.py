"""Workload `layer`: x_BLE -> o_BLE, multi-head attention with its projections around any core.

With `--layers` N what a layer gives is added to what it was given, and goes into the next one; the
output is that of the last layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.functional import linear

from attnbench.api import AttentionCall, Estimate, Implementation
from attnbench.schema.case import Case
from attnbench.schema.position import for_core
from attnbench.theory import costs
from attnbench.theory.projections import computed, parts_of, sets_of_weights, weights_of
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal, needle_pairs, wanted_keys
from attnbench.worker.positions import addition, placed, rotated, rotated_back, rotated_squares
from attnbench.worker.reference import Core, PlainResult, Size, plain_attention
from attnbench.worker.workloads.attention import rotated_workspace, with_position
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, bind_pass
from attnbench.worker.workloads.projections import by_head, projection_of

_RIDGE = 0.05  # of weights whose rows have length 1, and so singular values between 0 and 2
_DRAWS = 4  # of signs; each costs a float64 stack, and only where there are several layers
T = TypeVar("T")


def weight_names(case: Case) -> list[list[str]]:
    """The names of the weights of each set, wo the last; layers after the first have a number."""
    return [
        [f"{name}.{number}" if number > 1 else name for name in weights_of(case)]
        for number in range(1, sets_of_weights(case) + 1)
    ]


def by_layer(case: Case, sets: Sequence[T]) -> list[T]:
    """What belongs to each layer's weights, by layer: tied layers have one set."""
    return list(sets) * (case.layers // len(sets))


def core_case(case: Case) -> Case:
    """The attention case that the core sees; x, q and k come to it encoded but for a bias."""
    return replace(
        computed(case),
        workload="attention",
        position=for_core(case.position, case.heads if computed(case).heads < case.heads else 0),
        width=None,
        projection=None,
        layers=1,
    )


def layer_call(case: Case, core: AttentionCall) -> Callable[..., torch.Tensor]:
    """What is timed: projections, position encoding, core, heads merged, output projection.

    It takes x_BLE, and of each set of weights those of the projection and wo; (B, L, E) it returns.
    """
    project, added_LE = projection_of(case).heads(computed(case)), addition(case, case.seq_len)
    turning = replace(core_case(case), position=case.position)
    core = with_position(core, turning)
    count = len(weights_of(case))

    def layer(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        # Nothing but the core's arguments holds q, k and v, so that they are free once it is done.
        o_BHLV = core(*project(x_BLE, weights[:-1]))
        return linear(o_BHLV.transpose(1, 2).flatten(2), weights[-1])

    def call(x_BLE: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        sets = [weights[first : first + count] for first in range(0, len(weights), count)]
        *before, last = by_layer(case, sets)
        if added_LE is not None:
            x_BLE = x_BLE + added_LE
        for own in before:
            x_BLE = x_BLE + layer(x_BLE, own)
        return layer(x_BLE, last)

    return call


def _alone(case: Case, core: AttentionCall, tensors: Tensors, heads: Tensors) -> Callable[[], Any]:
    """The core's own pass, on q, k, v and do with the strides that they have in the last layer."""

    def given(*q_k_v: torch.Tensor) -> torch.Tensor:
        own = (x.detach().requires_grad_(case.needs_grad) for x in q_k_v)
        heads.update(zip("qkv", own, strict=True))
        return q_k_v[0].new_zeros(*q_k_v[0].shape[:3], case.value_dim)

    *inputs, wo = (x for name, x in tensors.items() if name != "do")
    with torch.no_grad():
        if not heads:
            layer_call(case, given)(*inputs, wo)
        if case.needs_grad:
            heads.setdefault("do", by_head(tensors["do"] @ wo, case.value_dim))
    q_k_v = heads["q"], heads["k"], heads["v"]
    return bind_pass(case.pass_, core, q_k_v, heads.get("do"), lambda _: {}).call


class _Layer(Workload):
    """x_BLE -> o_BLE: O(nd² + n²d)."""

    def core_case(self, case: Case) -> Case:
        return core_case(case)

    def tensors(self, case: Case) -> Tensors:
        """x_BLE, the weights of each set, and do_BLE where the pass differentiates."""
        shapes: dict[str, tuple[int, ...]] = {"x": (case.batch, case.seq_len, case.model_width)}
        for names in weight_names(case):
            shapes |= zip(names, weights_of(case).values(), strict=True)
        tensors = {name: empty(case, shape) for name, shape in shapes.items()}
        if case.needs_grad:
            for x in tensors.values():
                x.requires_grad_()
            tensors["do"] = empty(case, shapes["x"])
        return tensors

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """The canonical weights are drawn and then cut, so that all that cut them get the same."""
        whole, sets = projection_of(case).whole, weight_names(case)
        cut = [] if whole else [[tensors[name] for name in names[:-1]] for names in sets]
        heights = [[len(weight) for weight in parts] for parts in cut]
        wqkvs = [empty(case, (sum(rows), case.model_width)) for rows in heights]
        covered = {name for names in sets for name in names[:-1]} if cut else set()
        drawn = {name: x for name, x in tensors.items() if name not in covered}
        fill_normal([*wqkvs, *drawn.values()], draw.seed)
        with torch.no_grad():
            for weight in (*wqkvs, *(x for name, x in drawn.items() if name.startswith("w"))):
                weight.mul_(weight.shape[1] ** -0.5)
            # A stack adds to x as much as one layer: N outputs add up by squares (GPT-2's 1/√N,
            # Radford et al. 2019), those of tied layers by amplitudes. Else x doubles in each.
            for names in sets:
                tensors[names[-1]].mul_(len(sets) ** 0.5 / case.layers)
            if draw.needles:
                first = whole(case, *(tensors[name] for name in sets[0]))[0] if whole else wqkvs[0]
                plant_needle_tokens(case, tensors["x"], first, draw.seed)
            of_queries = [wqkv[: case.heads * case.head_dim] for wqkv in wqkvs]
            of_queries += [x for name, x in drawn.items() if name.startswith("wq")]
            for weight in of_queries:
                weight.mul_(draw.query_amplitude)
            for wqkv, rows, parts in zip(wqkvs, heights, cut, strict=True):
                for part, weight in zip(torch.split(wqkv, rows), parts, strict=True):
                    weight.copy_(part)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """The layers for the case's pass; gradients of x and of every weight."""
        inputs = tuple(x for name, x in tensors.items() if name != "do")

        def named(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            found, left = {"dx": gradients[0]}, iter(gradients[1:])
            for names in weight_names(case):
                found |= _named(case, names, [next(left) for _ in names])
            return found

        core = impl.build(core_case(case))
        bound = bind_pass(case.pass_, layer_call(case, core), inputs, tensors.get("do"), named)
        return replace(bound, core=partial(_alone, case, core, tensors))

    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        """The results of the stack; to a layer's own terms come the errors that others pass on.

        Between layers each number and its gradient is as uncertain as the terms of what a layer
        gives, and as the rounding of the sum, eps/2 of it at most (Higham, Accuracy and Stability
        of Numerical Algorithms, 2nd ed., (2.4)). What becomes of that in the other layers is
        measured: the float64 stack is run again with all of these changed by so much in the dtype's
        own eps, the signs at random (as Monte Carlo arithmetic samples rounding; Parker 1997), and
        the squares of the largest changes are added to those of the terms.
        """
        sizes: Tensors = {}

        def noted(name: str, x: torch.Tensor, found: PlainResult) -> torch.Tensor:
            if terms:
                of = found.terms.get("dx" if name.startswith("dx") else "o", torch.zeros_like(x))
                sizes[name] = torch.hypot(x / 2, of)
            return x

        result = _stack(case, tensors, core, noted, terms=terms)
        if case.layers == 1 or not terms:
            return result
        eps = torch.finfo(getattr(torch, case.dtype)).eps
        changes = {name: torch.zeros_like(x) for name, x in result.values.items()}
        generator = torch.Generator(tensors["x"].device).manual_seed(0)

        def shaken(name: str, x: torch.Tensor, _: PlainResult) -> torch.Tensor:
            signs = torch.empty_like(x).bernoulli_(generator=generator).mul_(2).sub_(1)
            return x + signs * sizes[name] * eps

        for _ in range(_DRAWS):
            moved = _stack(case, tensors, core, shaken, terms=False).values
            for name, x in result.values.items():
                changes[name] = changes[name].maximum((moved[name] - x).abs_() / eps)
        for name, x in result.values.items():
            # The next order is about the square of this one, relative to the values.
            more = 1 + eps * Size.of(changes[name]).rms / (Size.of(x).rms or 1)
            result.terms[name] = torch.hypot(result.terms.get(name, x), changes[name] * more)
        return result

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        projections, core = costs.layer_projection_flops(case), core_case(case)
        turning = costs.rotation_flops(replace(core, position=case.position), *[case.seq_len] * 2)
        executed = case.layers * (impl.flops(core) + turning) if impl.flops else None
        of_core = (impl.useful or costs.attention_flops_useful)(core)
        return {
            "flops_useful": projections + case.layers * of_core,
            "flops_executed": None if executed is None else projections + executed,
            "bytes_min": costs.layer_bytes_min(case),
            "memory_predicted_bytes": workspace(case, impl),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """What the core multiplies in vain; the projections waste nothing."""
        of_cores = flops - costs.layer_projection_flops(case)
        return costs.why_core_flops(core_case(case), of_cores // case.layers)


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
    added_BLE = placed(x_BLE, case) - x_BLE
    rows_BGMD = by_head((x_BLE + added_BLE)[:, queries] @ wq.mT, d)[:, :: case.heads // groups]
    wanted_BMK = wanted_keys(case, rows_BGMD, queries, keys, case.kv_len)
    gram_KK = wk @ wk.mT + _RIDGE * torch.eye(len(wk), dtype=wk.dtype, device=wk.device)
    solved_BKM: torch.Tensor = torch.linalg.solve(gram_KK, wanted_BMK.mT)
    x_BLE[:, keys] = (solved_BKM.mT @ wk - added_BLE[:, keys]).to(x_BLE.dtype)


def _named(case: Case, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Tensors:
    """Gradients of a layer's weights by name: those of wqkv, by parts, as one."""
    if projection_of(case).whole is not None:
        return {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    suffix = names[-1].removeprefix("wo")
    return {f"dwqkv{suffix}": torch.cat([*gradients[:-1]]), f"dwo{suffix}": gradients[-1]}


def _stack(
    case: Case,
    tensors: Tensors,
    core: Core,
    passed: Callable[[str, torch.Tensor, PlainResult], torch.Tensor],
    *,
    terms: bool,
) -> PlainResult:
    """Layer by layer, and back again; the terms of a gradient are those of its own layer.

    `passed` is given the name of each tensor between two layers, it, and what the layer found; what
    it returns goes on.
    """
    one, whole = replace(case, projection=None, layers=1), projection_of(case).whole
    sets = by_layer(case, weight_names(case))
    owns = [[tensors[name].detach() for name in names] for names in sets]
    layers = [whole(case, *own) if whole else (*own,) for own in owns]
    x, inputs = placed(tensors["x"].detach(), case), list[torch.Tensor]()
    for number, weights in enumerate(layers):
        inputs.append(passed(f"read{number}", x, PlainResult()))
        if number + 1 < case.layers:
            found = _plain_layer(one, inputs[-1], weights, None, core, terms=terms)
            x = passed(f"x{number}", x + found.values["o"], found)
    do, result = tensors.get("do"), PlainResult()
    for number in reversed(range(case.layers)):
        found = _plain_layer(one, inputs[number], layers[number], do, core, terms=terms)
        last = number == case.layers - 1
        if last:
            result.values["o"] = found.values["o"]
            result.terms |= {"o": found.terms["o"]} if terms else {}
        if do is None:
            break
        do = found.values["dx"] = found.values["dx"] if last else found.values["dx"] + do
        for name, value, term in _gradients(case, sets[number], owns[number], found):
            tied = name in result.values and name != "dx"
            result.values[name] = result.values[name] + value if tied else value
            if term is not None:
                result.terms[name] = torch.hypot(result.terms[name], term) if tied else term
        if number:
            do = passed(f"dx{number}", do, found)
    return result


def _gradients(
    case: Case, names: Sequence[str], weights: Sequence[torch.Tensor], found: PlainResult
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The gradients of x and of a layer's own weights, by name, and the terms of each.

    Of weights that make wqkv and wo: each number of these is a sum of products of theirs, so that
    squares of independent errors go back through the same sums of squares.
    """
    whole, terms = projection_of(case).whole, found.terms

    def back(weights: Sequence[torch.Tensor], dwqkv: torch.Tensor, dwo: torch.Tensor) -> Tensors:
        if whole is None:
            return _named(case, names, (dwqkv, dwo))
        with torch.enable_grad():
            own = [weight.detach().requires_grad_() for weight in weights]
            gradients = torch.autograd.grad(whole(case, *own), own, (dwqkv, dwo))
        return _named(case, names, gradients)

    yield "dx", found.values["dx"], terms.get("dx")
    values = back(weights, found.values["dwqkv"], found.values["dwo"])
    squares: Tensors = {}
    if terms:
        of_terms = terms["dwqkv"].square(), terms["dwo"].square()
        squares = back([weight.square() for weight in weights], *of_terms)
    for name, value in values.items():
        yield name, value, squares[name].sqrt() if terms else None


def _plain_layer(
    case: Case,
    x: torch.Tensor,
    own: Sequence[torch.Tensor],
    do: torch.Tensor | None,
    core: Core,
    *,
    terms: bool,
) -> PlainResult:
    """One layer by its definition and, where `do` is given, its gradients; with their terms.

    `own` are the parts of wqkv, and wo.
    """
    *weights, wo = own
    parts, places = parts_of(case), torch.arange(case.seq_len, device=x.device)
    turning = case.position, places, case.seq_len
    widths = [heads * dims for heads, dims in parts.values()]
    projected = torch.split(x @ torch.cat(weights).mT, widths, dim=-1)
    inputs = {n: by_head(y, parts[n][1]) for n, y in zip(parts, projected, strict=True)}
    for name in "qk":
        inputs[name] = rotated(inputs[name], *turning)
    if do is not None:
        inputs["do"] = by_head(do @ wo, case.value_dim)
    found = core(core_case(case), inputs, terms=terms)
    merged = _merged(found.values["o"])
    result = PlainResult(values={"o": merged @ wo.mT})
    if terms:
        result.terms["o"] = (_merged(found.terms["o"]).square() @ wo.square().mT).sqrt()
    if do is None:
        return result
    # Each weight adds its part to dx in the dtype of x, as one after another they do in the layer.
    for name in ("dq", "dk"):
        found.values[name] = rotated_back(found.values[name], *turning)
    result.values["dwo"] = _over_tokens(do, merged)
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
    result.terms["dwo"] = _over_tokens(do.square(), _merged(squares["o"])).sqrt()
    return result


def _merged(x_BHLD: torch.Tensor) -> torch.Tensor:
    return x_BHLD.transpose(1, 2).flatten(2)


def _side_by_side(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([_merged(values[name]) for name in ("dq", "dk", "dv")], dim=-1)


def _over_tokens(left_BLF: torch.Tensor, right_BLE: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens of the outer products: (F, E)."""
    return left_BLF.flatten(0, 1).mT @ right_BLE.flatten(0, 1)


def workspace(case: Case, impl: Implementation) -> Estimate | None:
    """Estimate the bytes of a call beyond its output: q, k, v and o twice, and the core's.

    The second time they are laid out as the core wants them, or are gradients.
    """
    seen = core_case(case)
    core = rotated_workspace(replace(seen, position=case.position), impl)
    if core is None:
        return None
    heads = [*parts_of(seen).values(), (seen.heads, case.value_dim)]
    token = 2 * sum(count * dims for count, dims in heads)
    made = case.batch * case.seq_len * token * case.element_bytes
    return Estimate((case.layers if case.pass_ == "both" else 1) * (core + made))


WORKLOADS.add("layer", _Layer())
