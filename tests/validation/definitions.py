"""Do definitions keep their digits? In float64 they are held against mpmath, formula by formula.

Each formula is written down here a second time, pair by pair and without a stabiliser, for numbers
of any kind: with 50 digits it gives the exact result, with intervals of 53 bits (mpmath's `iv`) the
numbers between which every computation lies that rounds as float64 does. A definition must lie
within four of their widths: it rounds exponents twice more, where a maximum is subtracted, and sums
in another order, by functions of the library that are right to an ulp. Below the least normal
number float64 has no digits to keep. Intervals take the numbers of a formula for independent, so
that each step of Nyströmformer's iteration widens them tenfold. What is drawn (directions,
mixtures, rotations, patterns) is taken from the implementations.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from mpmath import iv, mp  # type: ignore[import-untyped]

from attnbench.api import Case, Patterned, implementation
from attnbench.api.loader import load_built_in
from attnbench.schema.case import parse_mask
from tests.validation.page import Table
from tests.validation.runner import Ended, Tell

WIDTHS, LEAST = 4, sys.float_info.min
HEADS, DIMS, VALUES = 2, 3, 2
INPUTS = ("x 1", "x 100", "x 0.01", "far below 0", "first keys x 100")
Matrix = list[list[Any]]


class Head(NamedTuple):
    """One head, with numbers of some kind, and what is drawn for it."""

    numbers: Any
    case: Case
    drawn: Any
    number: int
    q: Matrix
    k: Matrix
    v: Matrix

    def scores(self, q: Matrix, k: Matrix) -> Matrix:
        scale = self.numbers.mpf(self.case.softmax_scale)
        return [[dot(x, y) * scale for y in k] for x in q]

    def softmax(self, q: Matrix, k: Matrix) -> Matrix:
        weights = [[self.numbers.exp(score) for score in row] for row in self.scores(q, k)]
        return [[weight / sum(row) for weight in row] for row in weights]

    def admitted(self, query: int) -> range:
        last = query + self.case.kv_len - self.case.seq_len
        return range(self.case.kv_len if self.case.unmasked else max(0, last + 1))

    def means(self, weigh: Callable[[int, int], Any], seen: Callable[[int], Any]) -> Matrix:
        """Of the values that a query sees, by their weights; 0 of none."""
        found = []
        for i in range(self.case.seq_len):
            weights = {j: weigh(i, j) for j in seen(i)}
            total = sum(weights.values()) if weights else 1
            sums = (sum(w * self.v[j][n] for j, w in weights.items()) for n in range(VALUES))
            found.append([x / total for x in sums])
        return found


class Checked(NamedTuple):
    """One definition on some inputs; errors and what they may be relative to the largest output."""

    name: str
    inputs: str
    error: float
    allowed: float
    of_allowed: float  # the largest error of an element / what that may be


def dot(a: list[Any], b: list[Any]) -> Any:
    return sum((x * y for x, y in zip(a[1:], b[1:], strict=True)), a[0] * b[0])


def columns(x: Matrix) -> Matrix:
    return [list(column) for column in zip(*x, strict=True)]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [[dot(row, column) for column in columns(b)] for row in a]


def middle(x: Any) -> float:
    return float(x.mid if hasattr(x, "mid") else x)


def linear(head: Head) -> Matrix:
    phi_q, phi_k = (
        [[head.numbers.exp(x) if x < 0 else x + 1 for x in row] for row in rows]
        for rows in (head.q, head.k)
    )
    return head.means(lambda i, j: dot(phi_q[i], phi_k[j]), head.admitted)


def performer(head: Head) -> Matrix:
    half = head.numbers.mpf(head.case.softmax_scale) / 2
    of_keys = [[x - half * dot(row, row) for x in product([row], head.drawn)[0]] for row in head.k]
    of_queries = product(head.q, head.drawn)

    def weight(i: int, j: int) -> Any:
        return sum(head.numbers.exp(x + y) for x, y in zip(of_queries[i], of_keys[j], strict=True))

    return head.means(weight, head.admitted)


def retention(head: Head) -> Matrix:
    case, v = head.case, head.v
    gamma = 1 - head.numbers.mpf(2) ** (-5 - head.number * case.kv_heads // case.heads)
    scores, later = head.scores(head.q, head.k), case.kv_len - case.seq_len

    def weighed(i: int, n: int) -> Any:
        return sum(gamma ** (i + later - j) * scores[i][j] * v[j][n] for j in head.admitted(i))

    return [[weighed(i, n) for n in range(VALUES)] for i in range(case.seq_len)]


def linformer(head: Head) -> Matrix:
    mixed_k, mixed_v = map(product, head.drawn, (head.k, head.v))
    return product(head.softmax(head.q, mixed_k), mixed_v)


def nystrom(head: Head) -> Matrix:
    count, iterations = head.drawn

    def landmarks(x: Matrix) -> Matrix:
        ends = [(i * len(x) // count, -(-(i + 1) * len(x) // count)) for i in range(count)]
        return [[sum(c) / (end - first) for c in columns(x[first:end])] for first, end in ends]

    def less(number: int, x: Matrix) -> Matrix:
        return [[number * (i == j) - y for j, y in enumerate(row)] for i, row in enumerate(x)]

    few_q, few_k = landmarks(head.q), landmarks(head.k)
    a = head.softmax(few_q, few_k)
    largest = max((sum(column) for column in columns(a)), key=middle)
    z = [[x / largest for x in row] for row in columns(a)]
    for _ in range(iterations):
        az = product(a, z)
        inner = less(13, product(az, less(15, product(az, less(7, az)))))
        z = [[x / 4 for x in row] for row in product(z, inner)]
    last = head.softmax(few_q, head.k)
    return product(product(product(head.softmax(head.q, few_k), z), last), head.v)


def reformer(head: Head) -> Matrix:
    numbers, case, q, chunk = head.numbers, head.case, head.q, 2
    tokens = range(case.seq_len)
    scores = head.scores(q, [[x / numbers.sqrt(dot(row, row)) for x in row] for row in q])
    met = [[0 for _ in tokens] for _ in tokens]
    for rotation in head.drawn:
        turned = [list(map(middle, row)) for row in product(q, rotation)]
        both = [row + [-x for x in row] for row in turned]
        bucket = [row.index(max(row)) for row in both]
        chunks = [sum(bucket[j] == bucket[i] for j in range(i)) // chunk for i in tokens]
        for i, j in itertools.product(tokens, tokens):
            met[i][j] += bucket[i] == bucket[j] and chunks[i] - chunks[j] in (0, 1)

    def seen(i: int) -> list[int]:
        return [j for j in tokens if j != i and met[i][j] and (case.unmasked or j < i)] or [i]

    def weight(i: int, j: int) -> Any:
        return numbers.mpf(1) if i == j else met[i][j] * numbers.exp(scores[i][j])

    return head.means(weight, seen)


def pattern(head: Head) -> Matrix:
    scores, keys = head.scores(head.q, head.k), range(head.case.kv_len)
    return head.means(
        lambda i, j: head.numbers.exp(scores[i][j]), lambda i: [j for j in keys if head.drawn[i][j]]
    )


FORMULAS: dict[str, Callable[[Head], Matrix]] = {
    "linear": linear, "linear-recurrent": linear, "linear-parallel": linear,
    "performer:features=5": performer, "retention": retention,
    "linformer:3": linformer, "nystrom:3": nystrom,
    "reformer:buckets=2:rounds=2:chunk=2": reformer,
    "sliding-window:4": pattern, "dilated-window:window=2:dilation=2": pattern,
    "window-global:window=2:global_tokens=1": pattern,
    "strided:3": pattern, "strided-fixed:stride=3:summary=1": pattern,
    "bigbird:block=1:random_blocks=1": pattern,
}  # fmt: skip


def drawn(name: str, case: Case) -> Any:
    """What a formula needs beside q, k and v, as floats."""
    impl = implementation(name)
    base = name.partition(":")[0]
    module: Any = sys.modules.get(f"attnbench_impls.{base}")
    definition = impl.definition(case) if impl.definition else None
    if isinstance(definition, Patterned):
        return definition.admitted.tolist()
    if base == "performer":
        return module.directions(case, 5, 0).tolist()
    if base == "linformer":
        return module.projections(case, 3, 0).tolist()
    if base == "reformer":
        return module.draw(case, 2, 2, 0).tolist()
    return (3, impl.values["iterations"]) if base == "nystrom" else None


def inputs(case: Case, how: str, seed: int) -> list[torch.Tensor]:
    """q, k and v, normal numbers made larger or smaller."""
    generator, h, g = torch.Generator().manual_seed(seed), case.heads, case.kv_heads
    shapes = (h, case.seq_len, DIMS), (g, case.kv_len, DIMS), (g, case.kv_len, VALUES)
    like: Any = {"generator": generator, "dtype": torch.float64}
    q, k, v = (torch.randn(1, *shape, **like) for shape in shapes)
    factor = {"x 100": 100.0, "x 0.01": 0.01}.get(how, 1.0)
    q, k = q * factor, k * factor
    if how == "far below 0":
        q, k = q - 50, k - 50
    if how == "first keys x 100":
        k[:, :, : case.kv_len // 2] *= 100
    return [q, k, v]


def checked(name: str, mask: str, how: str, seed: int) -> Checked | None:
    """One definition held against its formula; None where it takes no such case."""
    case = Case(
        heads=HEADS, kv_heads=1, head_dim=DIMS, value_dim=VALUES, dtype="float64",
        seq_len=6 if name.startswith("reformer") else 5, kv_len=6, mask=parse_mask(mask),
    )  # fmt: skip
    impl = implementation(name)
    if impl.reason_against(case):
        return None
    assert impl.definition is not None
    q, k, v = inputs(case, how, seed)
    found = impl.definition(case)(q, k, v)[0].tolist()
    given = drawn(name, case)

    def exactly(numbers: Any, x: Any) -> Any:
        if isinstance(x, list):
            return [exactly(numbers, y) for y in x]
        return numbers.mpf(x) if isinstance(x, float) else x

    results = []
    for numbers in (mp, iv):
        (*qs,), (keys,), (values,) = (exactly(numbers, x[0].tolist()) for x in (q, k, v))
        heads = (
            Head(numbers, case, exactly(numbers, given), index, queries, keys, values)
            for index, queries in enumerate(qs)
        )
        results.append(list(map(FORMULAS[name], heads)))
    triples = [
        (abs(x - exact), WIDTHS * mp.mpf(getattr(between, "delta", 0)) + LEAST, abs(exact))
        for got, right, bounds in zip(found, *results, strict=True)
        for of_query in zip(got, right, bounds, strict=True)
        for x, exact, between in zip(*of_query, strict=True)
    ]
    errors, allowed, sizes = zip(*triples, strict=True)
    of_allowed = max(map(operator.truediv, errors, allowed))
    error, may_be = (float(max(some) / max(sizes)) for some in (errors, allowed))
    return Checked(name, how, error, may_be, float(of_allowed))


def worst(draws: int) -> list[Checked]:
    """Of so many draws under both masks, of each definition and kind of inputs."""
    load_built_in()
    mp.dps, iv.prec = 50, 53
    found = []
    for name, how in itertools.product(FORMULAS, INPUTS):
        cases = itertools.product(("full", "causal"), range(draws))
        rows = [checked(name, mask, how, seed) for mask, seed in cases]
        found.append(max(filter(None, rows), key=lambda row: row.of_allowed))
    return found


def examine(_: Tell, *, draws: int) -> Ended:
    """Whether none is off by more than it may be."""
    found = worst(draws)
    rows = tuple(
        (r.name, r.inputs, f"{r.error:.1e}", f"{r.allowed:.1e}", f"{r.of_allowed:.2g}")
        for r in found
    )
    header = ("definition", "inputs", "relative error", "allowed", "error / allowed")
    table = Table(title="Definitions in float64 against mpmath", header=header, rows=rows)
    return Ended(met=all(r.of_allowed <= 1 for r in found), tables=[table])
