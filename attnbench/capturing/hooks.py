"""Hooks on what calls attention: in place while a capture is active, and taken out after it.

No result changes: no mode and no module hook, which turn fast paths off. torch hands a subclass the
function that stands in `torch._C._nn`, so what tests it against `F` finds one object in both.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CellType, FrameType, ModuleType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from attnbench.capturing import describing
from attnbench.capturing.calls import Seen
from attnbench.capturing.compiled import Backend
from attnbench.capturing.imports import Finder


class Answer(Protocol):
    """What may answer a call in the place of torch's function, and is told of all others."""

    def answer(self, original: Any, outer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a call of SDPA: of `original`, or its own."""

    def missed(self, what: str) -> None:
        """A call of attention was left to the program: as `compiled`, or by its name."""


_ACTIVE: list[Seen] = []
ANSWERS: list[Answer] = []
_LOCK = threading.RLock()


@dataclass
class _Outer:
    """What a call of SDPA is inside of: of transformers with q, k and v before it reshapes them."""

    op: str
    qkv: tuple[Any, Any, Any] | None = None
    inner: int = 0
    frame: FrameType | None = None


class _Here(threading.local):
    outer: _Outer | None = None
    busy = False


_here = _Here()
_around: Callable[[], AbstractContextManager[Any]] = nullcontext


def around(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Call what is hooked inside of such a context from now on."""
    global _around
    _around = context


class Hook:
    """Stands in for one function of torch; an object, as a builtin does not bind to classes."""

    def __init__(self, module: ModuleType, name: str, describe: describing.Describe) -> None:
        self.original = getattr(module, name)
        self.describe = describe
        self.__name__ = self.__qualname__ = name
        self.__module__, self.__doc__ = module.__name__, self.original.__doc__

    def __reduce__(self) -> str:
        return self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, and count the call."""
        if torch.compiler.is_compiling():
            _compiled()
            return self.original(*args, **kwargs)
        if not (_ACTIVE or ANSWERS) or _here.busy:
            return self.original(*args, **kwargs)
        inside = self.__name__ == "multi_head_attention_forward"
        new = _Outer("MultiheadAttention") if inside else None
        return _counted(self.original, self.describe, args, kwargs, new)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled() -> None:
    """Say that a compiler takes a call. It runs this once, and leaves no trace of it in a graph."""
    for answers in ANSWERS:
        answers.missed("compiled")


def _counted(
    original: Any, describe: describing.Describe, args: Any, kwargs: Any, inside: _Outer | None
) -> Any:
    """Call a function; what may call SDPA, in which case that counts, gives its `inside`."""
    for seen in _ACTIVE:
        seen.end_if_asked()
    outer = _here.outer
    if inside is not None:
        _here.outer = inside
    else:  # a subclass or a mode may call it again; it is handed this very object
        _here.busy = True
        if outer is not None:
            outer.inner += 1
    called = original
    if ANSWERS and describe is describing.sdpa:
        for answers in tuple(ANSWERS):  # the innermost is asked first
            called = functools.partial(answers.answer, called, outer)
    began_s = time.perf_counter()
    out = stopped = None
    try:
        with _around():
            out = called(*args, **kwargs)
    except Exception as err:
        if type(err).__name__ != "_StopRecomputationError":
            raise
        stopped = err  # a checkpoint that has what it needs as soon as the kernel ran
    finally:
        _here.busy, _here.outer = False, outer
    if inside is None or not inside.inner:
        if _ACTIVE:
            _record(describe, args, kwargs, out, time.perf_counter() - began_s, inside or outer)
        for answers in ANSWERS if describe is not describing.sdpa else ():
            answers.missed(inside.op if inside else "a fast path of torch")
    if stopped is not None:
        raise stopped
    return out


def _record(
    describe: describing.Describe, args: Any, kwargs: Any, out: Any, time_s: float,
    outer: _Outer | None,
) -> None:  # fmt: skip
    """Count a call; one that cannot be described is counted, too, and never fails the program."""
    out = out[0] if isinstance(out, tuple) else out
    if type(out).__name__ in ("FakeTensor", "FunctionalTensor"):
        return  # a compiler asks for sizes
    grad = bool(getattr(out, "requires_grad", False))
    frame = outer.frame if outer and outer.frame else sys._getframe(1)
    for seen in tuple(_ACTIVE):
        _here.busy = True
        try:
            if torch._C._get_tracing_state() is not None:
                raise TypeError("jit.trace")
            key, make, keys = describe(seen.fingerprints, grad, outer, *args, **kwargs)

            def made(make: Any = make) -> Any:
                with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                    return make()

            seen.add(key, made, keys, out, time_s, frame)
        except Exception as err:
            seen.undescribed[f"{type(err).__name__}: {err}"[:100]] += 1
            seen.count += 1
        finally:
            _here.busy = False


def _heads(module: ModuleType, name: str, op: str) -> tuple[ModuleType, str, describing.Describe]:
    native = name.startswith("_")
    if native:
        names = [x.name for x in getattr(torch.ops.aten, name).default._schema.arguments]
    else:
        names = list(inspect.signature(getattr(module, name)).parameters)
    return module, name, functools.partial(describing.multi_head, op, names, native)


_TARGETS: tuple[tuple[ModuleType, str, describing.Describe], ...] = (
    (torch.nn.functional, "scaled_dot_product_attention", describing.sdpa),
    _heads(torch.nn.functional, "multi_head_attention_forward", "MultiheadAttention"),
    _heads(torch, "_native_multi_head_attention", "MultiheadAttention, fast path"),
    _heads(torch, "_transformer_encoder_layer_fwd", "encoder layer, fast path"),
)
_hooks: list[Hook] = []


def start(one: Any, active: list[Any] = _ACTIVE) -> None:
    """Count the calls of all threads in `one` from now on; of `ANSWERS` it may answer them."""
    with _LOCK:
        if not (_ACTIVE or ANSWERS):
            if not _hooks:
                _hooks.extend(Hook(*target) for target in _TARGETS)
                builtins = importlib.import_module("torch.jit._builtins")
                builtins._register_builtin(_hooks[0], "aten::scaled_dot_product_attention")
            for hook in _hooks:
                _rebind(hook.original, hook, hook)
            sys.meta_path.insert(0, _FINDER)
            for name in ADAPTED.keys() & sys.modules.keys():
                ADAPTED[name](sys.modules[name])
        active.append(one)


def stop(one: Any, active: list[Any] = _ACTIVE) -> None:
    """Count, or answer, no more; with the last of all every name has its function again."""
    with _LOCK:
        active.remove(one)
        one.ended_s = time.perf_counter()
        if not (_ACTIVE or ANSWERS):
            sys.meta_path.remove(_FINDER)
            for eval_frame, lookup in _found_by:
                eval_frame.lookup_backend = lookup
            _found_by.clear()
            for hook in _hooks:
                _rebind(hook, hook.original, hook)
            for interface, name, original in _registry:
                delattr(interface, name)
                if original is not None:
                    setattr(interface, name, original)
            _registry.clear()


def _rebind(old: Any, new: Any, hook: Hook) -> None:
    """Exchange a function wherever modules, classes, objects, dicts or closures hold it."""
    for holder in gc.get_referrers(old):
        if isinstance(holder, CellType):
            holder.cell_contents = new
            continue
        holder = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(holder, dict) and holder is not vars(hook):
            for name, value in tuple(holder.items()):  # no closure: its cell would hold `old`
                if value is old:
                    holder[name] = new
                    for owner in gc.get_referrers(holder) if "__module__" in holder else ():
                        if isinstance(owner, type):  # clears what it keeps of its attributes
                            setattr(owner, name, new)


_registry: list[tuple[type, str, Any]] = []


def _wrap_registry(module: Any) -> None:
    """Decorate what the registry returns: so `eager`, which is not in it, is seen as well."""
    interface = getattr(module, "AttentionInterface", None)
    if interface is None or _registry:
        return
    name = "get_interface" if hasattr(interface, "get_interface") else "__getitem__"
    original = getattr(interface, name)

    @functools.wraps(original)
    def looked_up(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)
        idle = torch.compiler.is_compiling() or not (_ACTIVE or ANSWERS)
        return function if idle else _wrapped(function)

    _registry.append((interface, name, vars(interface).get(name)))
    setattr(interface, name, looked_up)


def _teach(rules: Any) -> None:
    """Let torch.compile, which finds functions by their names, know those behind the hooks."""
    by_name = rules.get_torch_obj_rule_map

    @functools.lru_cache(None)
    def taught() -> Any:
        found = by_name()
        return found | {hook.original: found[hook] for hook in _hooks if hook in found}

    if not by_name.cache_info().currsize:
        rules.get_torch_obj_rule_map = taught


def _look_up(eval_frame: Any) -> None:
    """Have torch.compile find backends that read attention from graphs."""
    if not _found_by:
        lookup = eval_frame.lookup_backend
        _found_by.append((eval_frame, lookup))
        eval_frame.lookup_backend = lambda backend: Backend(
            lookup(backend), _ACTIVE, lambda: _around()
        )


_found_by: list[tuple[Any, Any]] = []
ADAPTED = {
    "transformers.modeling_utils": _wrap_registry, "torch._dynamo.trace_rules": _teach,
    "torch._dynamo.eval_frame": _look_up,
}  # fmt: skip
_FINDER = Finder(ADAPTED)


@functools.lru_cache(256)
def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of transformers, counted."""
    title = f"transformers {getattr(function, '__name__', 'attention').split('_attention')[0]}"
    describe = functools.partial(describing.transformers, title, "eager" in title)

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (_ACTIVE or ANSWERS):
            return function(*args, **kwargs)
        named = (kwargs[name] for name in ("query", "key", "value") if name in kwargs)
        q, k, v = (*args[1:4], *named)
        inside = _Outer(title, (q, k, v), frame=sys._getframe(1))
        return _counted(function, describe, args, kwargs, inside)

    return attention
