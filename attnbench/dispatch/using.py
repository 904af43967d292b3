"""Calls of SDPA, answered by what was advised for them: decided once for each kind of call."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch

from attnbench.capturing import describing, hooks
from attnbench.capturing.masks import Fingerprints
from attnbench.dispatch.checking import fault, mask_differs
from attnbench.dispatch.matching import Pick, matching, picks_of
from attnbench.errors import DispatchError, UsageError
from attnbench.schema.case import Case, parse_mask
from attnbench.theory.choices import DEFAULT
from attnbench.theory.traits import impossible

_PLANS = 4096  # kinds of calls that are remembered in a thread
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass
class _Plan:
    """What is done with one kind of call: `reason` leaves it to the program."""

    reason: str = ""
    pick: Any = None  # a Pick, its call for the case, and that case
    call: Any = None
    case: Any = None
    shorter: int | None = None  # to how many keys k and v are cut
    autocast: bool = False
    checked: bool = False


class _Here(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # of calls of patched models
        self.plans: dict[Any, _Plan] = {}
        self.built = lru_cache(32)(lambda pick, case, device: pick.impl.build(case))


class Use:
    """Attention as it was advised, in all threads: `with attnbench.use(advice):`.

    `advice` is a run of `attnbench advise`, by its folder or name in `output`, or `{case: name}`
    with cases as `--case` takes them, or pairs of a captured case and a name. `files` have
    implementations of yours. A call that matches no case goes to the original, and counts as a
    miss. The first call of each case is checked. An implementation that raises, or is wrong at
    that call, raises `DispatchError`; with `lenient` the original is called from then on. With
    `dry` the original is always called, and hits count what would match.

    Raises:
        UsageError: advice that makes no sense, or an implementation that cannot take its case.
        StoreError: there is no such run.
    """

    def __init__(
        self, advice: Any, *, files: str | Path | Iterable[str | Path] = (), lenient: bool = False,
        dry: bool = False, output: str | Path = "results",
    ) -> None:  # fmt: skip
        files = (files,) if isinstance(files, str | Path) else files
        self._picks = picks_of(advice, files, output)
        self._lenient, self._dry = lenient, dry
        self._here, self._lock = _Here(), threading.Lock()
        self._prints = Fingerprints(every=True)
        self._checked: set[Any] = set()
        self._handles: list[Any] = []
        self.restart()

    def restart(self, first: Any = None) -> None:
        """Forget what was counted, as in a forked process."""
        self._hits = Counter({pick.text: 0 for pick in self._picks})
        self._misses, self._fallbacks = Counter[str](), Counter[str]()
        self._check_s, self.ended_s, self._lock = 0.0, 0.0, threading.Lock()
        self.first = first

    def __enter__(self) -> Self:
        if self in hooks.ANSWERS:
            raise UsageError("this advice is in use already; make another with attnbench.use")
        hooks.start(self, hooks.ANSWERS)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __deepcopy__(self, _memo: Any) -> Self:
        return self  # a copy of a patched model is patched, too

    def patch(self, model: torch.nn.Module) -> Self:
        """Use it in calls that this model makes, in its forward pass, until `restore`."""
        if self not in hooks.ANSWERS:
            self.__enter__()
        elif not self._handles:
            raise UsageError("this advice is in use for all models already")
        before = model.register_forward_pre_hook(self._entered, prepend=True)
        self._handles += [before, model.register_forward_hook(self._left, always_call=True)]
        return self

    def _entered(self, _model: Any, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._here.depth += 1

    def _left(self, _model: Any, _args: Any, _out: Any) -> None:
        if not torch.compiler.is_compiling():
            self._here.depth -= 1

    def restore(self) -> None:
        """Put all originals back; again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in hooks.ANSWERS:
            hooks.stop(self, hooks.ANSWERS)

    def stats(self) -> dict[str, Any]:
        """`hits` by implementation and case, `misses` and `fallbacks` by reason, `check_s`.

        All are counts of calls, but for the seconds that checks took.
        """
        with self._lock:
            counts = {"hits": dict(self._hits), "misses": dict(self._misses)}
            return {**counts, "fallbacks": dict(self._fallbacks), "check_s": self._check_s}

    @property
    def count(self) -> int:
        """Calls so far."""
        return sum(sum(each.values()) for each in (self._hits, self._misses, self._fallbacks))

    report = stats

    def missed(self, what: str) -> None:
        """Count a call that was left to the program."""
        self._count(self._misses, what)

    def _count(self, where: Counter[str], what: str) -> None:
        if (first := self.first) is not None:
            self.first = None
            first()
        with self._lock:
            where[what] += 1

    def answer(self, original: Any, outer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a call of SDPA, by the advised implementation or by `original`."""
        if self._handles and not self._here.depth:
            return original(*args, **kwargs)
        given = _given(*args, **kwargs)
        if reason := _forced(*given):
            self.missed(reason)
            return original(*args, **kwargs)
        q, k, v = (outer.qkv if outer else None) or given[:3]
        grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        key, make, _ = describing.sdpa(self._prints, grad, outer, *given)
        plans = self._here.plans
        if (plan := plans.get(key)) is None:
            if len(plans) > _PLANS:
                plans.clear()
            plan = plans[key] = self._planned(make, (q, k, v), outer, given)
        if plan.pick is None:
            self.missed(plan.reason)
        elif plan.reason:
            self._count(self._fallbacks, plan.reason)
        else:
            if self._dry or plan.pick.impl.name == DEFAULT:
                self._count(self._hits, plan.pick.text)
                return original(*args, **kwargs)
            if plan.shorter:
                k, v = k[:, :, : plan.shorter], v[:, :, : plan.shorter]
            if (out := self._called(plan, (q, k, v))) is not None:
                self._count(self._hits, plan.pick.text)
                return out
        return original(*args, **kwargs)

    def _planned(self, make: Any, qkv: Any, outer: Any, given: Any) -> _Plan:
        """Decide on a kind of call."""
        if unfit := _unfit(qkv, outer, given):
            return _Plan(unfit)
        with torch.no_grad():
            described = make()
            if described["problems"]:
                return _Plan("; ".join(described["problems"]))
            case, mask = _case(described), given[3]
            reason = impossible(case)
            if reason is None and mask is not None and getattr(mask, "variant", None) is None:
                reason = mask_differs(case, mask, given[1].shape[2])
        if reason:
            return _Plan(reason)
        pick = matching(case, self._picks)
        if isinstance(pick, str):
            return _Plan(pick)
        shorter = case.kv_len if case.kv_len < qkv[1].shape[2] else None
        autocast = torch.is_autocast_enabled(case.device)
        return _Plan(pick=pick, case=case, shorter=shorter, autocast=autocast)

    def _called(self, plan: _Plan, qkv: Any) -> Any:
        """The implementation's result, or None where the original must give it."""
        cause: Exception | None = None
        try:
            if plan.checked and not plan.autocast:
                return plan.call(*qkv)
            off = torch.autocast(plan.case.device, enabled=False)
            with off if plan.autocast else nullcontext():
                if plan.checked:
                    return plan.call(*qkv)
                wrong, out = self._first(plan, plan.pick, plan.case, qkv)
        except Exception as err:
            if type(err).__name__ == "_StopRecomputationError":
                self._count(self._hits, plan.pick.text)
                raise  # a checkpoint that has what it needs
            wrong, out, cause = f"raised {type(err).__name__}: {err}", None, err
        if wrong:
            sentence = f"{plan.pick.text}: {wrong}"
            if not self._lenient:
                raise DispatchError(sentence) from cause
            plan.reason, out = sentence, None
            self._count(self._fallbacks, sentence)
        return out

    def _first(self, plan: _Plan, pick: Pick, case: Case, qkv: Any) -> tuple[str | None, Any]:
        """What is wrong with a kind's first call, and its result; None where it cannot be judged.

        What was checked for another kind of call of the same case and layout is right.
        """
        if reason := pick.impl.reason_against(case):
            return f"cannot take this call: {reason}", None
        call = plan.call = self._here.built(pick, case, str(qkv[0].device))
        if (pick, case.layout) in self._checked:
            plan.checked = True
            return None, call(*qkv)
        began_s = time.perf_counter()
        if not all(bool(x.detach().isfinite().all()) for x in qkv):
            self._count(self._fallbacks, "inputs that are not finite cannot be checked")
            return None, None
        out = call(*qkv)
        wrong = fault(pick.impl, call, case, qkv, out)
        with self._lock:
            self._check_s += time.perf_counter() - began_s
        if wrong is None:
            self._checked.add((pick, case.layout))
            plan.checked = True
        return wrong, out


def _given(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of a call of SDPA, in their order."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def _backends() -> tuple[Any, ...]:
    c = torch._C
    enabled = c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled()
    more = c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled(), c._get_overrideable_sdp_enabled()
    return *enabled, *more, c._get_sdp_priority_order()


_ALL_BACKENDS = _backends()


def _forced(q: Any, k: Any, v: Any, _mask: Any, dropout: float, *_: Any) -> str:
    """What the program asks for that must not be overridden, or ""."""
    if dropout:
        return "dropout"
    if _backends() != _ALL_BACKENDS:
        return "sdpa_kernel, or backends that were turned off"
    if not (type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS) or q.is_nested:
        return "a subclass of Tensor, or a nested one"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside of a transform of torch.func"
    return "inside of jit.trace" if torch._C._get_tracing_state() is not None else ""


def _unfit(qkv: Any, outer: Any, given: Any) -> str:
    """Why tensors of these shapes and types are no case's, or ""."""
    q, k, v = qkv
    if not q.dim() == k.dim() == v.dim() == 4:
        return "q, k or v without four axes"
    if (q.shape[0], *k.shape[:3], q.shape[3]) != (k.shape[0], *v.shape[:3], k.shape[3]):
        return "q, k and v that are broadcast"
    if q.shape[1] != k.shape[1] and not given[7] and (outer is None or outer.qkv is None):
        return "heads that are broadcast without enable_gqa"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        return "q, k and v of several dtypes or devices"
    if given[3] is not None and given[3].requires_grad:
        return "a mask that requires a gradient"
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.get_autocast_dtype(kind):
        return f"autocast of inputs in {str(q.dtype).removeprefix('torch.')}"
    return "" if min(q.shape) and min(k.shape) else "empty tensors"


def _case(call: Any) -> Case:
    return Case(
        batch=call["B"], heads=call["H"], kv_heads=call["G"], seq_len=call["L"], kv_len=call["S"],
        head_dim=call["D"], value_dim=call["V"], dtype=call["dtype"], device=call["device"],
        mask=parse_mask(call["mask"]), scale=call["scale"], layout=call["layout"],
        pass_="both" if call["grad"] else "forward",
    )  # fmt: skip
