"""The terms that a model of time may be made of: rows by workload, and what a law says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnbench.theory.law import Law, Term, parse

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Band = Literal["any", "full", "window"]

FLOOR = "floor"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A term: `law` in n, d and w, times the sizes named in `per` (batch, heads).

    `band` says for which masks it is there: all of them, those without a window, or windows only.
    """

    name: str
    law: str
    per: tuple[str, ...]
    band: Band = "any"

    @property
    def term(self) -> Term:
        """The powers of n, d and w."""
        return parse(self.law).terms[0]


def _floor() -> Candidate:
    return Candidate(name=FLOOR, law="1", per=())


def _of(per: tuple[str, ...], *laws: str, band: Band = "any") -> tuple[Candidate, ...]:
    return tuple(Candidate(name=law, law=law, per=per, band=band) for law in laws)


def _per_head(*laws: str, band: Band = "any") -> tuple[Candidate, ...]:
    """What each head pays once more, whatever its dim: softmax, traffic of the scores."""
    per = ("batch", "heads")
    return tuple(Candidate(name=f"H {law}", law=law, per=per, band=band) for law in laws)


_EACH_HEAD = ("batch", "heads")  # of attention, where d is the head dim
_WIDTH = ("batch",)  # where d is the model width, in which the heads are contained


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the model of a workload is made of.

    `d` is the property of a case that d stands for; `overtakes` says that terms in n² overtake
    those of its projections at some n.
    """

    d: Literal["head_dim", "model_width"]
    candidates: tuple[Candidate, ...]
    overtakes: bool = False


# A new workload is one row. Where a window is given, n w d takes the place of n d, which is the
# same but for a factor; at n below the window w is n.
TERMS: dict[str, Terms] = {
    "attention": Terms(
        d="head_dim",
        candidates=(
            _floor(),
            *_of(_EACH_HEAD, "n d", band="full"),
            *_of(_EACH_HEAD, "n w d", band="window"),
            *_per_head("n w", band="window"),
            *_of(_EACH_HEAD, "n d^2"),
            *_per_head("n^2"),
            *_of(_EACH_HEAD, "n^2 d"),
        ),
    ),
    "layer": Terms(
        d="model_width",
        overtakes=True,
        candidates=(
            _floor(),
            *_of((), "d^2"),  # the weights are read once, however many tokens there are
            *_of(_WIDTH, "n d", band="full"),
            *_of(_WIDTH, "n w d", band="window"),
            *_per_head("n w", band="window"),
            *_of(_WIDTH, "n d^2"),
            *_per_head("n^2"),
            *_of(_WIDTH, "n^2 d"),
        ),
    ),
    "decode": Terms(
        d="model_width",
        candidates=(
            _floor(),
            *_of(_WIDTH, "d^2", "n d"),
            *_of(_WIDTH, "w d", band="window"),
            *_per_head("n"),
            *_of(_WIDTH, "n d^2"),
            *_per_head("n^2"),
            *_of(_WIDTH, "n^2 d"),
        ),
    ),
    # A step costs something however narrow the network is: n steps one after another.
    "recurrent": Terms(
        d="model_width",
        candidates=(_floor(), *_of((), "n"), *_of(_WIDTH, "n d", "n d^2", "n^2 d")),
    ),
}


def candidates(workload: str, *, window: bool) -> tuple[Candidate, ...]:
    """The terms of a workload under a mask with or without a window."""
    band = "window" if window else "full"
    return tuple(item for item in TERMS[workload].candidates if item.band in ("any", band))


def design(terms: Sequence[Candidate], sizes: dict[str, Array]) -> Array:
    """Each term at each point, m × p. `sizes` has n, d, w, heads and batch of every point."""
    columns = [_column(term, sizes) for term in terms]
    return np.stack(columns, axis=1)


def _column(term: Candidate, sizes: dict[str, Array]) -> Array:
    product: Any = np.ones_like(sizes["n"])
    for name, power in term.term.powers:
        product = product * sizes[name] ** float(power)
    for name in term.per:
        product = product * sizes[name]
    return np.asarray(product, dtype=float)


def carriers(law: Law, terms: Sequence[Candidate]) -> dict[Term, list[int]]:
    """For each term of the law the candidates that speak for it, by index.

    Those of the same power in n (and w) and at most its power in d: n² stands for n²d where the
    softmax outweighs the products, and powers in d are upper bounds, since tiles change with d.
    One that two terms of the law could claim goes to the one that is nearest.
    """
    found: dict[Term, list[int]] = {term: [] for term in law.terms}
    for index, candidate in enumerate(terms):
        owners = [t for t in law.terms if not t.logs and _speaks_for(candidate, t)]
        if owners:
            found[min(owners, key=lambda term: term.degree("d"))].append(index)
    return found


def _speaks_for(candidate: Candidate, term: Term) -> bool:
    own = candidate.term
    if candidate.name == FLOOR or not term.powers:
        return candidate.name == FLOOR and not term.powers
    same = all(own.degree(name) == term.degree(name) for name in ("n", "w"))
    return same and own.degree("d") <= term.degree("d")


def surplus(law: Law, terms: Sequence[Candidate]) -> list[int]:
    """Candidates of a higher order than the law: no term of it grows as fast in each variable."""
    return [
        index
        for index, candidate in enumerate(terms)
        if not any(_bounds(term, candidate.term) for term in law.terms)
    ]


def _bounds(term: Term, other: Term) -> bool:
    """True where `other` grows no faster than `term`; a window is at most n."""
    orders = ((t.degree("n"), t.degree("n") + t.degree("w"), t.degree("d")) for t in (other, term))
    return all(below <= above for below, above in zip(*orders, strict=True))


def expected_shares(law: Law, sizes: dict[str, Array]) -> dict[Term, Array]:
    """Each term's part of the law at every point, each counted once: what theory lets one see."""
    values = {
        term: np.array(
            [
                term.value({name: float(sizes[name][i]) for name in ("n", "d", "w")})
                for i in range(len(sizes["n"]))
            ]
        )
        for term in law.terms
    }
    total = sum(values.values())
    return {term: value / total for term, value in values.items()}
