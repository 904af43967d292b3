"""Forks processes that begin with everything imported, and with nothing computed yet.

The one that forks holds no thread pool and no CUDA context, and loads nobody's files: what it
shares with its processes is code. Each has its memory to itself, and ends when this one does, and
with it all that it started: whose parent dies becomes a child of this one, which ends it. They
share the address layout of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import psutil

_POLL_S = 0.005
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux: nowhere else is anything forked
_PATIENCE_S = 3.0  # for those that are killed to end: below `_GRACE_S` in execution/process.py
_GENERATIONS = 1000  # of processes that start others faster than they can be ended


def become(main: Callable[..., None]) -> None:
    """Call `main` with the descriptors of a process: where it reads, where it writes, and more.

    They stand on the command line, a list as JSON in which that of its standard error is the third.
    Where there is but one, that is the socket on which processes are asked for: `main` is then
    called in each.
    """
    descriptors = json.loads(sys.argv[1])
    gc.freeze()  # what was imported stays: a collection would copy it into each process
    gc.enable()
    read, write, stderr, *more = descriptors if len(descriptors) > 1 else next_fork(*descriptors)
    if sys.platform == "linux":
        # The kernel is to kill it when its parent ends, were it in the middle of a call.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor in (read, write):
        os.set_inheritable(descriptor, False)
    for stream in (1, 2):  # whatever implementations print
        os.dup2(stderr, stream)
    os.close(stderr)
    main(read, write, *more)


def next_fork(control: int) -> list[int]:
    """Serve requests on the socket `control`; return in each process that is forked, alone.

    A request is [what, process, seconds]: `fork`, with the descriptors that the new process is to
    have, and which are returned in it; `await` the end of a process for that long; `kill` it with
    all that it started. The answers: its id; its exit code, negative for a signal, or null; null.
    When the socket is closed, as it is when the runner dies, whatever lives is killed, and this
    process ends.
    """
    alive: set[int] = set()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=control) as line:
        while True:
            text, descriptors, *_ = socket.recv_fds(line, 1 << 10, 8, socket.MSG_CMSG_CLOEXEC)
            if not text:
                break
            what, process, within_s = json.loads(text)
            answer: int | None = None
            if what == "fork":
                answer = os.fork()
                if not answer:
                    os.setpgid(0, 0)
                    return descriptors
                with contextlib.suppress(OSError):  # it has done so itself
                    os.setpgid(answer, answer)
                alive.add(answer)
                for descriptor in descriptors:
                    os.close(descriptor)
            elif what == "await" and process in alive:
                answer = _returncode(process, time.monotonic() + within_s)
            elif process in alive:
                alive.remove(process)
                _kill_others(alive)
            line.send(json.dumps(answer).encode())
    _kill_others(set())
    os._exit(0)


def _returncode(process: int, deadline: float) -> int | None:
    """How it ended; its id stays taken until it is killed, so that nobody else's group can be."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_PID, process, flags)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill_others(alive: set[int]) -> None:
    """End each child but those that are `alive`; what it started becomes a child when it ends.

    One that cannot be ended is `alive` from then on: its owner is another user by now, or it is
    stuck in a driver, where a signal waits until that lets it go.
    """
    for _ in range(_GENERATIONS):
        others = {child.pid for child in psutil.Process().children()} - alive
        for child in others:
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:
                alive.add(child)
        deadline = time.monotonic() + _PATIENCE_S
        while left := {child for child in others - alive if os.waitpid(child, os.WNOHANG)[0] == 0}:
            others = left  # the rest is gone
            if time.monotonic() > deadline:
                alive |= left
            time.sleep(_POLL_S)
        if not others:
            return
