"""Implementations that do harm, for `--impl tests/hostile.py`; each is right in every other way.

`FATES` says which statuses each may get. Beside them `naive` and `sdpa` must be `ok`, and so must
each of them at n = `HARMLESS`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import attention

# Of the output and the keys: what is returned in place of the output, None: the output.
Harm = Callable[[torch.Tensor, torch.Tensor], Any]
HARMLESS = 8
HARM: dict[str, Harm] = {}
FATES: dict[str, set[str]] = {}
FOREVER_S = 100_000  # by their command lines `sleep 100000` what was left behind is found
_once: set[str] = set()
_kept: list[Any] = []
_leaked: list[Any] = []


def harm(*fates: str) -> Callable[[Harm], Harm]:
    """Enter a function into the tables, by its name with hyphens."""

    def enter(function: Harm) -> Harm:
        name = function.__name__.replace("_", "-")
        HARM[name], FATES[name] = function, set(fates)
        return function

    return enter


def first(name: str) -> bool:
    """True once in a process."""
    new = name not in _once
    _once.add(name)
    return new


def fork(*, session: bool = False) -> None:
    """Leave a process behind that holds every descriptor of this one."""
    if not os.fork():
        if session:
            os.setsid()
        os.execvp("sleep", ["sleep", str(FOREVER_S)])


# Deaths.


@harm("crashed")
def segfaults(o, k):
    ctypes.string_at(0)


@harm("crashed")
def aborts(o, k):
    print("assertion failed: the reason of the abort", file=sys.stderr, flush=True)
    os.abort()


@harm("crashed")
def exits_with_0(o, k):
    os._exit(0)


@harm("crashed")
def exits_with_3(o, k):
    sys.exit(3)


@harm("crashed")
def kills_itself(o, k):
    os.kill(os.getpid(), signal.SIGKILL)


@harm("crashed")
def dies_with_a_child(o, k):
    """The child holds the pipes to the runner and standard error."""
    if not os.fork():
        os.setsid()
        time.sleep(FOREVER_S)
    os.abort()


# Deaths in the time of somebody else. The one who is to blame may be done by then.


def in_a_while(function: Callable[[], Any]) -> None:
    threading.Timer(0.7, function).start()


@harm("crashed", "ok")
def segfaults_later(o, k):
    if first("segfaults"):
        in_a_while(lambda: ctypes.string_at(0))


@harm("crashed", "ok")
def alarms_later(o, k):
    if first("alarms"):
        signal.setitimer(signal.ITIMER_REAL, 0.7)


# Hangs.


@harm("timeout")
def hangs(o, k):
    time.sleep(FOREVER_S)


@harm("timeout")
def hangs_with_the_gil(o, k):
    ctypes.PyDLL(None).sleep(FOREVER_S)


@harm("timeout")
def stops_itself(o, k):
    os.kill(os.getpid(), signal.SIGSTOP)


@harm("timeout", "error")
def ignores_signals_and_hangs(o, k):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER_S)


@harm("timeout", "crashed")
def hangs_at_exit(o, k):
    atexit.register(time.sleep, FOREVER_S)
    sys.exit(1)


# Exceptions, and memory.


@harm("error")
def raises(o, k):
    raise ValueError("\x1b[31mred\x1b[0m \x07\x00 and \ud800, \x85 in two\nlines")


@harm("error", "crashed")
def recurses(o, k):
    """Through C, whose stack is what ends."""
    sys.setrecursionlimit(10**9)
    sorted([o], key=lambda o: recurses(o, k))


@harm("oom")
def asks_for_too_much(o, k):
    torch.empty(1 << 50)


@harm("oom")
def leaks(o, k):
    """Address space alone: no other process is to suffer."""
    while True:
        _leaked.append(torch.empty(1 << 28))


# Output.


@harm("ok")
def prints(o, k):
    if first("prints"):
        print("x" * (50 << 20))


@harm("ok", "error")
def prints_events(o, k):
    os.write(1, b'{"type":"Done"}\n')


# Descriptors.


@harm("crashed", "error")
def closes_descriptors(o, k):
    os.closerange(3, 100)


@harm("crashed", "error", "timeout")
def replaces_descriptors(o, k):
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in set(range(3, 100)) - {null}:
        os.dup2(null, descriptor)


@harm("error", "crashed")
def writes_everywhere(o, k):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"garbage\n")
    time.sleep(FOREVER_S)


# Processes that are left behind.


@harm("ok")
def leaves_a_child(o, k):
    if first("child"):
        subprocess.Popen(["sleep", str(FOREVER_S)])


@harm("ok")
def leaves_a_session(o, k):
    if first("session"):
        fork(session=True)


@harm("ok")
def leaves_a_daemon(o, k):
    if first("daemon"):
        child = os.fork()
        if not child:
            os.setsid()
            fork()
            os._exit(0)
        os.waitpid(child, 0)


@harm("ok", "crashed", "error")
def returns_twice(o, k):
    if first("twice"):
        os.fork()


# The state of the process.


@harm("ok", "incorrect")
def sets_what_is_global(o, k):
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float16)
    torch.set_grad_enabled(True)
    torch.manual_seed(1)


@harm("error")
def leaves_inference_mode_on(o, k):
    """Nothing outside can leave it."""
    _kept.append(torch.inference_mode())
    _kept[-1].__enter__()


@harm("ok")
def sets_the_default_device(o, k):
    torch.set_default_device("meta")


@harm("incorrect")
def slows_the_clock(o, k):
    real = time.perf_counter_ns
    time.perf_counter_ns = lambda: real() // 2


@harm("ok", "error")
def handles_signals(o, k):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


@harm("ok", "error")
def deletes_its_folder(o, k):
    folder = tempfile.mkdtemp(prefix="hostile-")
    os.chdir(folder)
    os.rmdir(folder)


# Results.


@harm("incorrect")
def writes_to_its_input(o, k):
    k.zero_()


def register(name: str, function: Harm) -> None:
    @attention(name)
    def core(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        o_BHLV = scaled_dot_product_attention(q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale)
        found = function(o_BHLV, k_BGSD) if q_BHLD.shape[2] != HARMLESS else None
        return o_BHLV if found is None else found


if not __name__.startswith("tests."):  # tests import the tables alone
    for _name, _function in HARM.items():
        register(_name, _function)
    torch.set_default_dtype(torch.float64)
    os.environ["MINE"] = "1"  # may stay: what is imported when something is built may need it
