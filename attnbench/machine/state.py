"""Settings that implementations share in a process and may leave changed: watched, and put back.

A file or a call may set something for itself, such as the default device, that would change the
result or the time of every implementation after it. What changes neither is not watched. `remember`
notes how things are before any such code runs;
`settle`, called whenever some has run, puts them back. Settings that cannot be put back end the
process: see `beyond_repair`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import autograd
from torch.backends import cuda, cudnn, mkldnn
from torch.nn import functional
from torch.utils import _config_module
from torch.utils import _python_dispatch as dispatch

from attnbench.machine.host import idlest_cpu


class _Setting(NamedTuple):
    """Something that can be read and put back.

    `name` completes "it changes …", and several settings may share one; what is `quiet` is put
    back without a word, since torch's own compilers change it.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    quiet: bool = False


def _attributes(name: str, owner: Any, *attributes: str) -> _Setting:
    """Attributes of an object or module as one setting; this torch may lack some."""

    def put(values: dict[str, Any]) -> None:
        for attribute, value in values.items():
            setattr(owner, attribute, value)

    return _Setting(
        name, lambda: {a: getattr(owner, a) for a in attributes if hasattr(owner, a)}, put
    )


def _numbered(name: str, get: Callable[..., Any], put: Callable[..., Any], of: Any) -> _Setting:
    """One of several that the same two functions serve."""
    return _Setting(name, partial(get, of), partial(put, of))


def _put_methods(wanted: dict[str, Any]) -> None:
    now = dict(vars(torch.Tensor))
    for name in now.keys() - wanted.keys():
        delattr(torch.Tensor, name)
    for name, value in wanted.items():
        if now.get(name) is not value:
            setattr(torch.Tensor, name, value)


def _modes(name: str, length: Callable[[], int], pop: Callable[[], Any]) -> _Setting:
    """How many modes are entered; those that nobody left are taken off."""

    def put(wanted: int) -> None:
        while length() > wanted:
            pop()

    return _Setting(name, length, put)


# Variables that torch and its compilers set for themselves.
_COMPILERS_OWN = (
    "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_DUPLICATE_LIB_OK", "CUBLAS_",
    "CUDA_MODULE_LOADING",
)  # fmt: skip


def _environment() -> dict[str, str]:
    return {k: text for k, text in os.environ.items() if not k.startswith(_COMPILERS_OWN)}


def _put_environment(wanted: dict[str, str]) -> None:
    for name in _environment().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


_ALARM = signal.ITIMER_REAL
_OWN = os.PRIO_PROCESS, 0

# What carries a precision of float32 products in torch 2.9 and later, beside the older switches.
_PARTS = [getattr(of, kind, None) for of in (cudnn, mkldnn) for kind in ("conv", "rnn", "matmul")]
_FLOAT32 = (torch.backends, cuda.matmul, cudnn, mkldnn, *filter(None, _PARTS))


_REDUCED = [f"allow_{x}_reduced_precision_reduction" for x in ("fp16", "bf16")]
_OF_TORCH = (
    "matmul mm bmm baddbmm addmm einsum softmax exp where cat empty zeros ones full randn tril triu"
).split()
_OF_F = [name for name, value in vars(functional).items() if callable(value)]

_ENVIRONMENT = _Setting("the environment", _environment, _put_environment)
_FOLDER = _Setting("the working directory", os.getcwd, os.chdir)
# In the order in which they are put back: an older switch of torch's may fail beside a newer one.
_WATCHED: list[_Setting] = [
    _modes(
        "torch's function modes",
        torch._C._len_torch_function_stack,
        torch._C._pop_torch_function_stack,
    ),
    _modes(
        "torch's dispatch modes",
        lambda: len(dispatch._get_current_dispatch_mode_stack()),
        dispatch._pop_mode,
    ),
    *(
        _attributes("the precision of float32 products", owner, "fp32_precision")
        for owner in _FLOAT32
    ),
    _attributes(
        "the reduced precision of products", cuda.matmul, *_REDUCED, "allow_fp16_accumulation"
    ),
    _attributes("cuDNN's flags", cudnn, "enabled", "benchmark", "deterministic"),
    _attributes("oneDNN's flags", mkldnn, "enabled", "deterministic"),
    *(
        _Setting(
            "SDPA's backends",
            getattr(cuda, f"{backend}_sdp_enabled"),
            getattr(cuda, f"enable_{backend}_sdp"),
        )
        for backend in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *(
        _numbered("autocast", get, put, device)
        for device in ("cpu", "cuda")
        for get, put in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    # There is no way back from outside.
    _Setting("inference mode", torch.is_inference_mode_enabled, lambda wanted: None),
    _Setting("autograd's anomaly mode", torch.is_anomaly_enabled, autograd.set_detect_anomaly),
    _Setting(
        "the flushing of denormals", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal
    ),
    _attributes("functions of torch", torch, *_OF_TORCH),
    _attributes("functions of torch.nn.functional", functional, *_OF_F),
    _Setting("methods of torch.Tensor", lambda: dict(vars(torch.Tensor)), _put_methods),
    _Setting("the collector's thresholds", gc.get_threshold, lambda x: gc.set_threshold(*x)),
    _Setting("the trace function", sys.gettrace, sys.settrace),
    _Setting("the profile function", sys.getprofile, sys.setprofile),
    _ENVIRONMENT,
    _FOLDER,
    _Setting("an alarm", partial(signal.getitimer, _ALARM), lambda x: signal.setitimer(_ALARM, *x)),
    _Setting("its priority", partial(os.getpriority, *_OWN), partial(os.setpriority, *_OWN)),
]
if hasattr(os, "sched_getaffinity"):
    _WATCHED.append(_numbered("its CPUs", os.sched_getaffinity, os.sched_setaffinity, 0))

_threads: int | None = None
_remembered: dict[_Setting, Any] = {}
_generators: tuple[Any, Any] | None = None
_lasting: list[str] = []


def remember(threads: int | None = None) -> None:
    """Note how things are, for `settle` to put back: before anyone's code runs in a worker."""
    global _generators
    settle(threads)
    _remembered.update((setting, _read(setting)) for setting in _WATCHED)
    _generators = random.getstate(), torch.get_rng_state()


def pin(cpu: int) -> None:
    """Keep the process, with all threads that it has and will start, on one CPU from now on."""
    for thread in os.listdir("/proc/self/task"):  # those that they start inherit it
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), [cpu])
    _remembered.update({s: s.get() for s in _WATCHED if s.name == "its CPUs"})


def take_cores(threads: int | None) -> None:
    """Settle on so many threads; a single one keeps to the CPU that works least now."""
    settle(threads)
    # Beside two processes that spin and sleep on two cores, 42 % of the medians of a pinned one
    # were within 25 % of the quiet ones, 23 % of another's; quiet it makes no difference.
    if threads == 1 and (cpu := idlest_cpu()) is not None:
        pin(cpu)


def adopt(*, folder: bool = False) -> None:
    """Let stay what a file may set while it is loaded: new variables of the environment.

    What is imported when it builds may need them. And, where the loader changed it, the `folder`.
    """
    _remembered[_ENVIRONMENT] = _environment() | _remembered[_ENVIRONMENT]
    if folder:
        _remembered[_FOLDER] = os.getcwd()


def settle(threads: int | None = None, *, grad: bool = True) -> list[str]:
    """Put back what must be the same for every implementation; return the names of what was not.

    Full float32 products (no TF32), float32 as the default dtype, no default device, autograd on
    unless `grad` says otherwise, no deterministic algorithms, and as many threads as were asked
    for: `threads` where given, which is kept, else as kept. And whatever was remembered, as it
    was; random numbers begin anew.
    """
    global _threads
    _threads = threads or _threads or torch.get_num_threads()
    changed = []
    for setting, value in [*_fixed(_threads, grad), *_remembered.items()]:
        if _differs(setting, value):
            changed.append((setting, value))
            with contextlib.suppress(Exception):  # it is compared again
                setting.put(value)
    _lasting.extend(setting.name for setting, value in changed if _differs(setting, value))
    if _generators is not None:
        random.setstate(_generators[0])
        torch.set_rng_state(_generators[1])
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(0)
    names = [setting.name for setting, _ in changed if not setting.quiet]
    return [*dict.fromkeys(names), *_settle_compilers()]


def _fixed(threads: int, grad: bool) -> list[tuple[_Setting, Any]]:
    """Settings whose value is known, whatever the process was started with."""
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    deterministic = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    dtype = torch.get_default_dtype, torch.set_default_dtype
    device = torch.get_default_device, lambda _: torch.set_default_device(None)
    tf32 = (lambda: cudnn.allow_tf32), partial(setattr, cudnn, "allow_tf32")
    count = torch.get_num_threads, torch.set_num_threads
    return [
        (_Setting("the default device", *device), torch.device("cpu")),
        (_Setting("the number of threads", *count), threads),
        (_Setting("the matmul precision", *precision), "highest"),
        (_Setting("the default dtype", *dtype), torch.float32),
        (_Setting("autograd's switch", torch.is_grad_enabled, torch.set_grad_enabled), grad),
        (_Setting("deterministic algorithms", *deterministic), False),
        (_Setting("cuDNN's TF32", *tf32, quiet=True), False),
    ]


def _differs(setting: _Setting, value: Any) -> bool:
    try:
        return bool(_read(setting) != value)
    except Exception:  # it was set to something that cannot be compared, such as an array
        return True


def _read(setting: _Setting) -> Any:
    """What it is set to; the type of the error where it cannot be read (a folder that is gone)."""
    try:
        return setting.get()
    except Exception as err:
        return type(err)


_UNSET = getattr(_config_module, "_UNSET_SENTINEL", None)
_settled: dict[str, bytes] = {}  # by compiler: the hash of its flags
_of_cases: dict[str, Any] = {}  # dynamo's flags that are ours
_MOST_COMPILED = 8  # shapes of one function, dynamo's default


def compile_each(cases: int) -> None:
    """Let a function have code of its own for each of several cases, as in processes of their own.

    Else dynamo makes code for any shape from the second on, and runs the source from the ninth on.
    """
    _of_cases.clear()
    if cases > 1:
        _of_cases["automatic_dynamic_shapes"] = False
        _of_cases["recompile_limit"] = _MOST_COMPILED * cases
    _settled.clear()
    _settle_compilers()


def _settle_compilers() -> list[str]:
    """Give the flags of torch's compilers their defaults, once someone has loaded them.

    Reads torch's private tables, since a flag's default is nowhere else; where they are not as
    they were in torch 2.13, nothing is changed.
    """
    changed = []
    for name in ("dynamo", "inductor"):
        config: Any = sys.modules.get(f"torch._{name}.config")
        if config is None or not _remembered or config.get_hash() == _settled.get(name):
            continue
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of flags that are on their way out
            for flag, entry in config._config.items():
                default = entry.default if (e := entry.env_value_default) is _UNSET else e
                plain = entry.alias is None and entry.justknob is None and default is not _UNSET
                value, ours = getattr(config, flag), _of_cases.get(flag, default)
                if plain and value != ours:
                    setattr(config, flag, ours)
                    changed += [f"{name}'s flags"] * (value != default)  # who loads it sets none
        _settled[name] = config.get_hash()
    return list(dict.fromkeys(changed))


def beyond_repair() -> str | None:
    """What could not be put back, by name: nothing can be measured in this process any more."""
    return ", ".join(dict.fromkeys(_lasting)) or None


# The clocks that everything is timed by, as they were before anyone's code was loaded.
_TIME = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
         "process_time", "process_time_ns", "thread_time", "thread_time_ns")  # fmt: skip
_CLOCKS = [
    (f"{of}.{name}", owner, name, vars(owner)[name])
    for of, owner, names in (
        ("time", time, [name for name in _TIME if hasattr(time, name)]),
        ("torch.cuda", torch.cuda, ["synchronize", "Event"]),
        ("torch.cuda.Event", torch.cuda.Event, ["record", "synchronize", "elapsed_time"]),
    )
    for name in names
]


def restore_clocks() -> list[str]:
    """Put back the functions that tell time; return the names of those that were replaced."""
    replaced = []
    for name, owner, attribute, function in _CLOCKS:
        if vars(owner).get(attribute) is not function:
            setattr(owner, attribute, function)
            replaced.append(name)
    return replaced
