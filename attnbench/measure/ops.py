"""Which ops or kernels the time of a call goes to: sessions of torch's profiler, call by call.

An op here is what torch's dispatcher hands to a kernel: what that calls inside belongs to it (the
`copy_` in a `clone`). Around it stand composite ops (`matmul`), whose self time is their own work
alone. Time of a call outside of all of them is a gap: Python, and autograd's engine.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function  # torch.profiler loads compilers

from attnbench.base.sample import ALONE
from attnbench.measure.clock import cpu_ns, now_ns
from attnbench.measure.probes import (
    CALL,
    KERNELS_AHEAD,
    gpu_marks,
    is_op,
    on_gpu,
    own_changes,
    tree_of,
    walk,
)
from attnbench.measure.watch import collector_off

# Scopes of torch.compile, in which its own kernels run that no op names; one name for them all.
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction")
COMPILED = "compiled code"


@dataclass(frozen=True, kw_only=True)
class CallSeen:
    """One profiled call: by name of op or kernel how often it ran and its self time in µs.

    `total_us` is the call's time on the host (CPU), or from the begin of its first kernel to the
    end of its last (CUDA); `gaps_us` is what of it is outside ops, in `gaps` pieces on CUDA,
    where `launches_us` are the times from launches to their kernels, and `launched_by` has the ops
    that launched each kernel. `alone` is the share of the host's time that the call had its core.
    """

    total_us: float
    counts: Counter[str]
    self_us: dict[str, float]
    gaps_us: float
    gaps: int | None = None
    launches_us: tuple[float, ...] = ()
    launched_by: dict[str, set[str]] = field(default_factory=dict)
    alone: float = 1.0


class Session(NamedTuple):
    """A closed session of the profiler, and of each marked call the share of its CPU time."""

    profile: Any
    alone: tuple[float, ...]


def run_session(
    call: Callable[[], Any],
    device: str,
    calls: int,
    *,
    before: Callable[[], Any] = lambda: None,
    details: bool = False,
) -> Session:
    """Profile `calls` marked calls, behind one that is not marked.

    `before` is called before each, outside of the mark. With `details` shapes and memory are
    recorded, too, which makes small ops slower. A result is held until its mark has ended. On CUDA
    nothing should be timed in this process any more.
    """
    gpu = device == "cuda"
    knows, shares = not gpu and torch.get_num_threads() == 1, []
    with (
        collector_off(),
        profile(
            use_kineto=True,
            use_device="cuda" if gpu else None,
            record_shapes=details,
            profile_memory=details,
        ) as session,
    ):
        for _ in range(KERNELS_AHEAD if gpu else 0):  # which the profiler may lose
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        call()
        for _ in range(calls):
            before()
            if gpu:
                torch.cuda.synchronize()
            cpu_begin, begin = cpu_ns(), now_ns()
            with record_function(CALL):
                result = call()
            worked_ns, took_ns = cpu_ns() - cpu_begin, now_ns() - begin
            shares.append(min(1.0, worked_ns / took_ns) if knows and worked_ns else 1.0)
            if gpu:
                torch.cuda.synchronize()
            del result
    return Session(session, tuple(shares))


def calls_of(session: Session, device: str) -> list[CallSeen] | None:
    """Its marked calls in order; None where the GPU's profiler lost some of their kernels."""
    if device == "cuda":
        return gpu_calls(session.profile.kineto_results.events())
    marks = marks_of(tree_of(session.profile))
    return [cpu_call(mark, alone) for mark, alone in zip(marks, session.alone, strict=True)]


def marks_of(tree: list[Any]) -> list[Any]:
    """The nodes of the marked calls, in order of time."""
    marks = [event for event in walk(tree) if event.name == CALL]
    return sorted(marks, key=lambda event: event.start_time_ns)


def cpu_call(mark: Any, alone: float = 1.0) -> CallSeen:
    """A marked call on CPU, from its node in the profiler's tree of events."""
    counts: Counter[str] = Counter()
    self_ns: dict[str, int] = defaultdict(int)
    gaps_ns, stack = 0, [mark]
    while stack:
        event = stack.pop()
        inner = [child for child in event.children if child.tag.name == "TorchOp"]
        own_ns = event.duration_time_ns - sum(child.duration_time_ns for child in inner)
        name = event.name
        if is_op(event):
            counts[name] += 1
            if name not in composite_ops():
                self_ns[name] += event.duration_time_ns
                continue
            self_ns[name] += own_ns
        elif name.startswith(_COMPILED):
            counts[COMPILED] += 1
            self_ns[COMPILED] += own_ns
        else:
            gaps_ns += own_ns
        stack.extend(inner)
    return CallSeen(
        total_us=mark.duration_time_ns / 1000,
        counts=counts,
        self_us={name: ns / 1000 for name, ns in self_ns.items()},
        gaps_us=gaps_ns / 1000,
        alone=alone,
    )


@functools.cache
def composite_ops() -> frozenset[str]:
    """Ops that are written in terms of others, whatever the device: `aten::matmul`."""

    def names(key: str) -> set[str]:  # aten::mul.Tensor; events say aten::mul
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        return {x.partition(".")[0] for x in registered if not x.endswith("out")}

    explicit = "CPU CUDA CompositeExplicitAutograd CompositeExplicitAutogradNonFunctional".split()
    return frozenset(names("CompositeImplicitAutograd").difference(*map(names, explicit)))


def gpu_calls(events: list[Any]) -> list[CallSeen] | None:
    """The marked calls of a session on CUDA, from kineto's events; None if kernels are missing.

    Copies and fills of memory are rows as kernels are.
    """
    ops = _outermost(event for event in events if not on_gpu(event))
    begins = [begin for begin, _, _ in ops]
    found = []
    for asked, in_order in gpu_marks(events):
        if in_order is None:
            return None
        ran = sorted(in_order, key=lambda event: event.start_ns())
        self_us: dict[str, float] = defaultdict(float)
        by: dict[str, set[str]] = defaultdict(set)
        gaps_ns, gaps, end_ns = 0, 0, ran[0].start_ns()
        for event in ran:
            self_us[event.name()] += (event.end_ns() - event.start_ns()) / 1000
            at = asked[event.correlation_id()].start_ns()
            place = bisect_right(begins, at) - 1
            inside = place >= 0 and at <= ops[place][1]
            by[event.name()].add(ops[place][2] if inside else "")
            if event.start_ns() > end_ns:
                gaps_ns, gaps = gaps_ns + event.start_ns() - end_ns, gaps + 1
            end_ns = max(end_ns, event.end_ns())
        found.append(
            CallSeen(
                total_us=(end_ns - ran[0].start_ns()) / 1000,
                counts=Counter(event.name() for event in ran),
                self_us=dict(self_us),
                gaps_us=gaps_ns / 1000,
                gaps=gaps,
                launches_us=tuple(
                    (e.start_ns() - asked[e.correlation_id()].start_ns()) / 1000 for e in ran
                ),
                launched_by=dict(by),
            )
        )
    return found


def _outermost(on_host: Iterable[Any]) -> list[tuple[int, int, str]]:
    """Begin, end and name of the ops that are handed to kernels, in order; none inside another."""
    found: list[tuple[int, int, str]] = []
    for event in sorted(on_host, key=lambda e: (e.start_ns(), -e.end_ns())):
        name = event.name()
        is_op = "::" in name and not name.startswith("autograd::") and name not in composite_ops()
        if is_op and (not found or event.start_ns() >= found[-1][1]):
            found.append((event.start_ns(), event.end_ns(), name))
    return found


def quietest(calls: list[CallSeen]) -> CallSeen:
    """Of some calls in a row one that stands for them: each op's shortest time, and each count.

    Other work only ever adds to a time, for a slice of the scheduler's at once: it hits one op now
    and another then. What is longer than slices is hit in every call: together the ops take no
    more than the processor time of a call, the least of them.
    """
    own_us = min(call.total_us * min(1.0, call.alone / ALONE) for call in calls)
    names = {name for call in calls for name in call.self_us}
    least_us = {name: min(call.self_us.get(name, 0.0) for call in calls) for name in names}
    gaps_us = min(call.gaps_us for call in calls)
    share = min(1.0, own_us / ((sum(least_us.values()) + gaps_us) or 1.0))
    return CallSeen(
        total_us=own_us,
        counts=max((call.counts for call in calls), key=Counter.total),
        self_us={name: us * share for name, us in least_us.items()},
        gaps_us=gaps_us * share,
        alone=fmean(call.alone for call in calls),
    )


class SelfTime(NamedTuple):
    """Of an op or kernel: calls in one of the cell, self time in µs, both means; its quartiles."""

    name: str
    calls: float
    self_us: float
    low_us: float
    high_us: float


def self_times(calls: list[CallSeen]) -> list[SelfTime]:
    """Every op or kernel of some calls, the longest first.

    The quartiles are those of single calls, not an interval of the mean: more calls of one process
    do not show how it differs from the next, which for that one is all there is.
    """
    found = []
    for name in {name for call in calls for name in call.self_us}:
        times = [call.self_us.get(name, 0.0) for call in calls]
        count = sum(call.counts[name] for call in calls) / len(calls)
        low, _, high = quantiles(times, n=4, method="inclusive") if times[1:] else times * 3
        found.append(SelfTime(name, count, fmean(times), low, high))
    return sorted(found, key=lambda of: (-of.self_us, of.name))


class Change(NamedTuple):
    """An allocation, or with bytes below 0 a free, `t_us` after the begin of the call."""

    t_us: float
    bytes: int
    op: str | None


def memory_changes(mark: Any, device: str) -> list[Change]:
    """What a marked call allocates and frees, in order of time, from a session with details.

    Each belongs to the op that was handed to a kernel, else to the composite op around; a free
    outside of both has none. Frees of what was there before are left out.
    """
    seen: list[tuple[Any, str | None]] = []

    def look_into(event: Any, op: str | None, fixed: bool) -> None:
        for child in event.children:
            if child.tag.name == "Allocation":
                if child.typed[1].device.type == device:
                    seen.append((child, op))
            elif is_op(child) and not fixed:
                look_into(child, child.name, child.name not in composite_ops())
            else:
                look_into(child, op, fixed)

    look_into(mark, None, False)
    return [
        Change((at_ns - mark.start_time_ns) / 1000, size, op)
        for at_ns, size, op in own_changes(seen)
    ]
