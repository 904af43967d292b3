"""Kernels whose law is known, the ranges they are measured over, and the laws they are held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from attnbench.schema.finding import Verdict
from attnbench.theory.law import Law, parse

SMALLEST_US = 200.0  # of a kernel's work at the smallest size
_SMALL_FLOOR = 0.02  # of that: what starting a kernel takes where it is nothing to speak of
COUNTED_FROM = 2.0  # times the floor: work that the floor does not drown


@dataclass(frozen=True, kw_only=True)
class Range:
    """The sizes of one series, doubling."""

    first: int
    last: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """From the first to the last."""
        octaves = (self.last // self.first).bit_length()
        return tuple(self.first << step for step in range(octaves))

    @property
    def label(self) -> str:
        """As on the command line: `128..8192`."""
        return f"{self.first}..{self.last}"

    @property
    def octaves(self) -> float:
        """How often the size doubles."""
        return math.log2(self.last / self.first)


RANGES = (
    Range(first=128, last=8192), Range(first=256, last=4096), Range(first=512, last=2048),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """An imagined kernel: time = floor + work(n, range), the work in any unit.

    `law` is how the work grows. `floor_at` is the share of the largest size at which the floor
    equals the work; None where the floor is 2 % of the work at the smallest. From n = `switches`
    on another kernel runs, at `step` times the cost, whose name tells where `named`.
    """

    law: str
    work: Callable[[float], float]
    floor_at: float | None = None
    step: float = 1.0
    switches: int | None = None
    named: bool = False

    @property
    def power(self) -> float:
        """The power of n in its law."""
        return float(parse(self.law).degree("n"))

    def floor_us(self, over: Range) -> float:
        """What a call takes however small the problem is."""
        if self.floor_at is None:
            return _SMALL_FLOOR * SMALLEST_US
        return self._bare_us(self.floor_at * over.last, over)

    def time_us(self, n: int, over: Range) -> float:
        """The time of a call without noise."""
        return self.floor_us(over) + self._bare_us(n, over) * self._factor(n)

    def name(self, n: int) -> str:
        """The kernel that runs at this size."""
        return "second" if self.named and self._switched(n) else "first"

    def octaves(self, over: Range) -> float:
        """Over how many octaves the work is at least twice the floor: what a fit can use."""
        floor_us = self.floor_us(over)
        used = [n for n in over.sizes if self._bare_us(n, over) >= COUNTED_FROM * floor_us]
        return math.log2(used[-1] / used[0]) if used else 0.0

    def slope(self, over: Range) -> float:
        """The exponent that its work shows over the range, logarithms and all."""
        rise = math.log(self.work(over.last) / self.work(over.first))
        return rise / math.log(over.last / over.first)

    def _bare_us(self, n: float, over: Range) -> float:
        return SMALLEST_US * self.work(n) / self.work(over.first)

    def _switched(self, n: int) -> bool:
        return self.switches is not None and n >= self.switches

    def _factor(self, n: int) -> float:
        return self.step if self._switched(n) else 1.0


def _power(exponent: float) -> Kernel:
    return Kernel(law=f"n^{exponent:g}" if exponent != 1 else "n", work=lambda n: n**exponent)


def _square(**fields: float | bool | None) -> Kernel:
    return Kernel(law="n^2", work=lambda n: n**2, **fields)  # type: ignore[arg-type]


_SWITCHES = 1024  # the middle of all ranges
POWERS = (1.0, 1.5, 1.8, 2.0, 2.3, 3.0)
KERNELS: dict[str, Kernel] = {
    **{kernel.law: kernel for kernel in map(_power, POWERS)},
    "small floor + n^2": _square(floor_at=1 / 32),
    "floor + n^2": _square(floor_at=1 / 4),
    "n^2, step of 5 %": _square(step=1.05, switches=_SWITCHES),
    "n^2, kernel switch": _square(step=2.0, switches=_SWITCHES, named=True),
    "n^2, silent switch": _square(step=2.0, switches=_SWITCHES),
    "n log n": Kernel(law="n log n", work=lambda n: n * math.log(n)),
    "n^2 log n": Kernel(law="n^2 log n", work=lambda n: n**2 * math.log(n)),
}
LAWS: tuple[str, ...] = (*(_power(p).law for p in POWERS), "n log n", "n^2 log n", "O(n^2)")

# Laws whose exponents over the range are closer than this and of which one has a logarithm cannot
# be told apart: 1/ln n adds 0.1 to 0.2 to an exponent, and exponents are judged to ± 0.15.
UNRESOLVED = 0.25


def right(kernel: Kernel, text: str, over: Range) -> Verdict | None:
    """What should be said of the law; None where logarithms leave it open."""
    law = parse(text)
    declared = Kernel(law=text, work=lambda n: _value(law, n)).slope(over)
    shown = kernel.slope(over)
    logs = law.has_logs or parse(kernel.law).has_logs
    if logs and abs(shown - declared) < UNRESOLVED:
        return None
    power = float(law.degree("n"))
    fits = kernel.power <= power if law.bound else kernel.power == power
    return "holds" if fits else "refuted"


def _value(law: Law, n: float) -> float:
    return sum(term.value({"n": n, "d": 1.0, "w": 1.0}) for term in law.terms)
