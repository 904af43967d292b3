"""What differs between two profiles of one case, op by op: the parts add up to the whole."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal

from attnbench.base.stats import quotient_interval
from attnbench.errors import UsageError
from attnbench.machine.environment import Environment
from attnbench.schema.profile import Op, Profile

What = Literal["appeared", "vanished", "grew", "shrank", "other work", "more", "noise", "outside"]
TOGETHER = ("more", "noise", "outside")  # entries that are no single op

# A process can be twice as slow as the next one of the same code, as long as it lives (a busy
# hyperthread), in all its ops. So an op that is called alike has changed only if it has so beside
# the others that are, too; and few calls tell how far they scatter.
WIDER = 0.5  # of an op's spread, the middle half of its calls, at either end
COMMON = 0.2  # of both times that alike ops take, so that what they have in common says something
ALIKE = 0.01  # counts are means over calls: what happens now and then is no change

_NOISE_OF_NAMES = re.compile(r"^void\s+|\(anonymous namespace\)::|\s+")
# Inside of template arguments these tell one kernel from another; numbers and types do not.
_FUNCTORS = re.compile(r"\w*[Ff]unctor\w*|\w+_kernel\w*|\w+Ops?\b")
_VERSION = re.compile(r"(?:_v\d+|_sm_?\d+|_\d+d\w*|_\d+)+$")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one op, or several together, contribute to the difference of two times.

    Times are µs of one call of the cell, counts are of one call; 0 where the op is not there.
    `assured_us` is the part of the change that noise does not explain: how far apart the two self
    times lie with their spread, 0 where these meet; all of it where the op is in one alone, since
    that is exact. `bytes` is the change of bytes read and written, None where unknown.
    """

    name: str
    what: What
    a_us: float
    b_us: float
    a_count: float = 0.0
    b_count: float = 0.0
    bytes: float | None = None
    assured_us: float = 0.0

    @property
    def delta_us(self) -> float:
        """B's time less A's."""
        return self.b_us - self.a_us


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two profiles of one case. `changes` add up to `delta_us`.

    First stand the ops that changed beyond noise or do other work (called differently, or on other
    sizes), by their change, of which only the assured part counts where an op is in both; then what
    is within noise as one entry, and what is outside ops. `common` is by which factor the ops that
    are alike in both take longer in B, None where these are not a good part of both: the machine's
    speed, or a cause common to all. `environment` has the facts that differ: name, A's and B's
    value.
    """

    a: Profile
    b: Profile
    changes: tuple[Change, ...]
    common: float | None
    environment: tuple[tuple[str, Any, Any], ...]

    @property
    def delta_us(self) -> float:
        """B's unprofiled time less A's."""
        return self.b.time.median_us - self.a.time.median_us

    @property
    def ratio(self) -> float:
        """B's unprofiled time over A's."""
        return self.b.time.median_us / self.a.time.median_us

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """Where the ratio lies, by the intervals of both times; None where one is unknown."""
        a, b = self.a.time, self.b.time
        if a.low_us is None or a.high_us is None or b.low_us is None or b.high_us is None:
            return None
        return quotient_interval((b.low_us, b.high_us), (a.low_us, a.high_us))

    @property
    def ops(self) -> tuple[Change, ...]:
        """The entries of single ops: those that changed."""
        return tuple(change for change in self.changes if change.what not in TOGETHER)


def difference(a: Profile, b: Profile) -> Difference:
    """Match the ops of two profiles by name and say what each adds to the difference of times.

    Raises:
        UsageError: the profiles are of different cases.
    """
    ours, theirs = a.cell.case.to_json(), b.cell.case.to_json()
    if ours != theirs:
        parts = [f"{k} {ours[k]} and {theirs[k]}" for k in ours if ours[k] != theirs[k]]
        raise UsageError(f"these profiles are of different cases: {', '.join(parts)}")
    pairs = [(name, Side.of(own), Side.of(other)) for name, own, other in matched(a.ops, b.ops)]
    alike = {name: Ratio.of(own, other) for name, own, other in pairs if _alike(own, other)}
    every = [
        _change(name, own, other, alike.get(name), [alike[of] for of in alike if of != name])
        for name, own, other in pairs
    ]
    changed = [change for change in every if change.what != "noise"]
    changed.sort(key=lambda change: (-change.assured_us, -abs(change.delta_us), change.name))
    within = [change for change in every if change.what == "noise"]
    shared = [(own.us, other.us) for name, own, other in pairs if name in alike]
    sums = [sum(times) for times in zip(*shared, strict=True)]
    much = bool(sums) and sums[0] >= COMMON * a.self_us and sums[1] >= COMMON * b.self_us
    return Difference(
        a=a,
        b=b,
        changes=(
            *changed,
            *together(f"{len(within)} within noise", "noise", within),
            Change(name="outside ops", what="outside", a_us=a.outside_us, b_us=b.outside_us),
        ),
        common=common(alike.values()).middle if much else None,
        environment=Environment(a.environment).differences(Environment(b.environment)),
    )


def together(name: str, what: What, changes: Sequence[Change]) -> tuple[Change, ...]:
    """Several entries as one; nothing for none."""
    if not changes:
        return ()
    names = ("a_us", "b_us", "a_count", "b_count")
    sums = {of: sum(getattr(change, of) for change in changes) for of in names}
    known = [change.bytes for change in changes if change.bytes is not None]
    bytes_ = sum(known) if len(known) == len(changes) else None
    return (Change(name=name, what=what, bytes=bytes_, **sums),)


def matched(a: Iterable[Op], b: Iterable[Op]) -> list[tuple[str, tuple[Op, ...], tuple[Op, ...]]]:
    """The ops of A and B under one name each: by their names, and what is left by `kernel_name`.

    Names are loosened only as far as needed: where A and B have the same name, that decides. Ops
    of one profile that share a loosened name are one entry with those of the other.
    """
    left, found = [list(a), list(b)], []
    names: tuple[Callable[[str], str], ...] = (str, _signature, kernel_name)
    for name_of in names:
        groups: tuple[dict[str, list[Op]], ...] = (defaultdict(list), defaultdict(list))
        for ops, group in zip(left, groups, strict=True):
            for op in ops:
                group[name_of(op.name)].append(op)
        both = sorted(groups[0].keys() & groups[1].keys())
        found += [(name, tuple(groups[0][name]), tuple(groups[1][name])) for name in both]
        left = [[op for op in ops if name_of(op.name) not in both] for ops in left]
    found += [(op.name, (op,), ()) for op in left[0]] + [(op.name, (), (op,)) for op in left[1]]
    return found


def kernel_name(name: str) -> str:
    """A kernel's name without parameters, template arguments and versions.

    `void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>(int)`
    is `at::native::vectorized_elementwise_kernel<CUDAFunctor_add>`: functors stay, since these tell
    kernels apart. `triton_poi_fused_mul_0` is `triton_poi_fused_mul`, `gemm_sm80` is `gemm`.
    """
    head, _, arguments = _signature(name).partition("<")
    functors = sorted(set(_FUNCTORS.findall(arguments)))
    short = _VERSION.sub("", head) or head
    return f"{short}<{', '.join(functors)}>" if functors else short


def _signature(name: str) -> str:
    """Without return type, white space and parameters; template arguments stay."""
    plain, depth = _NOISE_OF_NAMES.sub("", name), 0
    for at, letter in enumerate(plain):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and at:
            return plain[:at]
    return plain


@dataclass(frozen=True, kw_only=True)
class Side:
    """The ops of one name in one profile, together; of none, 0 of everything."""

    us: float
    low_us: float
    high_us: float
    count: float
    bytes: float | None

    @classmethod
    def of(cls, ops: Sequence[Op]) -> Side:
        """Sums; an unknown spread is from 0 to infinity, and a mean outside of it widens it."""
        low = sum(0.0 if op.low_us is None else min(op.low_us, op.self_us) for op in ops)
        high = sum(math.inf if op.high_us is None else max(op.high_us, op.self_us) for op in ops)
        more = WIDER * (high - low)
        return cls(
            us=sum(op.self_us for op in ops),
            low_us=max(0.0, low - more),
            high_us=high + more,
            count=sum(op.count for op in ops),
            bytes=None if any(op.bytes is None for op in ops) else sum(op.bytes or 0 for op in ops),
        )


@dataclass(frozen=True)
class Ratio:
    """B's self time over A's: the least, the middle and the most it may be, and a weight.

    The weight is the root of the time, so that neither one long op nor many short ones decide.
    """

    least: float
    middle: float
    most: float
    weight: float

    @classmethod
    def of(cls, a: Side, b: Side) -> Ratio:
        """Of an op that is in both profiles."""
        least = b.low_us / a.high_us if a.high_us else 0.0
        middle = b.us / a.us if a.us else 1.0
        most = b.high_us / a.low_us if a.low_us else math.inf
        return cls(least, middle, most, math.sqrt(math.sqrt(a.us * b.us)))


def common(ratios: Iterable[Ratio]) -> Ratio:
    """The weighted median of each of their three figures; 1 of none."""
    found = list(ratios) or [Ratio(1.0, 1.0, 1.0, 1.0)]
    half = sum(ratio.weight for ratio in found) / 2

    def middle(name: str) -> float:
        ordered = sorted(found, key=attrgetter(name))
        sums = accumulate(ratio.weight for ratio in ordered)
        at = next(of for of, total in zip(ordered, sums, strict=True) if total >= half)
        return float(getattr(at, name))

    return Ratio(middle("least"), middle("middle"), middle("most"), 2 * half)


def _alike(a: Side, b: Side) -> bool:
    """Called as often in both, on as many bytes where these are known."""
    sizes = () if a.bytes is None or b.bytes is None else ((a.bytes, b.bytes),)
    pairs = ((a.count, b.count), *sizes)
    return all(abs(one - other) <= ALIKE * max(one, other) for one, other in pairs)


def _change(name: str, a: Side, b: Side, own: Ratio | None, others: Sequence[Ratio]) -> Change:
    """What became of an op; `own` is None unless it is alike in both, as all `others` are."""
    least, most = 1.0, 1.0
    if own is not None:
        shared = common(others)
        least, most = min(1.0, shared.least), max(1.0, shared.most)
    assured_us = max(0.0, b.low_us - a.high_us * most, a.low_us * least - b.high_us)
    what: What = "grew" if b.us > a.us else "shrank"
    if not a.count or not b.count:
        what, assured_us = "appeared" if b.count else "vanished", abs(b.us - a.us)
    elif not assured_us:
        what = "other work" if own is None else "noise"
    bytes_ = None if a.bytes is None or b.bytes is None else b.bytes - a.bytes
    return Change(
        name=name, what=what, a_us=a.us, b_us=b.us, a_count=a.count, b_count=b.count,
        bytes=bytes_, assured_us=assured_us,
    )  # fmt: skip
